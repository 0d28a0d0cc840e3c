"""The scores of GLUE as one metric: accuracy, Matthews or Spearman correlation, whichever a set is judged by.

Owns the share of each test item in the score, so that sets of all three kinds are compared, resampled and averaged
alike. The scores themselves are scikit-learn's and scipy's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ShapeError

ACCURACY, MATTHEWS, SPEARMAN = range(3)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class GlueScore:
    """A set's score, of which each item has a share; an item's statistics are [kind of score, answer, truth].

    Matthews correlation is a function f of the four counts S that does not change with their scale, and an item with
    counts s has f + N grad f . s. Spearman correlation has the influence function

        IF(x, y) = -3 rho - 9 + 12 (F(x) G(y) + E[F(X) 1{Y >= y}] + E[G(Y) 1{X >= x}])

    (Croux and Dehon 2010), F and G the mid-ranks over N, and an item has rho + IF less the mean of IF. The values' mean
    is the score; their spread is that of the score under resampling of items, to first order.
    """

    name: str = "GLUE score"
    unit: str = ""
    least: float = -1.0
    own_test: bool = False

    def values(self, statistics: NDArray) -> Array:
        """Return the share of each item, [N], from statistics [N, 3].

        >>> GlueScore().values(np.array([[0, 1, 1], [0, 1, 0]])).tolist()
        [1.0, 0.0]
        """
        if statistics.ndim != 2 or statistics.shape[1] != 3:
            raise ShapeError(f"statistics have shape {statistics.shape}; expected kind, answer and truth, (N, 3).")
        kind, (answers, truth) = int(statistics[0, 0]), statistics[:, 1:].astype(np.float64).T
        if kind == ACCURACY:
            return (answers == truth).astype(np.float64)
        return _matthews(answers, truth) if kind == MATTHEWS else _spearman(answers, truth)


def glue_score(kind: int, answers: NDArray, truth: NDArray) -> float:
    """Return a score of answers; 0 where all answers are one and the score is a correlation.

    >>> glue_score(MATTHEWS, np.array([1, 0, 1]), np.array([1, 0, 1]))
    1.0
    """
    # both take seconds to import
    if kind == ACCURACY:
        from sklearn.metrics import accuracy_score

        return float(accuracy_score(truth, answers))
    if kind == MATTHEWS:
        from sklearn.metrics import matthews_corrcoef

        return float(matthews_corrcoef(truth, answers))
    from scipy.stats import spearmanr

    if np.ptp(answers) == 0.0 or np.ptp(truth) == 0.0:
        return 0.0
    found: Any = spearmanr(answers, truth)
    return float(found.statistic)


def _matthews(answers: Array, truth: Array) -> Array:
    called, right = answers > 0.5, truth > 0.5
    cells = np.stack([called & right, ~called & ~right, called & ~right, ~called & right]).astype(np.float64)
    tp, tn, fp, fn = cells.sum(axis=1)
    sums = np.array([tp + fp, tp + fn, tn + fp, tn + fn])
    if not sums.all():
        return np.zeros(len(answers))
    root = float(np.sqrt(sums.prod()))
    score = (tp * tn - fp * fn) / root
    products = np.array([tn, tp, -fn, -fp]) / root
    # each count stands in two of the four sums
    inside = np.array([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 0, 1]]) / sums
    gradient = products - 0.5 * score * inside.sum(axis=1)
    return score + len(answers) * (gradient @ cells)


def _spearman(answers: Array, truth: Array) -> Array:
    from scipy.stats import rankdata

    count, score = len(answers), glue_score(SPEARMAN, answers, truth)
    if np.ptp(answers) == 0.0 or np.ptp(truth) == 0.0:
        return np.zeros(count)
    first, second = ((rankdata(values) - 0.5) / count for values in (answers, truth))
    influence = first * second + _mean_above(first, second) + _mean_above(second, first)
    return score + 12 * (influence - influence.mean())


def _mean_above(values: Array, ranks: Array) -> Array:
    """Return E[values 1{ranks >= r}] for each r of ranks."""
    order = np.argsort(ranks, kind="stable")
    sums = np.append(np.cumsum(values[order][::-1])[::-1], 0.0)
    return sums[np.searchsorted(ranks[order], ranks, side="left")] / len(ranks)
