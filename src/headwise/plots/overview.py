"""One figure of a report: one panel per measure, one dot per head, and a line through the means of the layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from headwise.errors import SettingError
from headwise.plots.style import GRAY, Style, drawing_panels
from headwise.report.layer import LayerReport
from headwise.report.report import Comparison, Report
from headwise.report.tables import name_layer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOW, BEFORE = Style("#0072B2", "o", "-"), Style(GRAY, "s", (0, (5, 1.5)))
# Largest number of layer names that fit under a panel.
NAMED = 12
COLUMNS = 3


@dataclass(frozen=True)
class _Panel:
    title: str
    values: Callable[[LayerReport], Sequence[float]]
    # expected value per layer under a random mask
    expected: Callable[[LayerReport], float] | None = None


def overview(report: Report, *, before: Report | None = None, labels: tuple[str, str] = ("before", "now")) -> Figure:
    """Return one figure of a report: how similar the heads are, where they attend, what each contributes.

    One panel for each measure in the report: effective heads of each layer, debiased CKA of each head's contribution
    with those of the other heads (mean over pairs; linear CKA of outputs where W_O is not known), Jensen-Shannon
    divergence from their attention and entropy of attention, both in nats, drop of the score without the head, and
    share of attention on each role's pairs, with the share of an equally sparse random mask dotted. One dot per head;
    the line connects the layer means.

    Args:
        report: A report that `hw.measure` returned.
        before: A second report of the same modules and heads, drawn in gray where it has the measure, of the same
            score or role.
        labels: Legend labels of `before` and `report`.

    Returns:
        A figure; `savefig` writes it.

    Raises:
        SettingError: The two reports have different attention modules or numbers of heads, or the report holds none
            of the measures.

    Example:
        >>> from headwise.report.report import Report
        >>> from headwise.report.layer import LayerReport
        >>> layer = LayerReport("attn", "self", "", 0, 2, entropy=(1.5, 0.75))
        >>> [axes.get_title(loc="left") for axes in overview(Report("Model", 1, 12, (layer,))).axes]
        ['entropy of attention, nats']
    """
    kinds = [panel for panel in _make_panels(report) if any(panel.values(layer) for layer in report.layers)]
    reports = [(report, kinds, NOW, labels[1])]
    if before is not None:
        Comparison(before, report)
        reports.insert(0, (before, _make_panels(before), BEFORE, labels[0]))
    if not kinds:
        raise SettingError(
            f"the report of {report.model} holds nothing to draw; expected heads that are more than one a module, "
            "attention weights, a score or roles."
        )
    shifts = [0.0] if before is None else [-0.12, 0.12]
    with drawing_panels(len(kinds), COLUMNS, panel=(3.3, 2.5), margin=(1.0, 0.7)) as (figure, places):
        for axes, panel in zip(places, kinds, strict=True):
            for shift, (shown, own, style, name) in zip(shifts, reports, strict=True):
                # a title has the name of the score or of the role, which another report may not have
                for same in [one for one in own if one.title == panel.title]:
                    _draw(axes, same, shown, style, shift, label=name)
            if panel.expected is not None:
                found = [panel.expected(layer) for layer in report.layers]
                low, high = ([place + side for place in range(len(found))] for side in (-0.4, 0.4))
                axes.hlines(
                    found, low, high, color="#000000", linestyle=":", linewidth=1.2, label="a random mask as sparse"
                )
            axes.set_title(panel.title, fontsize=10, loc="left")
            named = range(0, len(report.layers), math.ceil(len(report.layers) / NAMED))
            axes.set_xticks(list(named), [name_layer(report.layers[place]) for place in named])
            axes.set_xlim(-0.6, len(report.layers) - 0.4)
            axes.grid(visible=False, axis="x")
        figure.supxlabel("layer", fontsize=10)
        legend = {
            label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if len(legend) > 1:
            figure.legend(legend.values(), legend.keys(), loc="outside upper left", ncols=3, frameon=False)
    return figure


def _make_panels(report: Report) -> list[_Panel]:
    return [
        _Panel("effective heads", lambda layer: () if layer.effective_heads is None else (layer.effective_heads,)),
        _Panel(
            "CKA with the other heads",
            lambda layer: layer.of_heads("contribution_cka") or layer.of_heads("output_cka"),
        ),
        _Panel("divergence of attention, nats", lambda layer: layer.of_heads("attention_js")),
        _Panel("entropy of attention, nats", lambda layer: layer.entropy),
        _Panel(f"fall of {report.score} without the head", lambda layer: [drop.value for drop in layer.drops]),
        *(
            _Panel(
                f"attention on {name}",
                lambda layer, place=place: layer.roles[place] if layer.roles else (),
                lambda layer, place=place: layer.chance[place] if layer.chance else math.nan,
            )
            for place, name in enumerate(report.roles)
        ),
    ]


def _draw(axes: Axes, panel: _Panel, report: Report, style: Style, shift: float, *, label: str) -> None:
    found = [(place, values) for place, layer in enumerate(report.layers) if (values := panel.values(layer))]
    dots = [(place + shift, value) for place, values in found for value in values]
    axes.scatter(*zip(*dots, strict=True), s=14, color=style.color, marker=style.marker, alpha=0.5, linewidths=0)
    places, means = [place for place, _ in found], [fmean(values) for _, values in found]
    axes.plot(places, means, color=style.color, linestyle=style.dash, linewidth=1.8, label=label)
