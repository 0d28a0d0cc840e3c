"""The studies of dose and response: the slope over strengths, its test, and the picture of score by effective heads."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from headwise_lab.experiment.registry import named_task
from headwise_lab.papers.claims import Claim, follow_doses, judge
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.diversity.doses import EFFECTIVE, METHODS, RATIOS, draw_doses, name_doses
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.runs import read_results
from headwise_lab.results.table import make_table
from lab.results.synthetic_comparison import Drawn, write_comparison

DOSES = [REPRODUCTIONS[f"diversity/dose-{name}"] for name in ("logic", "translation", "pairs", "questions")]
LOGIC = DOSES[0]
SCALES = named_task(LOGIC.task).scales
ARMS = LOGIC.arms_at("demo", SCALES)["1x"]
CKA = tuple(arm for arm in ARMS if arm.startswith("cka"))


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """Runs in which the score falls and effective heads rise with the strength of CKA."""
    drawn = [Drawn("plain", None)]
    drawn += [Drawn(arm, "plain", effect=-0.3 * dose, spread=0.05) for dose, arm in enumerate(CKA)]
    results = read_results(write_comparison(tmp_path_factory.mktemp("runs"), drawn, items=200))
    numbers = {
        (run.arm, run.seed): {EFFECTIVE: 2.0 + (0.5 * CKA.index(run.arm) if run.arm in CKA else 0) + 0.01 * run.seed}
        for run in results.runs
    }
    return Evidence(results, numbers)


def test_a_slope_is_that_of_least_squares_and_is_judged_by_one_test(evidence: Evidence):
    parts = {"1x": evidence}
    claims = (Claim("up", (follow_doses(CKA, "1x"),)), Claim("more", (follow_doses(CKA, "1x", EFFECTIVE),)))
    score, heads = judge(claims, parts)
    means = {arm: [run.statistics.mean() for run in evidence.results.runs if run.arm == arm] for arm in CKA}
    slope = np.polyfit(np.arange(len(CKA)), [np.mean(means[arm]) for arm in CKA], 1)[0]
    (found,) = score.found
    assert found.estimate is not None
    assert found.estimate.value == pytest.approx(slope)
    assert found.estimate.seeds == 5
    assert score.verdict == "contradicted"
    assert heads.found[0].estimate is not None
    assert heads.found[0].estimate.value == pytest.approx(0.5)
    assert heads.found[0].contrast.kind == "manipulation check"
    assert str(found.contrast) == f"slope from {CKA[0]} to {CKA[-1]} in 1x"


def test_a_slope_needs_every_strength(evidence: Evidence):
    lacking = dataclasses.replace(
        evidence,
        results=dataclasses.replace(
            evidence.results, runs=tuple(run for run in evidence.results.runs if run.arm != CKA[2])
        ),
    )
    (claim,) = judge((Claim("up", (follow_doses(CKA, "1x"),)),), {"1x": lacking})
    assert "was not run" in claim.verdict


def test_strengths_are_equal_steps_and_arms_of_the_laboratory():
    assert np.diff(np.log(RATIOS)) == pytest.approx([np.log(RATIOS[-1] / RATIOS[0]) / (len(RATIOS) - 1)] * 4, rel=0.03)
    assert name_doses("cka") == CKA
    for study in DOSES:
        scales = named_task(study.task).scales
        arms = study.arms_at("demo", scales)
        assert set(arms) == {"1x", "3x"}
        sizes = {part.name: part.sizes["cpu"].sets for part in study.parts}
        (scale,) = {part.sizes["cpu"].scale for part in study.parts}
        assert scale == ("demo" if study.task in ("logic", "translation") else "cpu")
        assert sizes == {"1x": (), "3x": (f"epochs={3 * scales[scale].epochs}",)}
        assert study.parts[0].sizes["demo"].sets == ()
        # one slope for each method, budget and number
        assert sum(len(claim.contrasts) for claim in study.claims_at("demo", scales)) >= 4 * (len(METHODS) - 1)


def test_the_picture_has_a_line_for_each_method_that_was_run_and_a_panel_for_each_budget(evidence: Evidence):
    table = make_table(evidence.results)
    alone = draw_doses({"1x": evidence}, {"1x": table})
    picture = draw_doses({"1x": evidence, "3x": evidence}, {"1x": table, "3x": table})
    assert alone is not None
    assert picture is not None
    assert picture.name == "doses"
    assert picture.alt.startswith("cka in 1x from 2.02 heads, ")
    assert "to 4.02 heads, " in picture.alt
    assert "; cka in 3x from 2.02 heads, " in picture.alt
    assert alone.alt == picture.alt.partition("; ")[0]
    uncounted = dataclasses.replace(evidence, numbers={})
    assert draw_doses({"1x": uncounted}, {"1x": table}) is None
