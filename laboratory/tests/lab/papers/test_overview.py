"""The page of all claims: which contrast decides one, what the paper found for it, and what was never run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwise_lab.papers.overview import (
    Measured,
    build_overview,
    choose_deciding,
    read_contrast,
    read_papers,
    summarize_claims,
)
from headwise_lab.papers.reproduction import OWN
from headwise_lab.results.cells import MINUS, NONE, Grid, Link

NUMBERS = {
    "contrast": "em over plain", "measure": None, "value": -0.0025, "low": -0.0071, "high": 0.0021, "p_holm": 0.36,
    "detectable": 0.0065, "detectable_in_family": 0.0091, "published": 0.0095, "verdict": "published gain not found",
    "kind": "efficacy", "by_seed": [-0.003, -0.002],
}  # fmt: skip


def measured(value: float, p: float | None, verdict: str = "") -> Measured:
    return Measured("a over b", value, value - 1, value + 1, points=True, p=p, verdict=verdict)


def test_a_score_is_read_in_points_from_numbers_and_from_text_of_version_0_1():
    found = read_contrast(NUMBERS, {})
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((-0.25, -0.71, 0.21))
    assert (found.detectable, found.detectable_in_family, found.published) == pytest.approx((0.65, 0.91, 0.95))
    text = read_contrast("em over plain: -0.25 points [-0.71, +0.21], p = 0.362", {"em over plain": 0.0095})
    assert text is not None
    assert (text.value, text.low, text.high, text.p) == pytest.approx((-0.25, -0.71, 0.21, 0.362))
    assert text.published == pytest.approx(0.95)
    assert text.detectable is None


def test_a_number_of_each_run_keeps_its_units():
    found = read_contrast({**NUMBERS, "measure": "NLL"}, {})
    assert found is not None
    assert (found.value, found.published, found.points) == (-0.0025, 0.0095, False)
    # what a score is once heads are gone is a score
    score = read_contrast({**NUMBERS, "measure": "score_heads_50"}, {})
    assert score is not None
    assert (score.value, score.points) == (-0.25, True)
    text = read_contrast("NLL of em over plain: +0.31 [+0.02, +0.60]", {"NLL of em over plain": 0.5})
    assert text is not None
    assert (text.published, text.p) == (0.5, None)


@pytest.mark.parametrize("found", ["em over plain: not run", {**NUMBERS, "low": None}, {"verdict": "no verdict"}])
def test_what_has_no_interval_is_left_out(found):
    assert read_contrast(found, {}) is None


def test_a_claim_is_decided_by_its_furthest_contrast():
    weak, strong, below = measured(1.0, 0.4), measured(2.0, 0.01), measured(-3.0, 0.002)
    assert choose_deciding([strong, weak], "borne out") is weak
    assert choose_deciding([weak, strong, below], "contradicted") is below
    # a contrast with the claim's own verdict comes before others
    own = measured(0.5, 0.2, "not shown")
    assert choose_deciding([measured(0.1, 0.9, "borne out"), own], "not shown") is own
    # of contrasts with one p-value the lowest
    low, high = measured(-1.0, 1.0), measured(3.0, 1.0)
    assert choose_deciding([high, low], "not shown") is low
    assert choose_deciding([], "not shown") is None


def test_the_page_has_every_claim_its_place_and_what_was_not_run(tmp_path: Path):
    folder = tmp_path / "diversify" / "results"
    folder.mkdir(parents=True)
    claims = [
        {"statement": "EM helps.", "verdict": "no verdict (3 seeds)", "contrasts": [NUMBERS]},
        {"statement": "Again.", "verdict": "no verdict (3 seeds)", "contrasts": [NUMBERS]},
        {"statement": "It is cheap.", "verdict": "measured, not tested", "contrasts": []},
    ]
    record = {"format": 2, "id": "diversify/table-5", "scale": "cpu", "title": "Main results"}
    record |= {"source": "Table 5", "claims": claims}
    (folder / "table-5-cpu.json").write_text(json.dumps(record))
    page = build_overview(read_papers(tmp_path))
    link = "[diversify/table-5](diversify/RESULTS.md#diversifytable-5-at-scale-cpu-main-results)"
    counted = (
        "The three papers, judged by calibrated tests, 1 tables and figures: "
        "1 comparisons of scores (1 published gain not found).\n"
    )
    assert counted in page
    ours = f"{MINUS}0.25 ({MINUS}0.71 to +0.21)"
    assert f"| EM helps. | em over plain | +0.95 | {ours} | 0.65 to 0.91 | no verdict (3 seeds) | {link} |" in page
    assert f"| It is cheap. | {' | '.join([NONE] * 4)} | measured, not tested | {link} |" in page
    absent = page.partition("without a record")[2]
    assert "| diversify/table-1 |" in absent
    assert "| diversify/table-5 |" not in absent


def test_data_that_stand_in_for_the_papers_are_named(tmp_path: Path):
    folder = tmp_path / "repulsive" / "results"
    folder.mkdir(parents=True)
    contrasts = [{**NUMBERS, "contrast": f"svgd over plain in {part}"} for part in ("Yelp", "SNLI")]
    record = {"format": 2, "id": "repulsive/table-1", "scale": "cpu", "title": "t", "source": "Table 1"}
    record["described"] = ["Yelp: reviews: 8 train", "SNLI: SICK, since SNLI's training file is absent: 4 train"]
    record["claims"] = [{"statement": f"{one}.", "verdict": "not shown", "contrasts": [one]} for one in contrasts]
    (folder / "table-1-cpu.json").write_text(json.dumps(record))
    page = build_overview(read_papers(tmp_path))
    assert "| svgd over plain in Yelp |" in page
    assert "| svgd over plain in SNLI (SICK) |" in page


def test_the_pictures_of_doses_come_first(tmp_path: Path):
    folder = tmp_path / "diversity" / "results"
    folder.mkdir(parents=True)
    for name in ("dose-pairs", "lm", "dose-logic"):
        picture = {"file": f"{name}.png", "alt": name, "caption": "Score by effective heads."}
        record = {"format": 2, "id": f"diversity/{name}", "scale": "cpu", "title": name, "source": OWN, "claims": []}
        (folder / f"{name}.json").write_text(json.dumps(record | {"pictures": [picture]}))
    doses = build_overview(read_papers(tmp_path)).partition("## Doses\n")[2].partition("## diversity")[0]
    assert doses.splitlines() == [
        "",
        "Score by effective heads.",
        "",
        "[dose-logic](diversity/RESULTS.md#diversitydose-logic-at-scale-cpu-dose-logic):",
        "",
        "![dose-logic](diversity/results/dose-logic.png)",
        "",
        "[dose-pairs](diversity/RESULTS.md#diversitydose-pairs-at-scale-cpu-dose-pairs):",
        "",
        "![dose-pairs](diversity/results/dose-pairs.png)",
        "",
    ]


def test_the_summary_has_the_largest_moves_of_scores_either_way_and_nothing_else(tmp_path: Path):
    folder = tmp_path / "guided" / "results"
    folder.mkdir(parents=True)
    values = {"a": (-0.02, "contradicted"), "b": (-0.03, "contradicted"), "c": (0.01, "borne out")}
    values["d"] = (0.5, "not shown")
    claims = [
        {
            "statement": name,
            "verdict": verdict,
            "contrasts": [{**NUMBERS, "contrast": name, "value": value, "verdict": verdict, "by_seed": [value]}],
        }
        for name, (value, verdict) in values.items()
    ]
    # a number of each run is no score
    of_heads = {"contrast": "e", "measure": "distance", "kind": "manipulation check"}
    claims.append({**claims[2], "contrasts": [{**claims[2]["contrasts"][0], **of_heads}]})
    told = {"scale": "cpu", "title": "t"}
    (folder / "x-cpu.json").write_text(
        json.dumps({"format": 2, "id": "guided/x", "source": OWN, "claims": claims} | told)
    )
    # a claim of version 0.1 is counted apart and not listed
    old = {"statement": "f", "verdict": "borne out", "contrasts": ["f over g: +9.00 points [+8.00, +10.00], p = 0.010"]}
    (folder / "y-cpu.json").write_text(json.dumps({"id": "guided/y", "source": "Table 1", "claims": [old]} | told))
    counts, earlier, gains, losses = summarize_claims(read_papers(tmp_path), most=1).split("\n\n")
    assert counts == (
        "Our own studies, judged by calibrated tests, 1 tables and figures: 4 comparisons of scores (2 contradicted; 1 "
        "borne out; 1 not shown), 1 checks of what a method does to heads (1 borne out)."
    )
    assert earlier == "The three papers, judged by version 0.1, 1 tables and figures: 1 claims (1 borne out)."
    assert gains.startswith("The largest borne out, one a table, in points: [guided/x: c](")
    assert ";" not in gains
    assert losses.startswith("The largest contradicted, one a table, in points: [guided/x: b](")


def test_a_link_is_text_everywhere_but_in_markdown():
    grid = Grid("t", ("place",), ((Link("a_b", to="x.md#y"),),), "l")
    assert grid.text == (("a_b",),)
    assert "| [a\\_b](x.md#y) |" in grid.to_markdown()
