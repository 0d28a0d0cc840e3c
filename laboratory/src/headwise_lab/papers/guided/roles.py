"""What each role is worth: a figure of Wang et al. 2021."""

import re
from collections.abc import Mapping, Sequence

from headwise.plots.style import assign_styles, drawing, to_png
from headwise_lab.experiment.arm import ROLES
from headwise_lab.papers.claims import Judged
from headwise_lab.results.cells import show_signed
from headwise_lab.results.figures import Picture
from headwise_lab.results.statistics import Estimate
from headwise_lab.results.table import PLAIN

WHOLE = "all five"
REPLACED = {
    "drop": "by the padding mask",
    "random": "by a random mask as sparse",
    "shuffled": "by the role in another parse",
}
# Distance between the marks of a row, as a share of that between rows.
APART = 0.2


def draw_role_worth(judged: Sequence[Judged]) -> Picture | None:
    """Return guided's mean lead over itself with a role replaced, a row a role, and over plain; None without any.

    Args:
        judged: Claims whose contrasts are guided over `guided:drop=ROLE` and its like, and over plain.
    """
    found: dict[str, dict[str, Estimate]] = {}
    over: tuple[str, ...] = ()
    for one in (one for claim in judged for one in claim.found):
        what = _parse_replaced(one.contrast.against)
        if one.contrast.arm == "guided" and what is not None and one.estimate is not None:
            role, kind = what
            found.setdefault(kind, {})[role] = one.estimate
            over = one.contrast.over
    if not found:
        return None
    rows, style = [WHOLE, *ROLES], assign_styles([*REPLACED])
    with drawing(7.2, 4.6) as figure:
        axes = figure.subplots()
        axes.axvline(0, color="black", linewidth=1.2)
        for kind in (kind for kind in REPLACED if kind in found):
            of = found[kind]
            axes.errorbar(
                [100 * one.value for one in of.values()],
                [rows.index(role) + _shift_mark(role, kind, found) for role in of],
                xerr=[
                    [100 * (one.value - one.low) for one in of.values()],
                    [100 * (one.high - one.value) for one in of.values()],
                ],
                color=style[kind].color,
                marker=style[kind].marker,
                linestyle="none",
                markersize=6,
                elinewidth=1.5,
                label=REPLACED[kind],
            )
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_xlabel("accuracy lost when the role is replaced, points")
        figure.legend(loc="outside upper left", ncols=3, frameon=False)
        png = to_png(figure)
    alt = "; ".join(
        f"{role} replaced {REPLACED[kind]}: {show_signed(100 * one.value)} points"
        for kind, of in found.items()
        for role, one in of.items()
    )
    caption = (
        "What each role is worth: guided's accuracy less that of the same model with one role replaced, or with all "
        f"five (plain), mean of {', '.join(over)}, with 95 % intervals over seeds and test items. Right of zero the "
        "role helps."
    )
    return Picture("roles", png, caption, alt)


def _shift_mark(role: str, kind: str, found: Mapping[str, Mapping[str, Estimate]]) -> float:
    """Return how far below the middle of its row a mark is."""
    there = [one for one in REPLACED if role in found.get(one, {})]
    return APART * (there.index(kind) - (len(there) - 1) / 2)


def _parse_replaced(against: str) -> tuple[str, str] | None:
    """Return the role that an arm of the ablation lacks, and how it was replaced.

    >>> _parse_replaced("guided:random=rare"), _parse_replaced("plain"), _parse_replaced("cnn")
    (('rare', 'random'), ('all five', 'drop'), None)
    """
    if against == PLAIN:
        return WHOLE, "drop"
    found = re.fullmatch(r"guided:(drop|random|shuffled)=(\w+)", against)
    return None if found is None else (found[2], found[1])
