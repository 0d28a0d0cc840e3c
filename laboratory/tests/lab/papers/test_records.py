"""Records hold numbers from which anyone computes their contrasts again; grids hold the paper's numbers beside ours."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headwise.errors import DataError
from headwise_lab.experiment.evaluation import METRICS
from headwise_lab.papers import records
from headwise_lab.papers.claims import Claim, Contrast, judge
from headwise_lab.papers.pages import EARLIER, POWER, build_claims_grids, record_claims, render
from headwise_lab.papers.records import (
    Reproduced,
    build_grouped_grid,
    build_published_grid,
    tabulate_parts,
    write_records,
)
from headwise_lab.papers.reproduction import Column, PaperRow, Part, Published, Reproduction, Size
from headwise_lab.results.cells import NONE, Grid
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.grids import NOTE
from headwise_lab.results.runs import read_results
from headwise_lab.results.statistics import estimate, score
from headwise_lab.results.table import make_table
from lab.results.synthetic_comparison import PAPER, Drawn, write_comparison

ROOT = Path(__file__).parents[4]
PAPERS = ROOT / "laboratory" / "papers"
SCRIPT = ROOT / "benchmarks" / "recompute.py"
TABLE = Reproduction(
    id="mine/table-1",
    title="t",
    source="s",
    task="logic",
    parts=(Part(("plain", "smooth", "svgd", "output", "trunk", "em"), {"demo": Size("demo")}),),
    extra="nothing",
    claims=(
        Claim("Each helps.", (Contrast("output", "plain"), Contrast("em", "plain"))),
        Claim("Again.", (Contrast("em", "plain"), Contrast("em", "trunk"))),
        Claim("They differ.", (Contrast("plain", "svgd", measure="output_cosine"),)),
        Claim("It is not much slower.", (Contrast("em", "plain", measure="step_seconds"),)),
    ),
    published=Published(
        "somewhere",
        (Column("accuracy"),),
        (PaperRow("base", "plain", ("80.1",)), PaperRow("out", "output", ("85.6",)), PaperRow("EM", "em", ("",))),
    ),
)


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    results = read_results(write_comparison(tmp_path_factory.mktemp("runs"), PAPER, items=60))
    numbers = {
        (run.arm, run.seed): {
            "output_cosine": run.measures["output_cosine"] or 0.0,
            "step_seconds": run.step_seconds or 0.0,
        }
        for run in results.runs
    }
    return Evidence(results, numbers)


@pytest.fixture(scope="module")
def paper(evidence: Evidence, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tables = tabulate_parts(TABLE, "demo", {"": evidence})
    place = tmp_path_factory.mktemp("paper")
    write_records(Reproduced(TABLE, "demo", {"": ""}, {"": evidence}, tables), place, "headwise reproduce mine/table-1")
    return place


@pytest.fixture
def kept(paper: Path) -> dict[str, Any]:
    return json.loads((paper / "results" / "table-1-demo.json").read_text())


def write_record(place: Path, record: dict[str, Any]) -> dict[Path, str]:
    """Write a record and return the pages of its paper."""
    (place / "results").mkdir(exist_ok=True)
    (place / "results" / "table-1-demo.json").write_text(json.dumps(record))
    return render(place)


@pytest.mark.full
def test_the_script_imports_nothing_of_headwise_and_recomputes_every_contrast(paper, kept):
    nodes = [node for node in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {one.name for node in nodes for one in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith(("headwise", "torch")) for name in imported)
    done = subprocess.run([sys.executable, SCRIPT, paper], capture_output=True, text=True, check=False)
    # three contrasts of scores and one of heads, six numbers each, and one of cost without p-values
    assert done.stdout.endswith("table-1-demo.json: 28 numbers recomputed, 0 disagree\n"), done.stdout + done.stderr
    assert done.returncode == 0
    spec = importlib.util.spec_from_file_location("recompute", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    # the same contrast stands in two claims
    claims = [kept["claims"][0], *kept["claims"][2:]]
    claims[0]["contrasts"] += kept["claims"][1]["contrasts"][1:]
    for name in ("value", "low", "high", "p", "p_holm", "detectable"):
        changed = json.loads(json.dumps(kept | {"claims": claims}))
        changed["claims"][0]["contrasts"][1][name] += 0.01
        _, wrong = script.check(changed)
        assert [line.partition(" is ")[0] for line in wrong] == [f"mine/table-1, em over plain: {name}"]


def test_a_record_holds_the_scores_of_each_run_as_numbers(paper, kept, evidence):
    rows = {row["arm"]: row for row in kept["tables"][""]["rows"]}
    for run in evidence.results.runs:
        (point,) = [one for one in rows[run.arm]["runs"] if one["seed"] == run.seed]
        assert point["score"] == pytest.approx(evidence.results.metric.values(run.statistics).mean())
    (details,) = (paper / "results").glob("*.md")
    page = details.read_text()
    assert kept["grids"]
    assert all(Grid.from_record(grid).to_markdown() in page for grid in kept["grids"])
    assert NOTE in page
    assert EARLIER not in page


def test_scores_and_heads_are_families_apart_and_cost_is_in_none(evidence):
    judged = judge(TABLE.claims, {"": evidence})
    families = {(str(one.contrast), one.judgement and one.judgement.family) for claim in judged for one in claim.found}
    assert families == {
        ("output over plain", 3),
        ("em over plain", 3),
        ("em over trunk", 3),
        ("output cosine of plain over svgd", 1),
        ("step seconds of em over plain", 0),
    }
    assert judged[3].verdict == "measured, not tested"
    # what could not be measured counts too
    missing = Claim("", (Contrast("absent", "plain"), Contrast("plain", "svgd", measure="debiased_cka")))
    more = judge((*TABLE.claims, missing), {"": evidence})
    assert [one.judgement and one.judgement.family for one in (more[0].found[0], more[2].found[0])] == [4, 2]


def test_a_contrast_has_one_verdict_wherever_it_is_printed(kept):
    contrasts = [one for claim in kept["claims"][:2] for one in claim["contrasts"]]
    twice, again = (one for one in contrasts if one["contrast"] == "em over plain")
    rows = {row["arm"]: row for row in kept["tables"][""]["rows"]}
    assert twice == again
    assert rows["em"]["to_plain"]["p_holm"] == twice["p_holm"]
    assert (rows["em"]["to_control"]["against"], rows["em"]["to_control"]["p_holm"]) == (
        "trunk",
        contrasts[3]["p_holm"],
    )
    # no claim is about its control
    untested = rows["svgd"]["to_control"]
    assert (untested["p_holm"], untested["family"], rows["svgd"]["verdict"]) == (None, 0, "")
    verdicts: dict[Any, set[str]] = {}
    for path in PAPERS.glob("*/results/*.json"):
        for found in (one for claim in json.loads(path.read_text())["claims"] for one in claim["contrasts"]):
            if isinstance(found, dict):
                key = found["contrast"], found["measure"], *found["by_seed"]
                verdicts.setdefault(key, set()).add(found["verdict"].partition(" (")[0])
    assert {key: words for key, words in verdicts.items() if len(words) > 1} == {}
    assert len(verdicts) > 300


def test_published_differences_are_those_of_the_papers_cells(evidence):
    claims = TABLE.claims_at("demo", {"demo": SimpleNamespace(layers=2, name="demo", encoder_layers=2)})
    gains = {str(one): one.published for claim in claims for one in claim.contrasts}
    assert gains.pop("output over plain") == pytest.approx(0.055)
    assert set(gains.values()) == {None}
    recorded = record_claims(judge(claims, {"": evidence}))
    output, em = recorded[0]["contrasts"]
    assert output["holds_published"] == (output["low"] <= 0.055 <= output["high"])
    assert 0 <= output["p_equivalence"] <= 1
    assert em["p_equivalence"] is None
    power = build_claims_grids(recorded)[1]
    assert power.title == POWER
    rows = {row[0]: row for row in power.text}
    row = rows.pop("output over plain")
    assert {other[3] for other in rows.values()} == {NONE}
    assert row[3:5] == ("+5.50 points", "yes" if output["holds_published"] else "no")
    assert row[2] == f"{100 * output['detectable']:.2f} to {100 * output['detectable_in_family']:.2f}"


def test_means_over_parts_bins_and_heads_have_published_differences_where_all_are_printed():
    cells = {"a": ("80", "82"), "b": ("70", "71"), "c": ("60", "")}
    rows = tuple(
        PaperRow(arm, arm, (cell,), part)
        for part, own in cells.items()
        for arm, cell in zip(("p", "g"), own, strict=True)
    )

    def differences(*contrasts: Contrast, measure: str = "") -> list[float | None]:
        published = Published("x", (Column("number", measure=measure),), rows)
        return [published.difference(contrast, lambda _part, arm: arm) for contrast in contrasts]

    alone = Contrast("g", "p", part="a")
    across, mean = Contrast("g", "p", part="a", against_part="b"), Contrast("g", "p", over=("a", "b"))
    assert differences(alone, across, mean) == pytest.approx([0.02, 0.12, 0.015])
    auc, bins = Contrast("g", "p", part="a", measure="AUC"), Contrast("g", "p", part="a", bins=(1, 2))
    heads, unprinted = Contrast("g", "p", part="a", measure="distance"), Contrast("g", "p", over=("a", "c"))
    assert differences(unprinted, bins, heads, auc) == [None] * 4
    assert differences(auc, measure="AUC") == [2.0]


def test_pages_of_records_say_how_they_were_judged_and_on_which_data(kept, tmp_path):
    record = kept | {
        "published": {"title": "t", "header": ["arm"], "rows": [["plain"]], "align": "l"},
        "comparable": False,
        "described": ["A: texts: 9 train", "B: SICK, since SNLI is absent: 4,440 train", "own, en to de\ntrain: 7"],
    }
    page = write_record(tmp_path, record)[tmp_path / "RESULTS.md"]
    assert " Our data: B: SICK, since SNLI is absent; own, en to de.\n" in page
    old = {
        **dict.fromkeys(("id", "title", "source", "extra", "scale", "data", "primary", "command"), "x"),
        "claims": [{"statement": "It helps.", "verdict": "not shown", "contrasts": ["a over b: +1 [0, 2], p = 1"]}],
        "missing": [],
        "comparable": False,
        "grids": [{"title": "g", "header": ["arm", "score"], "rows": [["plain", "90.1 ±0.3"]], "align": "lr"}],
        "versions": {"headwise": "0.1.0"},
    }
    pages = write_record(tmp_path, old)
    assert "**Judged by version 0.1**" in pages[tmp_path / "RESULTS.md"]
    page = "\n".join(pages.values())
    for said in ("| It helps. | a over b: +1 \\[0, 2\\], p = 1 | not shown |", "| plain | 90.1 ±0.3 |", EARLIER):
        assert said in page
    assert NOTE not in page
    assert POWER not in page
    with pytest.raises(DataError, match=r"table-1-demo\.json is not the record of a reproduction"):
        write_record(tmp_path, {})
    with pytest.raises(DataError, match="holds no record"):
        render(tmp_path / "none")


def test_the_pages_of_each_paper_are_what_its_records_say():
    folders = sorted({path.parents[1] for path in PAPERS.glob("*/results/*.json")})
    assert len(folders) == 4
    for folder in folders:
        pages = [folder / "RESULTS.md", *(folder / "results").glob("*.md")]
        assert {path: path.read_text() for path in pages} == render(folder)


def reproduce_two(place: Path, data: str = "iwslt14", scale: str = "paper", size: str = "demo") -> Reproduced:
    """A reproduction with two parts, one of which the scale demo does not have, on drawn answers of the size demo."""
    sizes = {"demo": Size("demo"), "paper": Size(size, corpus="iwslt14")}
    parts = Part(("plain", "output"), sizes, "one"), Part(("plain",), {"paper": sizes["paper"]}, "two")
    speed = Column("Speed", "step time", per_second=True)
    columns = (Column("BLEU"), speed, Column("Para.", "parameters"), Column("more"))
    rows = (
        PaperRow("theirs", "plain", ("34.4", "1.5", "88M", ""), "one"),
        PaperRow("theirs too", "output", ("", "1.2", "+1M", "9.9"), "one"),
        PaperRow("elsewhere", "plain", ("30", "2", "90M", ""), "two"),
    )
    found = Reproduction("a/b", "t", "s", "translation", parts, "e", (), Published("IWSLT14", columns, rows))
    evidence = {"one": Evidence(read_results(place))}
    return Reproduced(found, scale, {"one": data}, evidence, {"one": make_table(evidence["one"].results)})


def test_the_papers_numbers_stand_beside_ours_and_compare_only_on_its_data_and_size(tmp_path):
    place = write_comparison(tmp_path / "runs", (Drawn("plain", None), Drawn("output")), items=20)
    grid = build_published_grid(reproduce_two(place, scale="demo"))
    assert grid is not None
    assert grid.header == (
        *("the paper's row", "part", "arm", "BLEU, paper", "BLEU, here", "Speed, paper"),
        *("step time over plain, paper", "step time over plain, here"),
        *("Para., paper", "parameters, here", "more, paper"),
    )
    plain, output, elsewhere = grid.text
    assert plain[:4] == ("theirs", "one", "plain", "34.4")
    assert plain[5:7] == ("1.5", "1.00")
    assert output[2:4] == ("output", NONE)
    assert output[5:7] == ("1.2", "1.25")
    assert output[8:] == ("+1M", "181,319", "9.9")
    assert elsewhere == ("elsewhere", "two", NONE, "30", NONE, "2", "1.00", NONE, "90M", NONE, NONE)
    assert Grid.from_record(json.loads(json.dumps(grid.to_record()))) == grid
    assert reproduce_two(place).is_the_papers
    for other in ({"data": "iwslt14-partial"}, {"scale": "demo"}, {"size": "paper"}):
        assert not reproduce_two(place, **other).is_the_papers


GROUPS = {"Easy": ("One", "Two"), "Hard": ("Three", "Four")}
PRINTED = {"One": "90.00", "Two": "80.40", "Three": "55.00"}
CELLS = tuple(PaperRow("Base", "plain", (cell,), part) for part, cell in PRINTED.items())
GROUPED = Published("somewhere", (Column("accuracy"),), CELLS)
ITEMS = 400
# A share that is above a half by less than a two-sided test tells.
BARELY = 0.5175


@pytest.fixture
def labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of two labels that runs in the working folder have."""
    monkeypatch.chdir(tmp_path)
    return keep_labels(2)


