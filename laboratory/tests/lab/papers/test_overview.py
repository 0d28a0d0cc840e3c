"""Pages of claims: what decides one, what the paper found for it, what was never run, and how long was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headwise_lab.papers.overview import (
    Measured,
    build_overview,
    choose_deciding,
    read_contrast,
    read_papers,
)
from headwise_lab.papers.pages import describe_plateau, describe_rise
from headwise_lab.papers.reproduction import OWN
from headwise_lab.results.cells import MINUS, NONE, Grid, Link

NUMBERS = {
    "contrast": "em over plain", "measure": None, "value": -0.0025, "low": -0.0071, "high": 0.0021, "p_holm": 0.36,
    "detectable": 0.0065, "detectable_in_family": 0.0091, "published": 0.0095, "verdict": "published gain not found",
    "kind": "efficacy", "by_seed": [-0.003, -0.002],
}  # fmt: skip


def claim(statement: str, verdict: str, *contrasts: Any) -> dict[str, Any]:
    return {"statement": statement, "verdict": verdict, "contrasts": list(contrasts)}


def write(papers: Path, identifier: str, claims: list[dict[str, Any]], **more: Any) -> None:
    """Write a record of a paper; `version=1` leaves out its format."""
    record = {"id": identifier, "scale": "cpu", "title": "t", "source": "Table", "claims": claims, **more}
    record |= {} if record.pop("version", 2) == 1 else {"format": 2}
    paper, _, name = identifier.partition("/")
    (papers / paper / "results").mkdir(parents=True, exist_ok=True)
    (papers / paper / "results" / f"{name}-cpu.json").write_text(json.dumps(record))


def read(found: Any, published: dict[str, float | None] | None = None) -> Measured:
    read = read_contrast(found, published or {})
    assert read is not None
    return read


def test_scores_are_read_in_points_and_numbers_of_runs_in_their_units():
    found = read(NUMBERS)
    assert (found.value, found.low, found.high) == pytest.approx((-0.25, -0.71, 0.21))
    assert (found.detectable, found.detectable_in_family, found.published) == pytest.approx((0.65, 0.91, 0.95))
    # version 0.1 wrote text
    text = read("em over plain: -0.25 points [-0.71, +0.21], p = 0.362", {"em over plain": 0.0095})
    assert (text.value, text.low, text.high, text.p) == pytest.approx((-0.25, -0.71, 0.21, 0.362))
    assert (text.published, text.detectable) == (pytest.approx(0.95), None)
    number = read({**NUMBERS, "measure": "NLL"})
    assert (number.value, number.published, number.points) == (-0.0025, 0.0095, False)
    # what a score is once heads are gone is a score
    score = read({**NUMBERS, "measure": "score_heads_50"})
    assert (score.value, score.points) == (-0.25, True)
    text = read("NLL of em over plain: +0.31 [+0.02, +0.60]", {"NLL of em over plain": 0.5})
    assert (text.published, text.p) == (0.5, None)
    # what has no interval is left out
    for bare in ("em over plain: not run", {**NUMBERS, "low": None}, {"verdict": "no verdict"}):
        assert read_contrast(bare, {}) is None


def test_a_claim_is_decided_by_its_furthest_contrast():
    def measured(value: float, p: float | None, verdict: str = "") -> Measured:
        return Measured("a over b", value, value - 1, value + 1, points=True, p=p, verdict=verdict)

    weak, strong, below = measured(1.0, 0.4), measured(2.0, 0.001), measured(-3.0, 0.002)
    # a contrast with the claim's own verdict comes before others; of contrasts with one p-value the lowest
    own, low, high = measured(0.5, 0.2, "not shown"), measured(-1.0, 1.0), measured(3.0, 1.0)
    assert choose_deciding([strong, weak], "borne out") is weak
    assert choose_deciding([weak, strong, below], "contradicted") is below
    assert choose_deciding([measured(0.1, 0.9, "borne out"), own], "not shown") is own
    assert choose_deciding([high, low], "not shown") is low
    assert choose_deciding([], "not shown") is None


def test_the_page_has_every_claim_its_place_and_what_was_not_run(tmp_path: Path):
    claims = [claim("EM helps.", "no verdict (3 seeds)", NUMBERS), claim("Again.", "no verdict (3 seeds)", NUMBERS)]
    write(tmp_path, "diversify/table-5", [*claims, claim("It is cheap.", "measured, not tested")], title="Main results")
    contrasts = [{**NUMBERS, "contrast": f"svgd over plain in {part}", "by_seed": [1]} for part in ("Yelp", "SNLI")]
    described = ["Yelp: reviews: 8 train", "SNLI: SICK, since SNLI's training file is absent: 4 train"]
    write(tmp_path, "repulsive/table-1", [claim("-", "not shown", one) for one in contrasts], described=described)
    # version 0.1 wrote no published numbers
    text = "svgd over plain: -0.25 points [-0.71, +0.21], p = 0.362"
    write(tmp_path, "repulsive/table-6", [claim("It was.", "not shown", text)], version=1)
    for name in ("dose-pairs", "lm", "dose-logic"):
        picture = {"file": f"{name}.png", "alt": name, "caption": "Score by effective heads."}
        write(tmp_path, f"diversity/{name}", [], source=OWN, title=name, pictures=[picture])
    page = build_overview(read_papers(tmp_path))
    # a comparison that several claims name is counted once
    counted = (
        "judged by calibrated tests, 2 tables and figures: 2 comparisons of scores (2 published gain not found).\n"
    )
    assert f"The three papers, {counted}" in page
    link = "[diversify/table-5](diversify/RESULTS.md#diversifytable-5-at-scale-cpu-main-results)"
    ours = f"{MINUS}0.25 ({MINUS}0.71 to +0.21)"
    assert f"| EM helps. | em over plain | +0.95 | {ours} | 0.65 to 0.91 | no verdict (3 seeds) | {link} |" in page
    assert f"| It is cheap. | {' | '.join([NONE] * 4)} | measured, not tested | {link} |" in page
    assert f"| It was. | svgd over plain | +0.80 | {ours} | {NONE} | not shown (version 0.1) |" in page
    # data that stand in for the paper's are named
    assert "| svgd over plain in Yelp |" in page
    assert "| svgd over plain in SNLI (SICK) |" in page
    absent = page.partition("without a record")[2]
    assert "| diversify/table-1 |" in absent
    assert "| diversify/table-5 |" not in absent
    # the pictures of doses come first
    doses = page.partition("## Doses\n")[2].partition("## diversify")[0].split("\n\n")
    assert [line.strip() for line in doses if line.strip()] == [
        "Score by effective heads.",
        *(
            line
            for name in ("dose-logic", "dose-pairs")
            for line in (
                f"[{name}](diversity/RESULTS.md#diversity{name}-at-scale-cpu-{name}):",
                f"![{name}](diversity/results/{name}.png)",
            )
        ),
    ]


def test_a_link_is_text_everywhere_but_in_markdown():
    grid = Grid("t", ("place",), ((Link("a_b", to="x.md#y"),),), "l")
    assert grid.text == (("a_b",),)
    assert "| [a\\_b](x.md#y) |" in grid.to_markdown()


def test_records_say_whether_plain_was_still_rising_on_dev_when_its_training_ended():
    def table(*curves: list[float], arm: str = "plain") -> dict[str, Any]:
        counts, runs = {"arm": "counts", "runs": [{"dev": []}]}, [{"dev": dev} for dev in curves]
        return {"rows": [counts, {"arm": arm, "runs": runs}]}

    long = [0.50, 0.60, 0.62, 0.63, 0.68, 0.70]
    rising = table(long, [score + 0.01 for score in long], [*long[:5], 0.72])
    # the last two of six epochs against the best of the first four: 0.07, 0.07, 0.09
    rise = "The last 2 of 6 epochs added +7.67 (+4.80 to +10.54) points to plain's best score on dev; it still rose."
    scores = "50.3, 60.3, 62.3, 63.3, 68.3, 71.0"
    assert describe_rise(rising) == rise
    assert describe_plateau(rising) == f"Score of plain on dev after each epoch, mean over seeds: {scores}. {rise}"
    # the last third is rounded down
    four = table([0.5, 0.6, 0.8, 0.7], [0.5, 0.6, 0.8, 0.9], [0.5, 0.6, 0.8, 0.8])
    assert describe_rise(four).startswith("The last epoch added 0.00 (")
    for last in ((0.58, 0.60, 0.58), (0.70, 0.60, 0.59)):
        falling = table([0.50, 0.60, last[0]], [0.52, 0.62, last[1]], [0.51, 0.58, last[2]])
        assert describe_rise(falling).endswith("plain's best score on dev; no further rise is shown.")
    # of one seed nothing is concluded
    said = "The last epoch added +10.00 points to plain's best score on dev."
    assert describe_rise(table([0.1, 0.2, 0.3])) == said
    for short in (table([0.1, 0.2], [0.1, 0.3]), table([0.1, 0.2, 0.3], arm="svgd"), table([], [])):
        assert describe_rise(short) == describe_plateau(short) == ""
