"""The figure of a report: what is drawn where, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.errors import SettingError
from headwise.metrics.intervals import Interval
from headwise.plots import to_png
from headwise.report.layer import LayerReport
from headwise.report.report import Report

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


def test_what_cannot_be_drawn_is_refused():
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
