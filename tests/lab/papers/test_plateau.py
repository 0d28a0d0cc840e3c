"""Records say whether plain was still rising on dev when its training ended."""

from __future__ import annotations

import pytest

from headwise.lab.papers.plateau import describe_plateau, describe_rise


def table(*curves: list[float], arm: str = "plain") -> dict:
    return {"rows": [{"arm": "counts", "runs": [{"dev": []}]}, {"arm": arm, "runs": [{"dev": dev} for dev in curves]}]}


def test_a_curve_that_rises_to_its_end_is_named():
    found = table([0.50, 0.60, 0.64, 0.70], [0.52, 0.62, 0.61, 0.69], [0.51, 0.58, 0.60, 0.67])
    # the last two of four epochs against the best before: 0.10, 0.07, 0.09
    assert describe_rise(found) == (
        "Plain still rises on dev: the last third of its epochs added +8.67 (+4.87 to +12.46) points to its best."
    )
    assert describe_plateau(found) == (
        f"Plain on dev by epoch, mean over seeds: 51.0, 60.0, 61.7, 68.7. {describe_rise(found)}"
    )


def test_a_curve_that_is_level_or_falls_at_its_end_rises_no_more():
    found = table([0.50, 0.60, 0.61], [0.52, 0.62, 0.60], [0.51, 0.58, 0.58])
    assert describe_rise(found).startswith(
        "Plain rises no more on dev: the last third of its epochs added \u22120.33 ("
    )


def test_a_rise_that_may_be_chance_is_none():
    found = table([0.50, 0.60, 0.70], [0.52, 0.62, 0.60], [0.51, 0.58, 0.59])
    assert describe_rise(found).startswith("Plain rises no more on dev: the last third of its epochs added +3.00")


@pytest.mark.parametrize("found", [table([0.1, 0.2], [0.1, 0.3]), table([0.1, 0.2, 0.3], arm="svgd"), table([], [])])
def test_without_plain_or_with_too_few_epochs_nothing_is_said(found):
    assert describe_rise(found) == describe_plateau(found) == ""
