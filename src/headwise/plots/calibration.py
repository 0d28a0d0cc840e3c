"""Figures of calibration: the reliability diagram, and the entropy of predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.errors import SettingError, require_integer
from headwise.metrics.calibration import Reliability
from headwise.plots.style import GRAY, assign_styles, draw_range, drawing, require_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Points of a cumulative distribution.
STEPS = 201
# Area of the largest dot, a bin with all items, in square points.
LARGEST = 260.0


def reliability_diagram(models: Mapping[str, Sequence[Reliability]], *, reference: str = "") -> Figure:
    """Return a reliability diagram, accuracy against confidence by bin, with ECE and OE (An et al. 2020, Figure 4).

    Args:
        models: Maps a name to one `Reliability` per run (`headwise.metrics.reliability`). Left, the bins of all runs
            pooled; the area of a dot is the share of items. Right, one dot per run and a bar for their mean.
        reference: The name drawn in black.

    Returns:
        A figure; `savefig` writes it.

    Raises:
        SettingError: There is nothing to draw, or runs have different bins.

    Example:
        >>> from headwise.metrics.calibration import reliability
        >>> runs = [reliability(torch.tensor([0.9, 0.6]), torch.tensor([True, False]))]
        >>> len(reliability_diagram({"MA": runs}, reference="MA").axes)
        2
    """
    require_curves("models", models)
    style = assign_styles(list(models), reference=reference if reference in models else "")
    with drawing(8.4, 4.4) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
        left.plot([0, 1], [0, 1], color=GRAY, linewidth=1.0, linestyle=(0, (4, 3)), zorder=0)
        low, width = 1.0, 0.8 / len(models)
        for place, (name, runs) in enumerate(models.items()):
            together = runs[0]
            for run in runs[1:]:
                together = together + run
            total = sum(together.counts)
            look = style[name]
            places = [confidence for confidence, _, _ in together.bins]
            heights = [accuracy for _, accuracy, _ in together.bins]
            low = min([low, *places])
            left.plot(places, heights, color=look.color, linestyle=look.dash, linewidth=1.2, alpha=0.7)
            areas = [12 + LARGEST * count / total for _, _, count in together.bins]
            left.scatter(places, heights, s=areas, color=look.color, marker=look.marker, alpha=0.6, linewidths=0)
            # a legend entry with a dot of fixed size
            left.plot([], [], color=look.color, linestyle=look.dash, marker=look.marker, markersize=6, label=name)
            for group, values in enumerate(([run.ece for run in runs], [run.oe for run in runs])):
                x = group + width * (place - (len(models) - 1) / 2)
                right.bar(x, fmean(values), width=0.9 * width, color=look.color, alpha=0.55, linewidth=0)
                if len(values) > 1:
                    right.scatter([x] * len(values), values, s=14, color=look.color, marker=look.marker)
        left.set_xlim(max(0.0, low - 0.05), 1.02)
        left.set_ylim(-0.02, 1.02)
        left.set_xlabel("confidence: mean probability of the predicted class")
        left.set_ylabel("accuracy")
        left.annotate("underconfident", (0.03, 0.95), xycoords="axes fraction", color=GRAY, fontsize=9)
        left.annotate("overconfident", (0.97, 0.04), xycoords="axes fraction", color=GRAY, fontsize=9, ha="right")
        right.set_xticks([0, 1], ["ECE", "OE"])
        right.grid(visible=False, axis="x")
        right.set_ylabel("error (lower is better)")
        right.set_ylim(bottom=0)
        figure.legend(loc="outside upper left", ncols=4, frameon=False)
    return figure


def entropy_cdf(
    entropies: Mapping[str, Sequence[Tensor]], *, classes: int, text: str = "", reference: str = ""
) -> Figure:
    """Return the cumulative distribution of the entropy of predictions (An et al. 2020, Figure 5).

    Curves toward the bottom right belong to models that are rarely confident, as they should be on text of a class
    they were not trained on.

    Args:
        entropies: Maps a name to one tensor [N] per run, the entropy of each prediction in nats
            (`headwise.metrics.predictive_entropy`). A line is the mean over runs, its band their range.
        classes: Number of classes C; the axis ends at log C, a uniform prediction.
        text: Description of the data for the axis label.
        reference: The name drawn in black.

    Returns:
        A figure; `savefig` writes it.

    Raises:
        SettingError: There is nothing to draw, or an entropy is not in [0, log C].

    Example:
        >>> figure = entropy_cdf({"MA": [torch.tensor([0.1, 0.9])]}, classes=5, text="Age, for a model of Yelp")
        >>> figure.axes[0].get_xlabel()
        'entropy of the prediction, nats; Age, for a model of Yelp'
    """
    require_integer("classes", classes, low=2)
    require_curves("entropies", entropies)
    end = math.log(classes)
    entropies = {name: [torch.as_tensor(run, dtype=torch.float64) for run in runs] for name, runs in entropies.items()}
    for name, runs in entropies.items():
        for run in runs:
            if run.dim() != 1 or not len(run) or not ((run >= -1e-6) & (run <= end + 1e-4)).all():
                raise SettingError(
                    f"entropies of {name} have shape {tuple(run.shape)} and lie between "
                    f"{float(run.min()) if run.numel() else math.nan:g} and "
                    f"{float(run.max()) if run.numel() else math.nan:g}; expected [N] in [0, log {classes}]."
                )
    places = torch.linspace(0, end, STEPS, dtype=torch.float64)
    # rounding may leave a value slightly above the last place, log C
    edges = places + 1e-4 * (places == places[-1])
    style = assign_styles(list(entropies), reference=reference if reference in entropies else "")
    with drawing(6.6, 4.4) as figure:
        axes = figure.subplots()
        for name, runs in entropies.items():
            ordered = [run.detach().cpu().sort().values for run in runs]
            shares = torch.stack([torch.searchsorted(one, edges, side="right").double() / len(one) for one in ordered])
            low, middle, high = (share.tolist() for share in (shares.amin(0), shares.mean(0), shares.amax(0)))
            draw_range(axes, places.tolist(), low, middle, high, replace(style[name], marker=""), label=name)
        axes.axvline(end, color=GRAY, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.annotate(
            f"uniform over {classes} classes",
            (end, 0.5),
            xytext=(-3, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="center",
            color=GRAY,
            fontsize=9,
        )
        axes.set_xlim(0, 1.03 * end)
        axes.set_ylim(0, 1.01)
        axes.set_xlabel("entropy of the prediction, nats" + (f"; {text}" if text else ""))
        axes.set_ylabel("share of items with at most this entropy")
        figure.legend(loc="outside upper left", ncols=3, frameon=False)
    return figure
