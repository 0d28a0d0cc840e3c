"""Records say whether plain was still rising on dev when its training ended."""

from __future__ import annotations

import pytest

from headwise_lab.papers.pages import describe_plateau, describe_rise


def table(*curves: list[float], arm: str = "plain") -> dict:
    return {"rows": [{"arm": "counts", "runs": [{"dev": []}]}, {"arm": arm, "runs": [{"dev": dev} for dev in curves]}]}


def test_a_curve_that_rises_to_its_end_is_named():
    long = [0.50, 0.60, 0.62, 0.63, 0.68, 0.70]
    found = table(long, [score + 0.01 for score in long], [*long[:5], 0.72])
    # the last two of six epochs against the best of the first four: 0.07, 0.07, 0.09
    assert describe_rise(found) == (
        "The last 2 of 6 epochs added +7.67 (+4.80 to +10.54) points to plain's best score on dev; it still rose."
    )
    assert describe_plateau(found) == (
        "Score of plain on dev after each epoch, mean over seeds: 50.3, 60.3, 62.3, 63.3, 68.3, 71.0. "
        f"{describe_rise(found)}"
    )


def test_the_last_third_is_rounded_down():
    found = table([0.5, 0.6, 0.8, 0.7], [0.5, 0.6, 0.8, 0.9], [0.5, 0.6, 0.8, 0.8])
    assert describe_rise(found).startswith("The last epoch added 0.00 (")


@pytest.mark.parametrize("last", [(0.58, 0.60, 0.58), (0.70, 0.60, 0.59)])
def test_a_curve_that_falls_or_may_rise_by_chance_shows_no_further_rise(last):
    curves = [[0.50, 0.60, last[0]], [0.52, 0.62, last[1]], [0.51, 0.58, last[2]]]
    assert describe_rise(table(*curves)).endswith("plain's best score on dev; no further rise is shown.")


def test_of_one_seed_nothing_is_concluded():
    said = describe_rise(table([0.1, 0.2, 0.3]))
    assert said == "The last epoch added +10.00 points to plain's best score on dev."


@pytest.mark.parametrize("found", [table([0.1, 0.2], [0.1, 0.3]), table([0.1, 0.2, 0.3], arm="svgd"), table([], [])])
def test_without_plain_or_with_too_few_epochs_nothing_is_said(found):
    assert describe_rise(found) == describe_plateau(found) == ""
