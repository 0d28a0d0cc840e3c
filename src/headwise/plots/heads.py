"""Figures of heads: their similarity, the cost of removing each, and a map of their outputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.errors import SettingError, require_integer
from headwise.metrics.heads import output_cosine
from headwise.plots.style import GRAY, assign_styles, draw_counts, drawing, drawing_panels, require_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headwise.caching.budget import KVBudget
    from headwise.plots.style import Style
    from headwise.shrinking.shrink import ShrinkPlan

# Approximate number of histogram bars.
BARS = 16
# The default of t-SNE expects hundreds of points.
PERPLEXITY = 5.0
# Largest numbers of heads whose cells have room for unsigned and for signed numbers.
NUMBERED, SIGNED = 12, 8


def head_similarity(matrices: Mapping[str, Tensor], *, measure: str, low: float = 0.0) -> Figure:
    """Return heatmaps of the similarity of each pair of heads.

    Args:
        matrices: Maps a name to a symmetric matrix [H, H], such as `OutputMoments.linear_cka_matrix()`.
        measure: Name of the measure, for example "linear CKA".
        low: Lowest possible value, 0 or -1; the highest is 1.

    Returns:
        A figure; `savefig` writes it.

    Raises:
        SettingError: There is nothing to draw, or a matrix is not square with values in [low, 1].

    Example:
        >>> figure = head_similarity({"layer 0": torch.eye(4)}, measure="linear CKA")
        >>> figure.axes[0].get_title(loc="left")
        'layer 0'
    """
    require_curves("matrices", matrices)
    matrices = {name: torch.as_tensor(matrix, dtype=torch.float64).detach() for name, matrix in matrices.items()}
    for name, matrix in matrices.items():
        square = matrix.dim() == 2 and matrix.shape[0] == matrix.shape[1]
        if not square or not ((matrix >= low - 1e-6) & (matrix <= 1 + 1e-6)).all():
            raise SettingError(
                f"the matrix of {name} has shape {tuple(matrix.shape)} and values from {float(matrix.min()):g} to "
                f"{float(matrix.max()):g}; expected [H, H] with values in [{low:g}, 1]."
            )
    with drawing_panels(len(matrices), 4, panel=(2.7, 2.7), margin=(0.9, 0.3)) as (figure, places):
        image = None
        for axes, (name, matrix) in zip(places, matrices.items(), strict=True):
            values = matrix.cpu().tolist()
            image = axes.imshow(values, cmap="RdBu_r" if low < 0 else "Blues", vmin=low, vmax=1.0)
            axes.grid(visible=False)
            axes.set_title(name, fontsize=10, loc="left")
            numbers = range(0, len(values), max(1, len(values) // 8))
            axes.set_xticks(numbers)
            axes.set_yticks(numbers)
            axes.tick_params(length=0)
            if len(values) > (SIGNED if low < 0 else NUMBERED):
                continue
            size = 5.5 + 14 / max(4, len(values)) ** 1.2
            for row, column in product(range(len(values)), repeat=2):
                value = values[row][column]
                color = "white" if value > 0.6 or (low < 0 and value < -0.6) else "#33373d"
                text = f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.0f}"
                text = text.replace("-", "\N{MINUS SIGN}")
                axes.text(column, row, text, ha="center", va="center", fontsize=size, color=color)
        figure.supxlabel("head", fontsize=10)
        figure.supylabel("head", fontsize=10)
        assert image is not None
        figure.colorbar(image, ax=places, label=measure, shrink=0.8)
    return figure


def ablation_histogram(
    costs: Mapping[str, Sequence[Sequence[float]]], *, axis: str, against: str = "", reference: str = ""
) -> Figure:
    """Return a histogram of the cost of removing each head (An et al. 2020, Figure 2).

    Args:
        costs: Maps a name to one sequence per model with the costs of its heads; bars are means over models.
        axis: Axis label with the unit, for example "fall in accuracy without one head, points".
        against: Name that is drawn as an outline behind every other one; "" for none.
        reference: The name drawn in black.

    Returns:
        A figure; `savefig` writes it.

    Raises:
        SettingError: There is nothing to draw, a cost is not finite, or `against` is not among the names.

    Example:
        >>> figure = ablation_histogram({"MA": [[0.0, 0.1]], "RMA": [[0.2, 0.4]]}, axis="fall, points", against="MA")
        >>> len(figure.axes)
        1
    """
    require_curves("costs", costs)
    for name, models in costs.items():
        require_curves(f"the costs of {name}", {f"model {number}": model for number, model in enumerate(models)})
    if against and against not in costs:
        raise SettingError(f"against is {against!r}; expected one of {', '.join(costs)}.")
    panels = [(name, against or None) for name in costs if name != against] or [(name, None) for name in costs]
    with drawing(7.6 if len(panels) > 1 else 5.2, 0.5 + 2.6 * math.ceil(len(panels) / 2)) as figure:
        draw_ablations(figure, costs, panels, assign_styles(list(costs), reference=reference), axis)
    return figure


def draw_ablations(
    figure: Figure,
    costs: Mapping[str, Sequence[Sequence[float]]],
    panels: Sequence[tuple[str, str | None]],
    style: Mapping[str, Style],
    axis: str,
) -> None:
    """Draw one panel for each pair of names on an empty figure: the first filled, the second as an outline."""
    pooled = {name: [value for model in models for value in model] for name, models in costs.items()}
    edges = _find_edges([value for values in pooled.values() for value in values])
    rows = math.ceil(len(panels) / 2)
    grid = figure.subplots(rows, min(2, len(panels)), sharex=True, sharey=True, squeeze=False)
    for axes, (name, outline) in zip(grid.flat, panels, strict=False):
        draw_counts(axes, pooled[name], edges, len(costs[name]), style[name], filled=True, label=name)
        if outline is not None:
            draw_counts(axes, pooled[outline], edges, len(costs[outline]), style[outline], filled=False, label=outline)
        axes.axvline(0, color="#000000", linewidth=0.8)
        axes.legend(loc="upper right", frameon=False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel(axis, fontsize=10)
    figure.supylabel("heads of a model", fontsize=10)


def _find_edges(values: Sequence[float]) -> list[float]:
    """Return bar edges of equal width that cover 0 and the lowest 95 % of the values, with an edge at 0."""
    if not all(map(math.isfinite, values)):
        raise SettingError("the cost of a head is not finite; expected scores of finished runs.")
    ordered = sorted(values)
    low, high = min(0.0, ordered[0]), max(0.0, ordered[int(0.95 * (len(ordered) - 1))])
    width = (high - low) / BARS or 1.0
    return [width * step for step in range(math.floor(low / width), max(math.ceil(high / width), 1) + 1)]


def head_embedding(
    vectors: Mapping[str, Tensor],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    reference: str = "",
    style: Mapping[str, Style] | None = None,
) -> Figure:
    """Return t-SNE maps of the heads of all models, and the mean cosine between each model's heads.

    A map of so few points depends on its seed: ignore structure that does not appear under all seeds. Distances between
    groups have no meaning; the cosine is measured.

    Args:
        vectors: Maps a model name to one vector per head, [H, e] with the same e for all.
        seeds: Seeds of t-SNE, one map each.
        reference: The name drawn in black.
        style: Style of each name; by default in the order of the names.

    Returns:
        A figure; `savefig` writes it.

    Raises:
        SettingError: There are fewer than three vectors or fewer than two of a model, widths differ, or there is no
            seed.

    Example:
        >>> figure = head_embedding({"MA": torch.randn(8, 4), "RMA": torch.randn(8, 4)}, seeds=(0, 1))
        >>> len(figure.axes)
        3
    """
    require_curves("vectors", vectors)
    vectors = {name: torch.as_tensor(found, dtype=torch.float64).detach() for name, found in vectors.items()}
    widths = {tuple(found.shape[1:]) for found in vectors.values()}
    if len(widths) > 1 or any(found.dim() != 2 or len(found) < 2 for found in vectors.values()):
        shapes = ", ".join(f"{name} {tuple(found.shape)}" for name, found in vectors.items())
        raise SettingError(
            f"vectors have shapes {shapes}; expected [H, e] with at least two heads and the same e for all."
        )
    points = torch.cat([found.cpu() for found in vectors.values()])
    if not points.shape[1] or not points.isfinite().all():
        raise SettingError(f"vectors of {points.shape[1]} numbers were given, or some are not finite; expected both.")
    for seed in seeds:
        require_integer("seed", seed, low=0, high=2**32 - 1)
    if len(points) < 3 or not seeds:
        raise SettingError(f"{len(points)} vectors and {len(seeds)} seeds were given; expected three and one, or more.")
    # scikit-learn takes seconds to import
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(points) - 1) / 3)
    look = style or assign_styles(list(vectors), reference=reference)
    with drawing(2.6 * len(seeds) + 2.4, 3.4) as figure:
        *maps, bars = figure.subplots(1, len(seeds) + 1, squeeze=False)[0]
        for axes, seed in zip(maps, seeds, strict=True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                placed = TSNE(perplexity=perplexity, init="random", random_state=seed).fit_transform(points.numpy())
            parts = torch.from_numpy(placed).split([len(found) for found in vectors.values()])
            for name, dots in zip(vectors, parts, strict=True):
                x, y = dots.T.tolist()
                axes.scatter(x, y, s=42, color=look[name].color, marker=look[name].marker, alpha=0.8)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_title(f"t-SNE, seed {seed}", fontsize=10, loc="left")
        for place, (name, found) in enumerate(vectors.items()):
            bars.bar(place, float(output_cosine(found.double())), width=0.7, color=look[name].color, alpha=0.6)
            bars.scatter([], [], s=42, color=look[name].color, marker=look[name].marker, label=name)
        bars.axhline(0, color=GRAY, linewidth=0.8)
        bars.set_xticks([])
        bars.set_title("mean cosine of two heads", fontsize=10, loc="left")
        figure.legend(loc="outside lower left", ncols=4, frameon=False)
    return figure


def budget_map(budget: KVBudget) -> Figure:
    """Return a map of the key/value heads of a model: a cell for each, darker the more it needs all positions.

    Heads that keep all positions have a dot. Layers that the budget leaves as they are have no row.

    Args:
        budget: What `hw.kv_budget` returned.

    Returns:
        A figure; `savefig` writes it.

    Raises:
        SettingError: The budget has no layer.

    Example:
        >>> from headwise.shrinking import KVBudget
        >>> budget_map(KVBudget({0: (0.1, 0.9)}, (None,))).axes[0].get_ylabel()
        'layer'
    """
    require_curves("budget.scores", {str(layer): scores for layer, scores in budget.scores.items()})
    layers, heads = list(budget.scores), max(map(len, budget.scores.values()))
    values = [[*scores, *([math.nan] * (heads - len(scores)))] for scores in budget.scores.values()]
    most = max(abs(score) for scores in budget.scores.values() for score in scores) or 1.0
    with drawing(max(3.2, 0.28 * heads + 2.0), max(2.0, 0.16 * len(layers) + 1.2)) as figure:
        axes = figure.add_subplot()
        image = axes.imshow(values, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
        places = [(head, row) for row, layer in enumerate(layers) for head in budget.full[layer]]
        axes.scatter([head for head, _ in places], [row for _, row in places], s=12, color="black")
        axes.grid(visible=False)
        step = math.ceil(len(layers) / 16)
        axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
        axes.set_xticks(range(0, heads, math.ceil(heads / 16)))
        axes.set_xlabel("key/value head")
        axes.set_ylabel("layer")
        figure.colorbar(image, ax=axes, label="share of the gain")
    return figure


def shrink_plan(plan: ShrinkPlan) -> Figure:
    """Return the score of each mix of heads and neurons that a plan tried, over the query heads that are left.

    A dot has its number of hidden neurons, and that of the plan is filled. A line is the score of the whole model.

    Args:
        plan: What `hw.shrink` returned.

    Returns:
        A figure; `savefig` writes it.

    Raises:
        SettingError: Nothing was tried, or a score is not finite.

    Example:
        >>> from headwise.shrinking import Mix, ShrinkPlan
        >>> whole, mix = Mix(8, 96, 1.0, -2.0), Mix(6, 80, 0.8, -2.1)
        >>> plan = ShrinkPlan(whole, (mix,), mix, {}, None, None, None)
        >>> shrink_plan(plan).axes[0].get_xlabel()
        'query heads left'
    """
    require_curves("plan.mixes", {"mixes": plan.mixes})
    if not all(math.isfinite(mix.score) for mix in (plan.whole, *plan.mixes)):
        raise SettingError("the score of a mix is not finite; expected finite scores.")
    style = assign_styles(["same counts in every layer", "other counts in each"])
    with drawing(6.0, 3.8) as figure:
        axes = figure.add_subplot()
        axes.axhline(plan.whole.score, color=GRAY, linewidth=1.0, label="whole model")
        for name, look in style.items():
            mixes = [mix for mix in plan.mixes if mix.even is (name == "same counts in every layer")]
            for place, mix in enumerate(mixes):
                face = look.color if mix is plan.chosen else "white"
                label = name if not place else None
                axes.scatter(mix.heads, mix.score, s=42, color=face, edgecolors=look.color, label=label, zorder=3)
                axes.annotate(f"{mix.neurons:,}", (mix.heads, mix.score), (5, 5), textcoords="offset points", size=8)
            axes.plot([mix.heads for mix in mixes], [mix.score for mix in mixes], color=look.color, linewidth=1.2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("query heads left")
        axes.set_ylabel("score; the number of neurons left at each mix")
        figure.legend(loc="outside upper left", ncols=3, frameon=False)
    return figure