def keep_labels(count: int) -> Path:
    path = Path("vocabulary.json")
    path.write_text(json.dumps({"vocabulary": [], "labels": [str(one) for one in range(count)]}))
    return path


def right(share: float, seeds: int = 5) -> NDArray[np.bool_]:
    """Answers of which so many are right, under each seed others and a few more or fewer."""
    draw = np.random.default_rng(8)
    counts = [round(share * ITEMS) + (place - seeds // 2) * 4 for place in range(seeds)]
    return np.stack([draw.permutation(np.arange(ITEMS) < count) for count in counts])


def table(**shares: float) -> Any:
    """A table of rows by arm, and its runs."""
    rows, found = {}, []
    for arm, share in shares.items():
        baseline = arm == "majority"
        answers = right(share, 1 if baseline else 5)
        rows[arm] = SimpleNamespace(arm=arm, score=score(answers), baseline=baseline)
        found += [
            SimpleNamespace(arm=arm, seed=seed, baseline=baseline, statistics=one, folder=Path())
            for seed, one in enumerate(answers)
        ]
    arms = tuple(row for row in rows.values() if not row.baseline)
    results = SimpleNamespace(runs=found, metric=METRICS["accuracy"])
    return SimpleNamespace(row=rows.get, arms=arms, evidence=SimpleNamespace(results=results))


def build(**tables: Any) -> dict[str, tuple[str, ...]]:
    evidence = {part: one.evidence for part, one in tables.items()}
    found = build_grouped_grid("A table", GROUPED, GROUPS, tables, evidence, lambda _part, arm: arm)
    assert found.header == ("task", "majority", "plain, paper", "plain, here", "em, here")
    for said in (
        "scores in parentheses are not significantly above chance: the majority class, or 1/labels if higher",
        "Holm-adjusted over all scores of the grid",
    ):
        assert said in found.title
    return {row[0]: tuple(row[1:]) for row in found.text}


def test_what_is_not_told_to_be_above_chance_is_in_parentheses_and_nothing_else(labels):
    for share, marked in ((0.7, False), (0.51, True), (0.5, True), (0.3, True)):
        row = build(One=table(majority=0.5, plain=0.8, em=share))["One"]
        assert row[:2] == ("50.0", "90.00")
        assert not row[2].startswith("(")
        assert row[3].startswith("(") == row[3].endswith("))") == marked
        assert f"{100 * share:.1f}" in row[3]
    # the test is one-sided and adjusted over the whole grid: what is told alone is not beside three others
    assert 0.05 < estimate(right(BARELY) - 0.5).p < 0.1
    one, low = table(majority=0.5, plain=BARELY), table(majority=0.5, plain=0.3)
    assert records._find_at_chance({"One": one}, {"One": one.evidence}) == set()
    assert records._find_at_chance({"One": low}, {"One": low.evidence})
    assert build(One=one, Two=table(majority=0.5, plain=0.5, em=0.5))["One"][2].startswith("(")
    # where guessing does better than the majority it is the floor
    rare = table(majority=0.0, plain=0.245, em=0.4)
    marks = {
        count: [cell[0] == "(" for cell in (keep_labels(count), build(One=rare)["One"][2:])[1]] for count in (4, 40)
    }
    assert marks == {4: [True, False], 40: [False, False]}
    # without a majority nothing is marked
    row = build(One=table(plain=0.6, em=0.4))["One"]
    assert row[0] == NONE
    assert not row[3].startswith("(")
    labels.write_text("{}")
    with pytest.raises(DataError, match=r"vocabulary\.json does not hold the run's labels"):
        build(One=table(majority=0.5, plain=0.8, em=0.7))


@pytest.mark.usefixtures("labels")
def test_a_mean_is_over_the_parts_that_were_run_and_says_which():
    one, two = table(majority=0.5, plain=0.7, em=0.6), table(majority=0.5, plain=0.8, em=0.6)
    rows = build(One=one, Two=two, Three=table(majority=0.5, plain=0.55, em=0.65))
    assert rows["Easy: mean"] == (NONE, "85.20", "75.00", "60.00")
    assert rows["Hard: mean (Three)"] == (NONE, "55.00", "55.00", "65.00")
    assert rows["Four"] == (NONE,) * 4
    assert "Hard: mean" not in rows
    # an arm that some part of a group lacks has no mean there
    assert build(One=one, Two=table(majority=0.5, plain=0.8))["Easy: mean"] == (NONE, "85.20", "75.00", NONE)
