"""Figures show the numbers they are given, leave the user's settings alone, and refuse what cannot be drawn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import matplotlib as mpl
import numpy as np
import pytest
import torch

import headwise as hw
from cases import cases
from headwise.errors import SettingError
from headwise.metrics.calibration import Reliability, reliability
from headwise.metrics.intervals import Interval
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
from headwise.report.layer import LayerReport
from headwise.report.report import Report

VECTORS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


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


@pytest.mark.full
@cases(
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


@pytest.mark.full
@cases(
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


@cases(
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


# Overview


ROLE = "window"


def layer(number: int, heads: int = 3, *, moved: float = 0.0) -> LayerReport:
    cka = torch.eye(heads) + (0.2 + 0.1 * number + moved) * (1 - torch.eye(heads))
    return LayerReport(
        f"layers.{number}",
        "self",
        "layers",
        number,
        heads,
        pairs={"output_cka": tuple(map(tuple, cka.tolist()))},
        entropy=tuple(0.5 + number + head + moved for head in range(heads)),
        drops=tuple(Interval(0.1 * head + moved, 0.0, 1.0) for head in range(heads)),
        roles=(tuple(0.3 + 0.1 * head for head in range(heads)),),
        chance=(0.15 + 0.05 * number,),
    )


def report(*layers: LayerReport) -> Report:
    return Report("Model", 1, 40, layers, score="accuracy", roles=(ROLE,))


def panel(figure, title: str):
    return next(axes for axes in figure.axes if axes.get_title(loc="left") == title)


def test_every_head_is_a_dot_and_the_line_goes_through_the_means():
    figure = hw.plots.overview(report(layer(0), layer(1)))
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "CKA with the other heads",
        "entropy of attention, nats",
        "fall of accuracy without the head",
        f"attention on {ROLE}",
    ]
    axes = panel(figure, "entropy of attention, nats")
    dots = np.asarray(axes.collections[0].get_offsets())
    np.testing.assert_allclose(dots, [[0, 0.5], [0, 1.5], [0, 2.5], [1, 1.5], [1, 2.5], [1, 3.5]])
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[0, 1.5], [1, 2.5]])
    np.testing.assert_allclose(panel(figure, "CKA with the other heads").lines[0].get_ydata(), [0.2, 0.3])


def test_effective_heads_come_first_and_contributions_before_outputs():
    one = layer(0)
    contributions = tuple(tuple(0.5 + value / 2 for value in row) for row in one.pairs["output_cka"])
    pairs = {**one.pairs, "contribution_cka": contributions}
    figure = hw.plots.overview(report(dataclasses.replace(one, pairs=pairs, effective_heads=2.25)))
    assert figure.axes[0].get_title(loc="left") == "effective heads"
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), [2.25])
    np.testing.assert_allclose(panel(figure, "CKA with the other heads").lines[0].get_ydata(), [0.6])


def test_a_role_stands_beside_what_chance_gives_it():
    axes = panel(hw.plots.overview(report(layer(0), layer(1))), f"attention on {ROLE}")
    chance = [segment[0, 1] for lines in axes.collections[1:] for segment in lines.get_segments()]
    np.testing.assert_allclose(chance, [0.15, 0.2])


def test_two_models_are_drawn_with_their_labels():
    now, before = report(layer(0, moved=0.25), layer(1)), report(layer(0), layer(1))
    figure = hw.plots.overview(now, before=before, labels=("plain", "now"))
    lines = {line.get_label(): line.get_ydata() for line in panel(figure, "entropy of attention, nats").lines}
    np.testing.assert_allclose(lines["now"], [1.75, 2.5])
    np.testing.assert_allclose(lines["plain"], [1.5, 2.5])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "plain",
        "now",
        "a random mask as sparse",
    ]


def test_another_score_or_role_of_the_model_before_is_not_drawn_under_the_name_of_this_ones():
    roles = ((0.1, 0.2, 0.3), (0.9, 0.8, 0.7))
    found = dataclasses.replace(layer(0), roles=roles, chance=(0.5, 0.4))
    now = dataclasses.replace(report(found), roles=("syntax", ROLE))
    before = dataclasses.replace(report(layer(0)), score="perplexity")
    figure = hw.plots.overview(now, before=before)

    def means(title: str) -> dict[str, float]:
        return {line.get_label(): line.get_ydata()[0] for line in panel(figure, title).lines}

    assert means("fall of accuracy without the head") == {"now": pytest.approx(0.1)}
    assert means("attention on syntax") == {"now": pytest.approx(0.2)}
    assert means(f"attention on {ROLE}") == {"before": pytest.approx(0.4), "now": pytest.approx(0.8)}
    assert set(means("entropy of attention, nats")) == {"before", "now"}


def test_a_layer_without_weights_leaves_a_gap_and_no_number():
    figure = hw.plots.overview(report(layer(0), dataclasses.replace(layer(1), entropy=()), layer(2)))
    np.testing.assert_allclose(panel(figure, "entropy of attention, nats").lines[0].get_xdata(), [0, 2])


def test_overviews_that_cannot_be_drawn_are_refused():
    with pytest.raises(SettingError, match="differ in shape"):
        hw.plots.overview(report(layer(0)), before=report(layer(0, heads=2)))
    with pytest.raises(SettingError, match="holds nothing to draw"):
        hw.plots.overview(Report("Model", 1, 4, (LayerReport("attn", "self", "", 0, 1),)))


def test_a_measured_model_is_drawn():
    torch.manual_seed(1)
    stack = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(stack, 3, enable_nested_tensor=False).eval()
    found = hw.measure(hw.find_heads(model), [torch.randn(6, 7, 16)])
    assert to_png(hw.plots.overview(found, before=found)).startswith(b"\x89PNG")
