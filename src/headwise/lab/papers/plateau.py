"""Whether training was long enough: the score of plain on dev by epoch, and what the last third of epochs added."""

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
    scores = ", ".join(str(Number(value, digits=1, factor=100)) for value in curves.mean(axis=0))
    return f"Score of plain on dev after each epoch, mean over seeds: {scores}. {_describe(curves)}"


def describe_rise(table: Mapping[str, Any]) -> str:
    """Return what the last third of the epochs added to plain's best score on dev, and whether it is above zero."""
    curves = _read_curves(table)
    return "" if curves is None else _describe(curves)


def find_rise(curves: NDArray[np.float64]) -> Estimate:
    """Return the best score of the last third of the epochs, rounded down, less the best one before, over seeds.

    Args:
        curves: Scores on dev, [S, E], one row per seed.

    >>> find_rise(np.array([[0.2, 0.5, 0.6], [0.3, 0.6, 0.5]])).by_seed
    (0.09999999999999998, -0.09999999999999998)
    """
    last = curves.shape[1] // 3
    return estimate((curves[:, -last:].max(axis=1) - curves[:, :-last].max(axis=1))[:, None])


def _describe(curves: NDArray[np.float64]) -> str:
    found, epochs = find_rise(curves), curves.shape[1]
    last = "The last epoch" if epochs // 3 == 1 else f"The last {epochs // 3} of {epochs} epochs"
    ends = (None, None) if found.is_one_number else (found.low, found.high)
    added = Number(found.value, *ends, digits=2, factor=100, signed=True)
    state = "" if found.is_one_number else "; it still rose" if found.low > 0.0 else "; no further rise is shown"
    return f"{last} added {added} points to plain's best score on dev{state}."


def _read_curves(table: Mapping[str, Any]) -> NDArray[np.float64] | None:
    runs = next((row["runs"] for row in table["rows"] if row["arm"] == PLAIN), [])
    lengths = {len(run["dev"]) for run in runs}
    return np.array([run["dev"] for run in runs]) if len(lengths) == 1 and min(lengths) >= EPOCHS else None
