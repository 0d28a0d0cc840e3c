"""Baselines of text classification: linear models of which words, and pairs of words, occur."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import MultinomialNB
from threadpoolctl import threadpool_limits

Words = Sequence[Sequence[str]]
# Words hold no white space, so it is in none.
BETWEEN = "\n"
SPLIT: dict[str, Any] = {"lowercase": False, "token_pattern": f"[^{BETWEEN}]+"}
SMOOTHING = 1.0


def counts(train: Words, test: Words, labels: NDArray[np.int64], *, seed: int) -> NDArray[np.int64]:
    """Return the class that logistic regression predicts from words and pairs of neighbors, [N].

    Words are weighted by tf-idf with the frequencies of the training texts; other settings are scikit-learn's defaults.

    Args:
        train: Words of the training texts.
        test: Words of the texts to predict.
        labels: Class of each training text.
        seed: Seed of the fit.

    >>> counts([["good"], ["bad"]], [["bad", "bad"]], np.array([1, 0]), seed=0).tolist()
    [0]
    """
    known, unseen = _extract(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, **SPLIT), train, test)
    model = LogisticRegression(C=10.0, max_iter=1000, random_state=seed)
    with threadpool_limits(1):
        return np.asarray(model.fit(known, labels).predict(unseen)).astype(np.int64)


def naive_bayes(train: Words, test: Words, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the class that naive Bayes predicts from the words alone, [N], with scikit-learn's defaults.

    Arguments are as for `counts`.

    >>> naive_bayes([["good"], ["bad"]], [["bad", "bad"]], np.array([1, 0])).tolist()
    [0]
    """
    known, unseen = _extract(CountVectorizer(**SPLIT), train, test)
    return np.asarray(MultinomialNB().fit(known, labels).predict(unseen)).astype(np.int64)


def naive_bayes_regression(train: Words, test: Words, labels: NDArray[np.int64], *, seed: int) -> NDArray[np.float64]:
    """Return the probability of each class, [N, C], by regression on naive Bayes ratios (Wang and Manning 2012).

    Features are the presence of words and of pairs of neighboring words, each times r = log((p / |p|) / (q / |q|)),
    with p and q the counts plus one in texts of a class and of all others. There is one regression per class, and their
    probabilities are normalized. Arguments are as for `counts`, with labels from 0 to C - 1.

    >>> texts = [["good"], ["very", "good"], ["bad"], ["very", "bad"]]
    >>> found = naive_bayes_regression(texts, [["bad", "bad"]], np.array([1, 1, 0, 0]), seed=0)
    >>> found.shape, bool(found[0, 0] > 0.5)
    ((1, 2), True)
    """
    known, unseen = _extract(CountVectorizer(ngram_range=(1, 2), binary=True, **SPLIT), train, test)
    classes = int(labels.max()) + 1
    found = np.zeros((len(test), classes))
    with threadpool_limits(1):
        # two classes need one regression
        for one in range(1 if classes == 2 else 0, classes):
            ratio = compute_log_ratios(known, labels == one)
            model = LogisticRegression(max_iter=1000, random_state=seed)
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


def _extract(features: Any, train: Words, test: Words) -> tuple[Any, Any]:
    known, unseen = ([BETWEEN.join(words) for words in texts] for texts in (train, test))
    return features.fit_transform(known), features.transform(unseen)
