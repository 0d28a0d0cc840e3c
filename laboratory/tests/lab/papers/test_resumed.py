"""A reproduction goes on from its record: the runs kept there are taken over, and only the others are done."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from headwise.errors import DataError, SettingError
from headwise_lab.experiment.scale import ScaleOptions
from headwise_lab.papers.data import find_archive
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.recomputed import extend_seeds, find_record, list_runs, restore_runs
from headwise_lab.papers.run import Plan, do_plans, make_plans, report, show_plans, write_commands
from headwise_lab.results.runs import pair_with_controls
from headwise_lab.tune import BestDraw
from lab.command import call, refused
from lab.inline import do_inline

SIZES = ("width=16", "heads=4", "classifier_width=16", "warmup_steps=3", "generated_draws=1500", "train_examples=64")
SMALL = (*SIZES, "layers=1", "epochs=1", "dev_examples=24")
WHOLE = REPRODUCTIONS["diversity/dose-logic"]
STUDY = dataclasses.replace(
    WHOLE,
    parts=tuple(dataclasses.replace(part, arms=("plain", "cka:ratio=0.17")) for part in WHOLE.parts),
    claims=(),
)
FIRST = STUDY.only(["1x"], "demo")


def plan(out: Path, study=STUDY, seeds: int = 1, *more: str) -> tuple[Plan, ...]:
    options = ScaleOptions("demo", sizes=(*SMALL, *more))
    return make_plans(study, "demo", seeds=seeds, data=None, out=out, workers=1, options=options)


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notes of a paper with the record of one part and one seed, whose runs are gone."""
    place = tmp_path_factory.mktemp("paper")
    with pytest.MonkeyPatch.context() as patch:
        do_inline(patch)
        plans, console = plan(place / "runs", FIRST), Console(quiet=True)
        assert do_plans(FIRST, plans, console) == []
        report(FIRST, "demo", plans, place / "runs", place / "paper", console, "command")
    (place / "runs").rename(place / "gone")
    return place / "paper"


@pytest.fixture(scope="module")
def record(paper: Path) -> Path:
    return find_record(paper, STUDY.id, "demo")


@pytest.mark.full
def test_it_goes_on_and_parts_that_are_not_asked_for_stay_in_the_record(
    paper: Path, tmp_path: Path, monkeypatch, inline: list[str]
):
    shutil.copytree(paper, tmp_path / "paper")
    monkeypatch.setitem(REPRODUCTIONS, STUDY.id, STUDY)
    sizes = [word for size in SMALL for word in ("--set", size)]
    words = ["--scale", "demo", *sizes, "--part", "3x", "--seeds", "2", "--out", str(tmp_path / "runs")]
    assert call("reproduce", STUDY.id, *words, "--resume", "--record", str(tmp_path / "paper"), "--quiet") == 0
    assert not [name for name in inline if name.startswith("1x: ") and " of " not in name]
    assert len([name for name in inline if name.startswith("3x: ") and " of " not in name]) == 2 + 4
    found = find_record(tmp_path / "paper", STUDY.id, "demo")
    written = json.loads(found.read_text())
    assert {part: table["seeds"] for part, table in written["tables"].items()} == {"1x": [0], "3x": [0, 1]}
    assert list(written["parts"]) == ["1x", "3x"]
    assert not written["missing"]
    first, second = written["command"].splitlines()
    assert first.endswith("--seeds 1 --part 1x")
    assert second.endswith("--seeds 2 --part 3x")
    assert f"```console\n$ {first}\n$ {second}\n```" in found.with_suffix(".md").read_text()
    # the runs taken over are those of the record, and there is nothing to take over any more
    kept, again = (
        json.loads(path.read_text())["tables"]["1x"] for path in (find_record(paper, STUDY.id, "demo"), found)
    )
    assert [row["runs"] for row in again["rows"]] == [row["runs"] for row in kept["rows"]]
    assert restore_runs(found, plan(tmp_path / "runs", STUDY)) == 0


