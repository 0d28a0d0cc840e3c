"""A record can be recomputed from its numbers, without headwise; records of version 0.1 keep their text."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwise_lab.papers.claims import Claim, Contrast, compare_arms, judge
from headwise_lab.papers.pages import EARLIER, POWER, build_claims_grids, record_claims, render
from headwise_lab.papers.records import Reproduced, tabulate_parts, write_records
from headwise_lab.papers.reproduction import Column, PaperRow, Part, Published, Reproduction, Size
from headwise_lab.results.cells import NONE, Grid
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.grids import NOTE
from headwise_lab.results.runs import read_results
from lab.results.synthetic_comparison import PAPER, write_comparison

SCRIPT = Path(__file__).parents[4] / "benchmarks" / "recompute.py"
ARMS = ("plain", "smooth", "svgd", "output", "trunk", "em")
TABLE = Reproduction(
    id="mine/table-1",
    title="t",
    source="s",
    task="logic",
    parts=(Part(ARMS, {"demo": Size("demo")}),),
    extra="nothing",
    claims=(
        Claim("Each helps.", compare_arms(("output", "em"), "plain")),
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


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    results = read_results(write_comparison(tmp_path / "runs", PAPER, items=60))
    runs = {(run.arm, run.seed): run for run in results.runs}
    numbers = {
        key: {"output_cosine": run.measures["output_cosine"] or 0.0, "step_seconds": run.step_seconds or 0.0}
        for key, run in runs.items()
    }
    return Evidence(results, numbers)


@pytest.fixture
def paper(evidence: Evidence, tmp_path: Path) -> Path:
    tables = tabulate_parts(TABLE, "demo", {"": evidence})
    found = Reproduced(TABLE, "demo", {"": ""}, {"": evidence}, tables)
    write_records(found, tmp_path / "paper", "headwise reproduce mine/table-1")
    return tmp_path / "paper"


def read(paper: Path) -> dict[str, Any]:
    return json.loads((paper / "results" / "table-1-demo.json").read_text())


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("recompute", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_imports_nothing_of_headwise_and_recomputes_every_contrast(paper):
    imported = {
        name
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
    }
    assert not any(str(name).startswith(("headwise", "torch")) for name in imported)
    done = subprocess.run([sys.executable, SCRIPT, paper], capture_output=True, text=True, check=False)
    # three contrasts of scores and one of heads, six numbers each, and one of cost without p-values
    assert done.stdout.endswith("table-1-demo.json: 28 numbers recomputed, 0 disagree\n"), done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("name", ["value", "low", "high", "p", "p_holm", "detectable"])
def test_a_number_that_does_not_follow_from_the_others_is_named(paper, name):
    record, script = read(paper), load_script()
    contrast = record["claims"][0]["contrasts"][1]
    contrast[name] += 0.01
    # the same contrast stands in two claims
    record["claims"] = record["claims"][:1] + record["claims"][2:]
    record["claims"][0]["contrasts"] += read(paper)["claims"][1]["contrasts"][1:]
    _, wrong = script.check(record)
    assert [line.partition(" is ")[0] for line in wrong] == [f"mine/table-1, em over plain: {name}"]


def test_a_record_holds_the_scores_of_each_run_as_numbers(paper, evidence):
    rows = {row["arm"]: row for row in read(paper)["tables"][""]["rows"]}
    results = evidence.results
    for run in results.runs:
        (point,) = [one for one in rows[run.arm]["runs"] if one["seed"] == run.seed]
        assert point["score"] == pytest.approx(results.metric.values(run.statistics).mean())
    grids = [Grid.from_record(found) for found in read(paper)["grids"]]
    (details,) = (paper / "results").glob("*.md")
    page = details.read_text()
    assert grids
    assert all(grid.to_markdown() in page for grid in grids)
    assert NOTE in page
    assert EARLIER not in page


def test_scores_and_heads_are_families_apart_and_cost_is_in_none(evidence):
    judged = judge(TABLE.claims, {"": evidence})
    families = {(str(one.contrast), one.judgement.family) for claim in judged for one in claim.found}
    assert families == {
        ("output over plain", 3),
        ("em over plain", 3),
        ("em over trunk", 3),
        ("output cosine of plain over svgd", 1),
        ("step seconds of em over plain", 0),
    }
    assert judged[3].verdict == "measured, not tested"
    missing = Claim("", (Contrast("absent", "plain"), Contrast("plain", "svgd", measure="debiased_cka")))
    more = judge((*TABLE.claims, missing), {"": evidence})
    assert [one.judgement.family for one in (more[0].found[0], more[2].found[0])] == [4, 2]


def test_a_contrast_has_one_verdict_wherever_it_is_printed(paper):
    record = read(paper)
    (twice, again), row = (
        [one for claim in record["claims"][:2] for one in claim["contrasts"] if one["contrast"] == "em over plain"],
        next(row for row in record["tables"][""]["rows"] if row["arm"] == "em"),
    )
    assert twice == again
    assert row["to_plain"]["p_holm"] == twice["p_holm"]
    assert row["to_control"]["against"] == "trunk"
    assert row["to_control"]["p_holm"] == record["claims"][1]["contrasts"][1]["p_holm"]
    svgd = next(row for row in record["tables"][""]["rows"] if row["arm"] == "svgd")
    # no claim is about its control
    assert (svgd["to_control"]["p_holm"], svgd["to_control"]["family"], svgd["verdict"]) == (None, 0, "")


def test_tables_that_share_a_contrast_have_one_verdict_on_it():
    verdicts: dict[Any, set[str]] = {}
    for path in (SCRIPT.parents[1] / "laboratory" / "papers").glob("*/results/*.json"):
        for found in (one for claim in json.loads(path.read_text())["claims"] for one in claim["contrasts"]):
            if isinstance(found, dict):
                key = found["contrast"], found["measure"], *found["by_seed"]
                verdicts.setdefault(key, set()).add(found["verdict"].partition(" (")[0])
    assert {key: words for key, words in verdicts.items() if len(words) > 1} == {}
    assert len(verdicts) > 300


def test_published_differences_are_those_of_the_papers_cells(evidence):
    claims = TABLE.claims_at("demo", {"demo": type("Scale", (), {"layers": 2, "name": "demo", "encoder_layers": 2})})
    gains = {str(one): one.published for claim in claims for one in claim.contrasts}
    assert gains["output over plain"] == pytest.approx(0.055)
    assert {gains[name] for name in gains if name != "output over plain"} == {None}
    recorded = record_claims(judge(claims, {"": evidence}))
    output, em = recorded[0]["contrasts"]
    low, high = output["low"], output["high"]
    assert output["holds_published"] == (low <= 0.055 <= high)
    assert 0 <= output["p_equivalence"] <= 1
    assert em["p_equivalence"] is None
    power = build_claims_grids(recorded)[1]
    assert power.title == POWER
    assert {row[3] for row in power.text if row[0] != "output over plain"} == {NONE}
    row = next(row for row in power.text if row[0] == "output over plain")
    assert row[3:5] == ("+5.50 points", "yes" if output["holds_published"] else "no")
    assert row[2] == f"{100 * output['detectable']:.2f} to {100 * output['detectable_in_family']:.2f}"


def test_means_over_parts_bins_and_heads_have_published_differences_where_all_are_printed():
    rows = tuple(
        PaperRow(arm, arm, (cell,), part)
        for part, cells in {"a": ("80", "82"), "b": ("70", "71"), "c": ("60", "")}.items()
        for arm, cell in zip(("plain", "guided"), cells, strict=True)
    )
    published = Published("x", (Column("accuracy"),), rows)
    found = {
        name: published.difference(contrast, lambda _part, arm: arm)
        for name, contrast in {
            "one": Contrast("guided", "plain", part="a"),
            "across": Contrast("guided", "plain", part="a", against_part="b"),
            "mean": Contrast("guided", "plain", over=("a", "b")),
            "unprinted": Contrast("guided", "plain", over=("a", "c")),
            "bins": Contrast("guided", "plain", part="a", bins=(1, 2)),
            "heads": Contrast("guided", "plain", part="a", measure="distance"),
            "number": Contrast("guided", "plain", part="a", measure="AUC"),
        }.items()
    }
    assert {name for name, value in found.items() if value is None} == {"unprinted", "bins", "heads", "number"}
    assert [found[name] for name in ("one", "across", "mean")] == pytest.approx([0.02, 0.12, 0.015])
    auc = Published("x", (Column("AUC", measure="AUC"),), rows)
    assert auc.difference(Contrast("guided", "plain", part="a", measure="AUC"), lambda _p, arm: arm) == 2.0


def test_a_record_of_version_0_1_keeps_its_text_and_says_so(paper):
    (paper / "results" / "table-1-demo.json").unlink()
    record = {
        **dict.fromkeys(("id", "title", "source", "extra", "scale", "data", "primary", "command"), "x"),
        "claims": [{"statement": "It helps.", "verdict": "not shown", "contrasts": ["a over b: +1 [0, 2], p = 1"]}],
        "missing": [],
        "comparable": False,
        "grids": [{"title": "g", "header": ["arm", "score"], "rows": [["plain", "90.1 ±0.3"]], "align": "lr"}],
        "versions": {"headwise": "0.1.0"},
    }
    (paper / "results" / "old-demo.json").write_text(json.dumps(record))
    pages = render(paper)
    assert "**Judged by version 0.1**" in pages[paper / "RESULTS.md"]
    page = "\n".join(pages.values())
    assert "| It helps. | a over b: +1 \\[0, 2\\], p = 1 | not shown |" in page
    assert "| plain | 90.1 ±0.3 |" in page
    assert EARLIER in page
    assert NOTE not in page
    assert POWER not in page


def test_a_table_that_is_not_on_the_papers_data_names_its_own(paper):
    record = read(paper) | {
        "published": {"title": "t", "header": ["arm"], "rows": [["plain"]], "align": "l"},
        "comparable": False,
        "described": ["A: texts: 9 train", "B: SICK, since SNLI is absent: 4,440 train", "own, en to de\ntrain: 7"],
    }
    (paper / "results" / "table-1-demo.json").write_text(json.dumps(record))
    page = render(paper)[paper / "RESULTS.md"]
    assert " Our data: B: SICK, since SNLI is absent; own, en to de.\n" in page
