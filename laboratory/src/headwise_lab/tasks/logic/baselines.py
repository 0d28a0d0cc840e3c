"""The baselines of the logical inference task: the most frequent label, and token counts."""

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier
from threadpoolctl import threadpool_limits

from headwise.errors import require_integer
from headwise_lab.data.arrays import Ragged
from headwise_lab.tasks.logic.data import LogicSplit


def majority(train: LogicSplit, test: LogicSplit) -> NDArray[np.int64]:
    """Return the most frequent training label for every test item, [N]; of equally frequent ones the first."""
    return np.full(len(test), np.bincount(train.labels).argmax(), dtype=np.int64)


def counts(train: LogicSplit, test: LogicSplit, vocabulary_size: int, *, seed: int) -> NDArray[np.int64]:
    """Return the predictions of gradient boosting on the token counts of each side, [N].

    It does not see the order of tokens, so its score is what can be had without understanding formulas. It has
    scikit-learn's default settings.

    Args:
        train: Pairs to fit on.
        test: Pairs to predict.
        vocabulary_size: Number of token ids.
        seed: Seed of the fit.

    Raises:
        SettingError: The seed is negative or the vocabulary empty.
    """
    require_integer("seed", seed)
    require_integer("vocabulary_size", vocabulary_size, low=1)
    model = HistGradientBoostingClassifier(random_state=seed)
    # thousands of short parallel regions are slow with many threads on a busy machine
    with threadpool_limits(1):
        model.fit(_features(train, vocabulary_size), train.labels)
        return model.predict(_features(test, vocabulary_size)).astype(np.int64)


def token_counts(sequences: Ragged, vocabulary_size: int) -> NDArray[np.float32]:
    """Return how often each token occurs in each sequence, [N, T].

    >>> token_counts(Ragged.of([[1, 2, 1], []]), 3).tolist()
    [[0.0, 2.0, 1.0], [0.0, 0.0, 0.0]]
    """
    rows = np.repeat(np.arange(len(sequences)), sequences.lengths)
    cells = rows * vocabulary_size + sequences.values
    flat = np.bincount(cells, minlength=len(sequences) * vocabulary_size)
    return flat.reshape(len(sequences), vocabulary_size).astype(np.float32)


def _features(split: LogicSplit, vocabulary_size: int) -> NDArray[np.float32]:
    return np.hstack([token_counts(side, vocabulary_size) for side in (split.premises, split.hypotheses)])
