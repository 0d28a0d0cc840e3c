"""Baselines of text classification: linear models of which words, and pairs of words, occur."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import MultinomialNB
from threadpoolctl import threadpool_limits

# Words hold no white space, so it is in none.
BETWEEN = "\n"


def counts(
    train: Sequence[Sequence[str]], test: Sequence[Sequence[str]], labels: NDArray[np.int64], *, seed: int
) -> NDArray[np.int64]:
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
    features = TfidfVectorizer(lowercase=False, token_pattern=f"[^{BETWEEN}]+", ngram_range=(1, 2), sublinear_tf=True)
    model = LogisticRegression(C=10.0, max_iter=1000, random_state=seed)
    with threadpool_limits(1):
        model.fit(features.fit_transform([BETWEEN.join(words) for words in train]), labels)
        predicted = model.predict(features.transform([BETWEEN.join(words) for words in test]))
    return np.asarray(predicted).astype(np.int64)


def naive_bayes(
    train: Sequence[Sequence[str]], test: Sequence[Sequence[str]], labels: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the class that naive Bayes predicts from the words alone, [N], with scikit-learn's defaults.

    Args:
        train: Words of the training texts.
        test: Words of the texts to predict.
        labels: Class of each training text.

    >>> naive_bayes([["good"], ["bad"]], [["bad", "bad"]], np.array([1, 0])).tolist()
    [0]
    """
    features = CountVectorizer(lowercase=False, token_pattern=f"[^{BETWEEN}]+")
    model = MultinomialNB()
    model.fit(features.fit_transform([BETWEEN.join(words) for words in train]), labels)
    return np.asarray(model.predict(features.transform([BETWEEN.join(words) for words in test]))).astype(np.int64)
