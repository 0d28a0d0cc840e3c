"""Figures of papers and of our own studies show the numbers that their claims are about."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import matplotlib.axes
import pytest

from headwise.errors import DataError
from headwise_lab.experiment.registry import named_task
from headwise_lab.papers.claims import judge
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.diversity.doses import EFFECTIVE, draw_doses, name_doses
from headwise_lab.papers.diversity.shrinking import draw_shrinking, tabulate_shrinking
from headwise_lab.papers.figures import draw_curve
from headwise_lab.papers.guided.roles import draw_role_worth
from headwise_lab.papers.records import Reproduced, write_records
from headwise_lab.papers.repulsive import figures as repulsive
from headwise_lab.results.cells import show_signed
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.runs import read_results
from headwise_lab.results.table import make_table, read_table
from lab.results.synthetic_comparison import Drawn, write_comparison

PNG = b"\x89PNG"
CKA = name_doses("cka")


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


@pytest.mark.full
def test_doses_have_a_line_for_each_method_that_was_run_and_a_panel_for_each_budget(evidence):
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
    assert draw_doses({"1x": Evidence(evidence.results)}, {"1x": table}) is None
    # the claim about effective heads is their slope
    study = REPRODUCTIONS["diversity/dose-logic"]
    claims = [claim for claim in study.claims if CKA in [one.doses for one in claim.contrasts]]
    found = {
        one.contrast.measure: one
        for claim in judge(claims, {"1x": evidence})
        for one in claim.found
        if one.contrast.doses == CKA and one.contrast.part == "1x"
    }
    assert found[EFFECTIVE].estimate is not None
    assert found[EFFECTIVE].estimate.value == pytest.approx(0.5)
    assert found[EFFECTIVE].contrast.kind == "manipulation check"


# What half of the heads adds to the loss.
COSTS = {"plain": 1.0, "output-relative": 1.5, "cka": 2.0, "svgd-span": 0.5, "cka-together": 0.25, "scaled": 0.3}


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    arms = ("plain", "output-relative", "cka", "svgd-span", "scaled", "cka-together")
    drawn = [Drawn(arm, None if arm == "plain" else "plain") for arm in arms]
    results = read_results(write_comparison(tmp_path_factory.mktemp("runs"), drawn, items=40))
    numbers = {}
    for run in results.runs:
        cost = COSTS[run.arm] + 0.01 * ((list(COSTS).index(run.arm) + 1) * run.seed % 5)
        numbers[run.arm, run.seed] = {
            "loss_heads_100": 0.5,
            "loss_added_heads_75": cost / 2,
            "loss_added_heads_50": cost,
            "loss_added_heads_25": 2 * cost,
            "score_heads_50": 0.9 - cost / 4,
            "effective_heads": 2.0 + cost,
        }
    return Evidence(results, numbers)


def test_arms_are_compared_with_plain_by_the_loss_that_half_of_their_heads_adds(shrunk):
    claims = REPRODUCTIONS["diversity/shrinking-logic"].claims_at("demo", named_task("logic").scales)
    judged = {one.claim.statement.partition(":")[0]: one for one in judge(claims, {"": shrunk})}
    needed = judged["Heads that were made different are all needed"]
    found = {(one.contrast.arm, one.contrast.against): one for one in needed.found}
    assert {pair: one.verdict for pair, one in found.items()} == {
        ("output-relative", "plain"): "borne out",
        ("cka", "plain"): "borne out",
        ("svgd-span", "plain"): "contradicted",
        ("svgd-span", "scaled"): "borne out",
    }
    cka: Any = found["cka", "plain"].estimate
    assert (cka.value, cka.seeds, cka.items) == (pytest.approx(1.0), 5, 1)
    spared = judged["Of heads that were made alike, some can be spared"]
    assert spared.verdict == "borne out"
    assert spared.found[0].estimate is not None
    assert spared.found[0].estimate.value == pytest.approx(0.75 + 0.02)
    scores = judged["The score after removing half of them, above plain's (ours)."]
    assert (scores.verdict, len(scores.found)) == ("measured, not tested", 4)


@pytest.mark.full
def test_the_loss_added_is_shown_by_the_share_of_heads(shrunk):
    table = make_table(shrunk.results)
    grid = tabulate_shrinking({"": shrunk}, {"": table})
    assert grid is not None
    assert grid.header == ("arm", "loss, whole", "75% of heads", "50% of heads", "25% of heads")
    value: Any = next(row for row in grid.rows if row[0] == "cka")[3]
    assert (value.value, value.low, value.high) == pytest.approx((2.02, 2.00037, 2.03963), abs=1e-4)
    (picture,) = draw_shrinking("", Path(), shrunk, table)
    assert picture.name == "shrinking"
    assert "cka, heads: 100% +0.000, 75% +1.010, 50% +2.020, 25% +4.040" in picture.alt
    silent = Evidence(shrunk.results)
    assert tabulate_shrinking({"": silent}, {"": table}) is None
    assert draw_shrinking("", Path(), silent, table) == ()


ROLES = REPRODUCTIONS["guided/figure-2"]
SETS = tuple(part.name for part in ROLES.parts)
# A higher effect of the replacement is a lower worth of the role.
EFFECTS = {"plain": -0.4, "guided": 0.0, "guided:drop=rare": 0.8, "guided:random=rare": 0.2, "guided:drop=major": -0.9}


@pytest.mark.full
def test_each_mark_is_the_mean_over_sets_of_the_lead_over_what_replaced_the_role(tmp_path):
    arms = tuple(Drawn(name, None if name == "plain" else "plain", effect) for name, effect in EFFECTS.items())
    evidence = {
        part: Evidence(read_results(write_comparison(tmp_path / part, arms, items=60 + 10 * place, seed=place)))
        for place, part in enumerate(SETS)
    }
    tables = {part: make_table(one.results) for part, one in evidence.items()}
    found = Reproduced(ROLES, "demo", dict.fromkeys(SETS, ""), evidence, tables)
    (picture,) = found.pictures
    assert picture.png.startswith(PNG)
    assert f"mean of {', '.join(SETS)}" in picture.caption

    def mean(arm: str) -> float:
        rows = [table.row(arm) for table in tables.values()]
        return sum(100 * row.score.value for row in rows if row is not None) / len(rows)

    leads = {arm: mean("guided") - mean(arm) for arm in EFFECTS if arm != "guided"}
    assert leads["plain"] > 3
    assert leads["guided:drop=rare"] < -3
    assert leads["guided:drop=major"] > leads["plain"]
    assert picture.alt.split("; ") == [
        f"all five replaced by the padding mask: {show_signed(leads['plain'])} points",
        f"rare replaced by the padding mask: {show_signed(leads['guided:drop=rare'])} points",
        f"major replaced by the padding mask: {show_signed(leads['guided:drop=major'])} points",
        f"rare replaced by a random mask as sparse: {show_signed(leads['guided:random=rare'])} points",
    ]
    # it stands in the record and on its page
    page = write_records(found, tmp_path / "paper", "headwise reproduce guided/figure-2")
    record = json.loads((tmp_path / "paper" / "results" / "figure-2-demo.json").read_text())
    assert record["pictures"][0]["file"] == "figure-2-demo-roles.png"
    assert (tmp_path / "paper" / "results" / "figure-2-demo-roles.png").read_bytes() == picture.png
    assert f"![{picture.alt}](results/figure-2-demo-roles.png)" in page.read_text()
    without = dataclasses.replace(found, reproduction=dataclasses.replace(ROLES, overview=None))
    assert without.pictures == ()
    # without all sets there is nothing to draw
    assert draw_role_worth(judge(ROLES.claims, {part: evidence[part] for part in SETS[1:]})) is None


@pytest.mark.full
def test_a_curve_is_drawn_over_parts_and_not_over_one(tmp_path, monkeypatch):
    evidence, tables = {}, {}
    for place, part in enumerate(("2 heads", "4 heads")):
        arms = (Drawn("plain", None), *([Drawn("svgd")] if place else []))
        results = read_results(write_comparison(tmp_path / part, arms, items=20, seeds=(0, 1)))
        numbers = {(arm.name, seed): {"NLL": 2.0 + place + seed / 10} for arm in arms for seed in (0, 1)}
        evidence[part], tables[part] = Evidence(results, numbers), make_table(results)
    lines: list[int] = []
    draw = matplotlib.axes.Axes.plot

    def seen(axes: matplotlib.axes.Axes, x: list[float], *rest: Any, **look: Any) -> object:
        lines.append(len(x))
        return draw(axes, x, *rest, **look)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", seen)
    picture: Any = draw_curve("NLL", evidence, tables)
    assert picture.alt == "plain: 2 heads 2.050, 4 heads 3.050; svgd: 4 heads 3.050"
    assert picture.png.startswith(PNG)
    assert picture.caption == "NLL by part: each dot a seed, each line an arm's means, its band from seed to seed."
    assert 2 in lines
    lines.clear()
    named = {"2 heads": "Twitter", "4 heads": "Wikipedia"}
    sets: Any = draw_curve("NLL", *({named[part]: own[part] for part in named} for own in (evidence, tables)))
    assert sets.caption == "NLL by part: each dot a seed, each large mark an arm's mean."
    assert set(lines) == {1}, "sets have no order that a line could follow"
    assert draw_curve("NLL", {"2 heads": evidence["2 heads"]}, {"2 heads": tables["2 heads"]}) is None
    assert draw_curve("absent", evidence, tables) is None


def write_rounds(out: Path, rounds: int) -> Path:
    """Pre-trainings of two arms, of which plain has no force."""
    write_comparison(out, (Drawn("plain", None), Drawn("svgd")), seeds=(0, 1), items=20)
    for arm in ("plain", "svgd"):
        for seed in (0, 1):
            lines = []
            for n in range(rounds):
                dev = {"pooled": 0.5 + 0.1 * seed, "generator_loss": 6.0 - n, "discriminator_loss": 0.4 - 0.01 * n}
                lines.append(json.dumps({"dev": dev, "force_ratio": None if arm == "plain" else 2.0 + seed + n}) + "\n")
            (out / arm / f"seed-{seed}" / "epochs.jsonl").write_text("".join(lines))
    return out


def draw_rounds(out: Path):
    return repulsive.draw_training_curves("", out, Evidence(read_results(out)), read_table(out))


@pytest.mark.full
def test_each_number_of_a_pre_training_has_a_curve_of_each_arm_that_has_it(tmp_path, monkeypatch):
    curves, draw = [], repulsive.draw_range

    def watched(axes, places, low, middle, high, style):
        curves.append((list(low), list(middle), list(high)))
        draw(axes, places, low, middle, high, style)

    monkeypatch.setattr(repulsive, "draw_range", watched)
    out = write_rounds(tmp_path / "runs", 4)
    (picture,) = draw_rounds(out)
    assert picture.png.startswith(PNG)
    assert len(curves) == 7
    assert curves[0] == ([6.0, 5.0, 4.0, 3.0],) * 3
    assert [ends[0] for ends in curves[4]] == pytest.approx([50.0, 55.0, 60.0])
    assert curves[6] == ([2.0, 3.0, 4.0, 5.0], [2.5, 3.5, 4.5, 5.5], [3.0, 4.0, 5.0, 6.0])
    assert "force ratio: repulsion over drive of svgd 2.5 to 5.5" in picture.alt
    path = out / "svgd" / "seed-1" / "epochs.jsonl"
    path.write_text(path.read_text().replace('"generator_loss": 5.0, ', "", 1))
    with pytest.raises(DataError, match=r"epochs\.jsonl, line 2 has no dev\.generator_loss"):
        draw_rounds(out)
    # two rounds are no curve
    assert draw_rounds(write_rounds(tmp_path / "short", 2)) == ()
