"""Logistic regression on naive Bayes log-count ratios, the baseline `nb-lr` (Wang and Manning 2012)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

# Occurs in no word, since words contain no white space.
BETWEEN = "\n"
SMOOTHING = 1.0
STRENGTH = 1.0


def naive_bayes_regression(
    train: Sequence[Sequence[str]], test: Sequence[Sequence[str]], labels: NDArray[np.int64], *, seed: int
) -> NDArray[np.float64]:
    """Return the probability of each class, [N, C], of each text to predict.

    Features are the presence of words and of pairs of neighboring words, each times r = log((p / |p|) / (q / |q|)),
    with p and q the counts plus one in texts of a class and of all others. There is one regression per class, and their
    probabilities are normalized.

    Args:
        train: Words of the training texts.
        test: Words of the texts to predict.
        labels: Class of each training text, 0 to C - 1.
        seed: Seed of the fit.

    >>> texts = [["good"], ["very", "good"], ["bad"], ["very", "bad"]]
    >>> found = naive_bayes_regression(texts, [["bad", "bad"]], np.array([1, 1, 0, 0]), seed=0)
    >>> found.shape, bool(found[0, 0] > 0.5)
    ((1, 2), True)
    """
    vectorizer = CountVectorizer(lowercase=False, token_pattern=f"[^{BETWEEN}]+", ngram_range=(1, 2), binary=True)
    known: Any = vectorizer.fit_transform([BETWEEN.join(words) for words in train])
    unseen: Any = vectorizer.transform([BETWEEN.join(words) for words in test])
    classes = int(labels.max()) + 1
    found = np.zeros((len(test), classes))
    with threadpool_limits(1):
        # two classes need one regression
        for one in range(1 if classes == 2 else 0, classes):
            ratio = compute_log_ratios(known, labels == one)
            model = LogisticRegression(C=STRENGTH, max_iter=1000, random_state=seed)
            model.fit(known.multiply(ratio).tocsr(), labels == one)
            found[:, one] = model.predict_proba(unseen.multiply(ratio).tocsr())[:, 1]
    if classes == 2:
        found[:, 0] = 1.0 - found[:, 1]
    return found / found.sum(axis=1, keepdims=True)


def compute_log_ratios(features: Any, positive: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return r [F] of sparse binary features [N, F], given which of the N texts are of the class.

    >>> from scipy.sparse import csr_matrix
    >>> compute_log_ratios(csr_matrix([[1.0, 0.0], [1.0, 1.0]]), np.array([True, False])).round(3).tolist()
    [0.288, -0.405]
    """
    inside, outside = (SMOOTHING + np.asarray(features[chosen].sum(axis=0)).ravel() for chosen in (positive, ~positive))
    return np.log(inside / inside.sum()) - np.log(outside / outside.sum())
