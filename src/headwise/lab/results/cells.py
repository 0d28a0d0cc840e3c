"""How a number looks in a table, once for every place it is shown.

Owns digits, signs and dashes. Must not know which numbers a table has.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwise.lab.results.statistics import Estimate
from headwise.lab.results.table import Difference

NONE = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def percent(found: Estimate, *, interval: bool = True) -> str:
    """Return a score times 100.

    >>> percent(Estimate(0.9812, 0.976, 0.9864, 0.001, seeds=5, items=100))
    '98.1 ±0.5'
    """
    value = f"{100 * found.value:.1f}"
    return f"{value} ±{100 * _half(found):.1f}" if interval else value


def points(found: Difference | None) -> str:
    """Return a difference in percentage points with its sign, or a dash.

    >>> points(Difference("plain", Estimate(-0.0123, -0.02, -0.0046, 0.01, seeds=5, items=100)))
    '−1.2 ±0.8'
    """
    if found is None:
        return NONE
    return f"{signed(100 * found.estimate.value)} ±{100 * _half(found.estimate):.1f}"


def signed(value: float) -> str:
    """Return a number with one decimal and a sign, the typographic minus; what rounds to zero has none.

    >>> signed(1.26), signed(-0.5), signed(-0.04)
    ('+1.3', '−0.5', '0.0')
    """
    text = f"{value:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", MINUS)


def p_range(values: Sequence[float]) -> str:
    """Return the lowest and the highest of some p-values, which belong to different runs and are not one.

    >>> p_range([0.2104, 0.00012, 0.034]), p_range([0.034])
    ('<0.001 to 0.210', '0.034')
    """
    ends = dict.fromkeys("<0.001" if value < 0.0005 else f"{value:.3f}" for value in (min(values), max(values)))
    return " to ".join(ends)


def number(value: float | None) -> str:
    """Return a measure with three digits that count, or a dash.

    >>> number(0.98765), number(12.345), number(0.000123), number(-0.25), number(None)
    ('0.988', '12.3', '0.00012', '−0.250', '–')
    """
    if value is None:
        return NONE
    digits = ".2g" if 0 < abs(value) < 0.01 else ".3f" if abs(value) < 10 else ".1f"
    return f"{value:{digits}}".replace("-", MINUS)


def _half(found: Estimate) -> float:
    # an interval cut at 0 or 1 is one-sided there
    return max(found.high - found.value, found.value - found.low)
