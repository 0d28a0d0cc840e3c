"""Whether training was long enough: the score of plain on dev by epoch, and what the last third of the epochs added."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.lab.results.cells import Number
from headwise.lab.results.statistics import Estimate, estimate
from headwise.lab.results.table import PLAIN

# Fewer epochs have no last third.
EPOCHS = 3


def describe_plateau(table: Mapping[str, Any]) -> str:
    """Return the scores of plain on dev by epoch, from the record of a table; "" where there are too few epochs."""
    curves = _read_curves(table)
    if curves is None:
        return ""
    epochs = ", ".join(str(Number(value, digits=1, factor=100)) for value in curves.mean(axis=0))
    return f"Plain on dev by epoch, mean over seeds: {epochs}. {describe_rise(table)}"


def describe_rise(table: Mapping[str, Any]) -> str:
    """Return what the last third of the epochs added to plain's best score on dev, and if it rises, that it does."""
    curves = _read_curves(table)
    if curves is None:
        return ""
    found = find_rise(curves)
    state = "Plain still rises" if found.low > 0.0 else "Plain rises no more"
    added = Number(found.value, found.low, found.high, digits=2, factor=100, signed=True)
    return f"{state} on dev: the last third of its epochs added {added} points to its best."


def find_rise(curves: NDArray[np.float64]) -> Estimate:
    """Return the best score of the last third of the epochs less the best one before, over seeds.

    Args:
        curves: Scores on dev, [S, E], one row per seed.

    >>> find_rise(np.array([[0.2, 0.5, 0.6], [0.3, 0.6, 0.5]])).by_seed
    (0.09999999999999998, -0.09999999999999998)
    """
    last = -(-curves.shape[1] // 3)
    return estimate((curves[:, -last:].max(axis=1) - curves[:, :-last].max(axis=1))[:, None])


def _read_curves(table: Mapping[str, Any]) -> NDArray[np.float64] | None:
    runs = next((row["runs"] for row in table["rows"] if row["arm"] == PLAIN), [])
    lengths = {len(run["dev"]) for run in runs}
    return np.array([run["dev"] for run in runs]) if len(lengths) == 1 and min(lengths) >= EPOCHS else None