def test_what_a_record_has_is_not_asked_for_again(record: Path, tmp_path: Path):
    for asked, seeds, expected in (((), 2, (3, 2)), (("3x",), 2, (3, 2)), (("1x",), 5, (5, 0))):
        kept = {"1x": [("plain", 2), ("cka", 0)]}
        assert tuple(extend_seeds(STUDY, "demo", asked, seeds, kept).values()) == expected
    with pytest.raises(SettingError, match="the record has 3x, for which --data holds nothing"):
        extend_seeds(FIRST, "demo", ("1x",), 2, {"1x": [("plain", 0)], "3x": [("plain", 0)]})
    recorded = list_runs(record)
    assert recorded["1x"] >= {("plain", 0), ("cka:ratio=0.17", 0)}
    screen, plans = Console(record=True, width=200), plan(tmp_path / "runs", STUDY, 2)
    show_plans(STUDY, plans, screen, recorded)
    # two arms, two parts, two seeds; one seed of one part is there
    assert "6 runs to do" in screen.export_text()
    # a command of every part names none
    assert write_commands(STUDY, "demo", plans, "--scale demo", " --data FOLDER") == (
        f"headwise reproduce {STUDY.id} --scale demo --seeds 2 --data FOLDER"
    )
    assert write_commands(STUDY, "demo", plans[1:], "--scale demo", "").endswith("--seeds 2 --part 3x")


def test_runs_of_an_arm_that_has_other_settings_now_are_refused(record: Path, tmp_path: Path):
    plans = plan(tmp_path / "runs", FIRST)
    # two arms and two baselines
    assert restore_runs(record, plans) == 4
    assert [len(one.finished) for one in plans] == [2]
    path = next((tmp_path / "runs").glob("*/cka*17/seed-0/settings.json"))
    # as of an arm whose defaults were others when the record was made
    kept = path.read_text()
    path.write_text(kept.replace("0.17", "0.18"))
    assert path.read_text() != kept
    with pytest.raises(SettingError, match=r"settings\.json has .*0\.18"):
        do_plans(STUDY, plans, Console(quiet=True))


def test_a_record_of_another_comparison_is_refused_before_anything_is_copied(record: Path, tmp_path: Path):
    with pytest.raises(SettingError, match=r"have scale '.*dev_examples=24', and '.*dropout=0.3' is asked for"):
        restore_runs(record, plan(tmp_path / "runs", STUDY, 1, "dropout=0.3"))
    drawn = [
        dataclasses.replace(one, tuned={"plain": BestDraw("plain:dropout=0.3")}) for one in plan(tmp_path / "runs")
    ]
    with pytest.raises(SettingError, match=r"have tuned\.plain None, and 'plain:dropout=0.3' is asked for"):
        restore_runs(record, drawn)
    # the data is prepared, for its digest
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["data"]
    (one,) = plans = plan(tmp_path / "runs", FIRST)
    one.comparison.out.mkdir(parents=True)
    (one.comparison.out / "comparison.json").write_text(json.dumps({"task": "logic", "scale": "another"}))
    there = r"comparison\.json has scale 'another' but '.*dev_examples=24' is requested"
    with pytest.raises(SettingError, match=there):
        restore_runs(record, plans)
    assert [path.name for path in one.comparison.out.iterdir()] == ["comparison.json"]


def test_a_damaged_record_is_named(record: Path, tmp_path: Path):
    path, whole = tmp_path / "results" / record.name, json.loads(record.read_text())
    path.parent.mkdir()
    for damaged in ({}, whole | {"tables": {"1x": {}}}, whole | {"parts": ["1x"]}, whole | {"tuned": {"plain": {}}}):
        path.write_text(json.dumps(damaged))
        for read in (list_runs, lambda place: restore_runs(place, ())):
            with pytest.raises(DataError, match=r"is not the record of a reproduction \(.*; make it again"):
                read(path)
    path.write_text(json.dumps(whole))
    find_archive(path).parent.mkdir()
    find_archive(path).write_text("nothing")
    with pytest.raises(DataError, match="cannot be read as an archive of runs"):
        restore_runs(path, ())


def test_the_command_wants_the_folder_of_the_record(tmp_path: Path, capsys):
    words = ("reproduce", WHOLE.id, "--scale", "demo", "--resume", "--out", str(tmp_path))
    assert "name its folder with --record" in refused(capsys, *words)
    said = refused(capsys, *words, "--record", str(tmp_path))
    assert "results holds no record; `headwise reproduce` writes them" in said


def test_runs_without_texts_are_in_no_paired_test(tmp_path: Path):
    runs: list[Any] = []
    for arm, control in (("cka", "plain"), ("plain", None)):
        for seed in (0, 1):
            folder = tmp_path / f"{arm}-{seed}"
            folder.mkdir()
            runs.append(SimpleNamespace(arm=arm, control=control, seed=seed, folder=folder))
            if seed == 1:
                (folder / "predictions.txt").write_text("ein Hund\n")
    assert [pair.seed for pair in pair_with_controls(runs)] == [1]
