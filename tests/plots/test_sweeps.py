"""Figures of a number over a setting: the labels of a logarithmic axis."""

from __future__ import annotations

import pytest

from headwise.plots import sweep


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
