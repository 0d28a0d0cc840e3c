"""Figures show the numbers they are given, leave the user's settings alone, and refuse what cannot be drawn."""

from __future__ import annotations

import math
from collections.abc import Callable

import matplotlib as mpl
import numpy as np
import pytest
import torch

from headwise.errors import SettingError
from headwise.metrics.calibration import Reliability, reliability
from headwise.plots import (
    ablation_histogram,
    entropy_cdf,
    head_embedding,
    head_similarity,
    reliability_diagram,
    sentence_heatmap,
    sweep,
    to_png,
)

VECTORS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
FEWER_BINS = reliability(torch.ones(1), torch.ones(1).bool(), bins=3)


def run(seed: int, shift: float) -> Reliability:
    generator = torch.Generator().manual_seed(seed)
    confidence = 0.3 + 0.7 * torch.rand(300, generator=generator)
    return reliability(confidence, torch.rand(300, generator=generator) < confidence - shift)


def entropies(seed: int, end: float) -> torch.Tensor:
    return end * torch.rand(80, generator=torch.Generator().manual_seed(seed))


def test_a_reliability_diagram_shows_the_bins_of_all_runs_and_the_errors_of_each():
    runs = [run(0, 0.2), run(1, 0.2)]
    left, right = reliability_diagram({"MA": runs, "RMA": [run(2, 0.0)]}, reference="MA").axes
    dots = left.collections[0].get_offsets().tolist()
    assert dots == [[pytest.approx(x), pytest.approx(y)] for x, y, _ in (runs[0] + runs[1]).bins]
    heights = sorted(bar.get_height() for bar in right.patches)
    expected = [sum(one.ece for one in runs) / 2, sum(one.oe for one in runs) / 2, run(2, 0.0).ece, run(2, 0.0).oe]
    assert heights == pytest.approx(sorted(expected))
    seeds = [dot[1] for dots in right.collections for dot in dots.get_offsets().tolist()]
    assert sorted(seeds) == pytest.approx(sorted([one.ece for one in runs] + [one.oe for one in runs]))


def test_the_curve_of_entropies_is_their_cumulative_share_to_the_uniform_end():
    runs = [entropies(0, 1.0), entropies(1, 0.5)]
    axes = entropy_cdf({"MA": runs}, classes=5, text="Age").axes[0]
    (line, _end) = axes.lines
    places, shares = line.get_xdata(), line.get_ydata()
    middle = len(places) // 3
    expected = sum(float((one <= places[middle]).double().mean()) for one in runs) / 2
    assert shares[middle] == pytest.approx(expected, abs=0.02)
    assert 0 < shares[middle] < 1
    assert places[-1] == pytest.approx(math.log(5))
    assert shares[-1] == 1.0
    assert "Age" in axes.get_xlabel()
    (line, _end) = entropy_cdf({"MA": [torch.tensor([0.0, 1.0])]}, classes=5).axes[0].lines
    # an entropy counts at its own place
    assert line.get_ydata()[0] == 0.5


def test_figures_leave_the_users_settings_and_are_the_same_each_time():
    before = dict(mpl.rcParams)
    made = [to_png(entropy_cdf({"MA": [entropies(0, 1.0)]}, classes=5)) for _ in range(2)]
    assert made[0] == made[1]
    assert made[0].startswith(b"\x89PNG")
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("places", "some", "without"),
    [((0.07, 0.1), {"0.07", "0.1"}, set()), ((0.01, 10.0), {"0.01", "0.1", "1", "10"}, {"0.02", "5"})],
)
def test_a_logarithmic_axis_has_numbers_as_one_writes_them(places, some, without):
    runs = {"MA": {place: [61.0, 62.5] for place in places}}
    figure = sweep(runs, setting="force ratio", measure="accuracy, %", scale="log")
    axis = figure.axes[0].xaxis
    figure.draw_without_rendering()
    labels = {text.get_text() for text in (*axis.get_ticklabels(), *axis.get_ticklabels(minor=True))}
    assert not [label for label in labels if "$" in label]
    assert some <= labels
    assert not without & labels


def test_a_notebook_shows_a_figure():
    figure = sweep({"one": {1.0: [2.0, 3.0]}}, setting="heads", measure="score")
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "draw",
    [
        lambda: sentence_heatmap(["a", "b"], {"head 0": torch.tensor([0.2, 0.8]), "head 1": np.array([0.5, 0.5])}),
        lambda: head_similarity({"layer 0": [[1.0, 0.5], [0.5, 1.0]], "layer 1": np.eye(2)}, measure="CKA"),
        lambda: entropy_cdf({"MA": [[0.1, 0.5], np.array([0.2])]}, classes=3),
        lambda: head_embedding({"MA": VECTORS.tolist(), "RMA": VECTORS.numpy()}, seeds=(0,)),
    ],
)
def test_lists_and_arrays_are_drawn(draw: Callable):
    assert draw().axes


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: reliability_diagram({}), "models has nothing; expected"),
        (lambda: entropy_cdf({"MA": []}, classes=5), "nothing for MA"),
        (lambda: entropy_cdf({"MA": [torch.tensor([1.5])]}, classes=2), r"entropies of MA .* in \[0, log 2\]"),
        (
            lambda: reliability_diagram(
                {"MA": [run(0, 0.1), reliability(torch.ones(1), torch.ones(1).bool(), bins=3)]}
            ),
            "15 and 3 bins",
        ),
        (lambda: sentence_heatmap(["a"], {"head 0": [0.2]}, width=0), "width is 0"),
        (lambda: sentence_heatmap(["a"], {"head 0": [math.nan]}), "expected one per token, finite"),
        (lambda: ablation_histogram({"a": [[]]}, axis="fall"), "the costs of a has nothing for model 0"),
        (lambda: head_embedding({"a": VECTORS * math.nan}), "some are not finite"),
        (lambda: head_embedding({"a": VECTORS[:, :0]}), "vectors of 0 numbers"),
        (lambda: head_embedding({"a": VECTORS}, seeds=(-1,)), "seed is -1"),
        (lambda: head_similarity({"a": [[1.0, math.nan], [0.0, 1.0]]}, measure="CKA"), "expected .H, H. with values"),
        (lambda: sweep({"a": {0: [1.0]}}, setting="alpha", measure="%", scale="log"), "runs at alpha 0; .* above 0"),
        (lambda: sweep({"a": {math.nan: [1.0]}}, setting="alpha", measure="%"), "runs at alpha nan; expected finite"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: Callable, message: str):
    with pytest.raises(SettingError, match=message):
        draw()
