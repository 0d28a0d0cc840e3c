"""The reproductions of Wang et al. 2021: their runs, the paper's numbers, and a run of all of them at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from headwise_lab.experiment.scale import ScaleOptions
from headwise_lab.papers import run
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.reproduction import resize_scale
from headwise_lab.results.cells import NONE
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES
from lab.sentences import parse_without_spacy, write_sentences

pytestmark = pytest.mark.usefixtures("inline")

TABLE_2, TABLE_3, TABLE_3_FOLDS, FIGURE_2 = (
    REPRODUCTIONS[f"guided/{name}"] for name in ("table-2", "table-3", "table-3-folds", "figure-2")
)
SETS = {part.name: str(part.sizes["demo"].corpus) for part in TABLE_3.parts}
TINY = ("width=12", "head_size=3", "hidden=12", "epochs=1", "train_examples=48")


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    for number, folder in enumerate(SETS.values()):
        (tmp_path / "sets" / folder).mkdir(parents=True)
        write_sentences(tmp_path / "sets" / folder / "all.tsv", 120, seed=number)
    return tmp_path / "sets"


@pytest.fixture(autouse=True)
def parser(monkeypatch: pytest.MonkeyPatch) -> None:
    parse_without_spacy(monkeypatch)


def plans(reproduction, sets: Path, out: Path, sizes: tuple[str, ...] = TINY):
    options = ScaleOptions("demo", pipeline=sets, sizes=sizes)
    return run.make_plans(reproduction, "demo", seeds=1, data=sets, out=out, workers=1, options=options)


def test_the_papers_numbers_are_those_of_its_table():
    published = {(row.name, row.part): row.cells[0] for row in TABLE_3.published.rows}
    assert len(published) == 7 * 6
    assert published["Transformer", "MPQA"] == "88.6"
    assert published["Transformer-Guided-Attn", "SST"] == "84.2"
    assert published["PSAN* (quoted, not run)", "MR"] == "80.0"
    assert {row.name for row in TABLE_3.published.rows if not row.arm} == {
        "DiSAN* (quoted, not run)",
        "PSAN* (quoted, not run)",
        "Transformer-Complex-Order* (quoted, not run)",
    }


def test_the_translation_table_has_a_head_for_each_role_at_every_scale():
    assert TABLE_2.scales == ("demo", "cpu", "gpu", "paper")
    for scale in TABLE_2.scales:
        (part,) = TABLE_2.parts_at(scale)
        assert resize_scale(part.sizes[scale], TRANSLATION_SCALES).heads == 8
    published = {row.name: (row.arm, *row.cells) for row in TABLE_2.published.rows}
    assert published["Transformer-Guided-Attn"] == ("guided", "38.8")
    assert published["AED + BPE* (quoted, not run)"] == ("", "34.2")


def test_every_set_has_a_part_and_the_three_share_their_folders(sets, tmp_path):
    found = {one.id: plans(one, sets, tmp_path / "out") for one in (TABLE_3, FIGURE_2)}
    assert [plan.part.name for plan in found["guided/table-3"]] == list(SETS)
    assert [plan.comparison.data.name for plan in found["guided/table-3"]] == list(SETS.values())
    one, other = ([plan.comparison.out for plan in group] for group in found.values())
    assert one == other
    folds = plans(TABLE_3_FOLDS, sets, tmp_path / "out", ())
    assert [plan.comparison.scale.folds for plan in folds] == [10, 10]
    assert not {plan.comparison.out for plan in folds} & set(one)
    assert CLASSIFICATION_SCALES["demo"].folds is None


def test_parsed_texts_have_a_folder_of_their_own(sets, tmp_path):
    plain, parsed = (
        {
            plan.part.name: plan.comparison.out.name
            for plan in run.make_plans(TABLE_3, "demo", seeds=1, data=sets, out=tmp_path, workers=1, options=options)
        }
        for options in (ScaleOptions("demo"), ScaleOptions("demo", pipeline=sets))
    )
    assert plain["TREC"] == "classification-demo-trec"
    assert parsed["TREC"] == f"classification-demo-trec-{sets.name}"


def test_a_table_is_run_judged_and_shown_with_its_quoted_rows(inline, sets, tmp_path):
    console = Console(record=True, width=240)
    made = plans(TABLE_3, sets, tmp_path / "out")[:2]
    assert run.do_plans(TABLE_3, made, console) == []
    assert any(name.startswith("CR: guided seed 0") for name in inline)
    command = "headwise reproduce guided/table-3"
    run.report(TABLE_3, "demo", made, tmp_path / "out", tmp_path / "paper", console, command)
    said = console.export_text()
    assert "DiSAN* (quoted, not run)" in said
    assert "84.1" in said
    record = json.loads((tmp_path / "paper" / "results" / "table-3-demo.json").read_text())
    (rows,) = [record["published"]["rows"]]
    quoted = next(row for row in rows if row[0].startswith("PSAN") and row[1] == "CR")
    assert (quoted[2], quoted[3], quoted[4]) == (NONE, {"value": 84.2, "digits": 1}, NONE)
    verdicts = {claim["verdict"] for claim in record["claims"] if claim["contrasts"]}
    assert all("no verdict" in verdict or verdict == "measured, not tested" for verdict in verdicts)
