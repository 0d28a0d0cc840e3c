"""Verdicts follow from an adjusted p-value, the interval and what was published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwise_lab.results.statistics import (
    BORNE_OUT,
    CONTRADICTED,
    EQUIVALENT,
    LESS,
    NOT_FOUND,
    NOT_SHOWN,
    UNCLEAR,
    Estimate,
    Judgement,
    describe,
    describe_undecided,
    holm,
    judge_family,
)

# A mean of 0.02 with a 95 % interval of 0.0104 to 0.0296.
CLEAR = Estimate((0.01, 0.02, 0.03, 0.015, 0.025))
NOTHING = Estimate((-0.01, 0.01, 0.004, -0.006, 0.002))


@pytest.mark.parametrize(
    ("found", "adjusted", "words"),
    [
        (CLEAR, 0.0499, "better (p = 0.050)"),
        (replace(CLEAR, by_seed=tuple(-one for one in CLEAR.by_seed)), 0.0123, "worse (p = 0.012)"),
        (CLEAR, 0.0004, "better (p < 0.001)"),
        (CLEAR, 0.0501, "no difference shown (p = 0.050)"),
        (CLEAR, 0.413, "no difference shown (p = 0.41)"),
        (CLEAR, None, "not tested"),
    ],
)
def test_differences_in_words(found, adjusted, words):
    assert describe(found, adjusted) == words


@pytest.mark.parametrize(
    ("by_seed", "words"),
    [
        ((0.1,), "no verdict (1 seed)"),
        ((0.1, 0.2, 0.3, 0.4), "no verdict (4 seeds)"),
        ((0.1,) * 5, "no verdict (seeds do not differ)"),
        ((0.0,) * 5, ""),
        ((0.1, 0.2, 0.3, 0.4, 0.5), ""),
    ],
)
def test_why_there_is_no_verdict(by_seed, words):
    assert describe_undecided(Estimate(by_seed)) == words


@pytest.mark.parametrize(
    ("found", "adjusted", "published", "words"),
    [
        (CLEAR, 0.01, None, BORNE_OUT),
        (CLEAR, 0.01, 0.025, BORNE_OUT),
        (CLEAR, 0.01, 0.005, BORNE_OUT),
        (CLEAR, 0.01, 0.04, LESS),
        # a paper in which the other side was ahead published no gain
        (CLEAR, 0.01, -0.04, BORNE_OUT),
        (CLEAR, 0.06, None, NOT_SHOWN),
        (CLEAR, 0.06, 0.025, UNCLEAR),
        (CLEAR, 0.06, 0.005, UNCLEAR),
        (CLEAR, 0.06, 0.04, NOT_FOUND),
        (NOTHING, 1.0, 0.012, NOT_FOUND),
        (NOTHING, 1.0, 0.03, EQUIVALENT),
        (NOTHING, 1.0, 0.008, UNCLEAR),
        (Estimate((-0.1, -0.2, -0.1, -0.15, -0.1)), 0.01, 0.03, CONTRADICTED),
        # arms that answer alike in every run show nothing, of no size
        (Estimate((0.0,) * 5), 1.0, 0.02, NOT_SHOWN),
        (Estimate((0.1, 0.2)), None, 0.03, "no verdict (2 seeds)"),
    ],
)
def test_a_claim_is_judged_beside_what_was_published(found, adjusted, published, words):
    assert Judgement(found, 3, adjusted, published).claim_words == words


def test_the_published_gain_lies_in_the_interval_or_not():
    assert [Judgement(CLEAR, 1, 0.01, gain).holds_gain for gain in (0.005, 0.025, 0.04, None, -1.0)] == [
        False,
        True,
        False,
        None,
        None,
    ]
    assert Judgement(NOTHING, 1, 1.0, 0.03).equivalence == NOTHING.p_within(0.015) < 0.05
    assert Judgement(NOTHING, 1, 1.0).equivalence is None


def test_a_family_counts_what_has_no_verdict_as_a_test_that_found_nothing():
    few = Estimate((0.1, 0.2, 0.1))
    judged = judge_family([CLEAR, few, NOTHING], [0.01, None, 0.02], planned=5)
    assert [one.adjusted for one in judged] == [
        *(pytest.approx(p) for p in holm([CLEAR.p, 1.0, NOTHING.p, 1.0, 1.0])[:1]),
        None,
        pytest.approx(1.0),
    ]
    assert {one.family for one in judged} == {5}
    assert [one.published for one in judged] == [0.01, None, 0.02]
    assert judged[0].detectable_in_family == CLEAR.detectable(0.01) > judged[0].detectable == CLEAR.detectable()
    assert (judged[1].detectable, judged[1].detectable_in_family) == (None, None)
    assert judge_family([]) == []


def test_what_is_doubted_has_no_verdict_and_counts_in_its_family():
    sure, doubted = judge_family([CLEAR, CLEAR], planned=3, doubts=["", "plain is not shown to beat counts"])
    assert (sure.adjusted, sure.undecided) == (pytest.approx(3 * CLEAR.p), "")
    assert doubted.adjusted is None
    assert doubted.words == doubted.claim_words == "no verdict (plain is not shown to beat counts)"
    assert doubted.detectable == sure.detectable
    assert doubted.reversed.undecided == doubted.undecided
    # with too few seeds nothing is known of the task either
    (few,) = judge_family([Estimate((0.1, 0.2))], doubts=["plain is not shown to beat counts"])
    assert few.words == "no verdict (2 seeds)"


def test_a_judgement_can_be_read_from_the_other_side():
    found = Judgement(replace(CLEAR, least=-0.5, most=1.0), 4, 0.02, 0.03)
    turned = found.reversed
    assert (turned.estimate.value, turned.estimate.low) == (-CLEAR.value, -CLEAR.high)
    assert (turned.estimate.least, turned.estimate.most, turned.published) == (-1.0, 0.5, -0.03)
    assert (found.words, turned.words) == ("better (p = 0.020)", "worse (p = 0.020)")
    assert turned.reversed == found


def test_a_seed_that_stands_apart_is_said_beside_the_verdict():
    apart = Judgement(Estimate((0.01, 0.02, 0.015, 0.012, -0.3)), 1, 0.9)
    assert apart.note == "one seed stands apart: p of flipped signs 1.000"
    assert Judgement(CLEAR, 1, 0.01).note == ""
    assert Judgement(Estimate((0.01, 0.02, 0.01, -0.3)), 1).note == ""
