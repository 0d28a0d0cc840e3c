"""A reproduction goes on from its record: the runs kept there are taken over, and only the others are done."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from headwise.errors import DataError, SettingError
from headwise_lab.experiment.scale import ScaleOptions
from headwise_lab.papers.data import ARCHIVE
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.papers.recomputed import extend_seeds, find_record, list_runs, restore_runs
from headwise_lab.papers.reproduction import Reproduction
from headwise_lab.papers.run import Plan, do_plans, make_plans, report, show_plans, write_commands
from headwise_lab.results.runs import pair_with_controls
from headwise_lab.tune import BestDraw
from lab.command import call
from lab.inline import do_inline

SMALL = ("width=16", "heads=4", "classifier_width=16", "warmup_steps=3", "generated_draws=1500", "train_examples=96")
WHOLE = REPRODUCTIONS["diversity/dose-logic"]
STUDY: Reproduction = dataclasses.replace(
    WHOLE,
    parts=tuple(dataclasses.replace(part, arms=("plain", "cka:ratio=0.17", "cka:ratio=3.0")) for part in WHOLE.parts),
    claims=(),
)


def plan(out: Path, study: Reproduction, seeds: int, *more: str) -> tuple[Plan, ...]:
    options = ScaleOptions("demo", sizes=(*SMALL, "dev_examples=24", *more))
    return make_plans(study, "demo", seeds=seeds, data=None, out=out, workers=1, options=options)


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notes of a paper with the record of one part and one seed, whose runs are gone."""
    place = tmp_path_factory.mktemp("paper")
    with pytest.MonkeyPatch.context() as patch:
        do_inline(patch)
        record_one_part(place)
    return place / "paper"


def record_one_part(place: Path) -> None:
    study = STUDY.only(["1x"], "demo")
    plans = plan(place / "runs", study, 1)
    console = Console(quiet=True)
    assert do_plans(study, plans, console) == []
    report(study, "demo", plans, place / "runs", place / "paper", console, "command")
    (place / "runs").rename(place / "gone")


def test_it_goes_on_with_other_parts_and_seeds(paper: Path, tmp_path: Path, inline: list[str]):
    plans = plan(tmp_path / "runs", STUDY, 2)
    record = find_record(paper, STUDY.id, "demo")
    # three arms and two baselines
    assert restore_runs(record, plans) == 5
    assert [len(one.finished) for one in plans] == [3, 0]
    kept = {path: path.read_bytes() for path in (tmp_path / "runs").glob("*/*/seed-0/result.json")}
    assert do_plans(STUDY, plans, Console(quiet=True)) == []
    assert not [name for name in inline if name.startswith("1x: ") and "seed 0" in name]
    assert all(path.read_bytes() == content for path, content in kept.items())
    found = report(STUDY, "demo", plans, tmp_path / "runs", tmp_path / "paper", Console(quiet=True), "command")
    assert [[len(row.score.by_seed) for row in table.arms] for table in found.tables.values()] == [[2] * 3] * 2
    written = json.loads((tmp_path / "paper" / "results" / record.name).read_text())
    assert list(written["parts"]) == ["1x", "3x"]
    assert not written["missing"]
    # a second time there is nothing to take over
    assert restore_runs(record, plans) == 0


@pytest.mark.usefixtures("inline")
def test_parts_that_are_not_asked_for_stay_in_the_record(paper: Path, tmp_path: Path, monkeypatch):
    shutil.copytree(paper, tmp_path / "paper")
    monkeypatch.setitem(REPRODUCTIONS, STUDY.id, STUDY)
    sizes = [word for size in (*SMALL, "dev_examples=24") for word in ("--set", size)]
    words = ["--scale", "demo", *sizes, "--part", "3x", "--seeds", "2", "--out", str(tmp_path / "runs")]
    assert call("reproduce", STUDY.id, *words, "--resume", "--record", str(tmp_path / "paper"), "--quiet") == 0
    record = json.loads(find_record(tmp_path / "paper", STUDY.id, "demo").read_text())
    assert {part: table["seeds"] for part, table in record["tables"].items()} == {"1x": [0], "3x": [0, 1]}
    first, second = record["command"].splitlines()
    assert first.endswith("--seeds 1 --part 1x")
    assert second.endswith("--seeds 2 --part 3x")
    page = find_record(tmp_path / "paper", STUDY.id, "demo").with_suffix(".md").read_text()
    assert f"```console\n$ {first}\n$ {second}\n```" in page


@pytest.mark.parametrize(
    ("asked", "seeds", "expected"),
    [((), 2, {"1x": 3, "3x": 2}), (("3x",), 2, {"1x": 3, "3x": 2}), (("1x",), 5, {"1x": 5, "3x": 0})],
)
def test_a_record_loses_no_seed(asked: tuple[str, ...], seeds: int, expected: dict[str, int]):
    assert extend_seeds(STUDY, "demo", asked, seeds, {"1x": [("plain", 2), ("cka", 0)]}) == expected


def test_a_part_of_the_record_without_data_is_refused():
    with pytest.raises(SettingError, match="the record has 3x, for which --data holds nothing"):
        extend_seeds(STUDY.only(["1x"], "demo"), "demo", ("1x",), 2, {"1x": [("plain", 0)], "3x": [("plain", 0)]})


def test_runs_without_texts_are_in_no_paired_test(tmp_path: Path):
    runs = [SimpleNamespace(arm="cka", control="plain", seed=seed, folder=tmp_path / f"cka-{seed}") for seed in (0, 1)]
    runs += [
        SimpleNamespace(arm="plain", control=None, seed=seed, folder=tmp_path / f"plain-{seed}") for seed in (0, 1)
    ]
    for run in runs:
        run.folder.mkdir()
        if run.seed == 1:
            (run.folder / "predictions.txt").write_text("ein Hund\n")
    assert [pair.seed for pair in pair_with_controls(runs)] == [1]  # type: ignore[arg-type]


def test_commands_of_every_part_name_none(tmp_path: Path):
    plans = plan(tmp_path, STUDY, 2)
    assert write_commands(STUDY, "demo", plans, "--scale demo", " --data FOLDER") == (
        f"headwise reproduce {STUDY.id} --scale demo --seeds 2 --data FOLDER"
    )
    assert write_commands(STUDY, "demo", plans[1:], "--scale demo", "").endswith("--seeds 2 --part 3x")


def test_runs_of_an_arm_that_has_other_settings_now_are_refused(paper: Path, tmp_path: Path):
    plans = plan(tmp_path / "runs", STUDY, 1)
    restore_runs(find_record(paper, STUDY.id, "demo"), plans)
    result = next((tmp_path / "runs").glob("*/cka*17/seed-0/settings.json"))
    kept = json.loads(result.read_text())
    assert kept["seed"] == 0
    # as of an arm whose defaults were others when the record was made
    record = json.dumps(kept).replace("0.17", "0.18")
    assert record != json.dumps(kept)
    result.write_text(record)
    with pytest.raises(SettingError, match=r"settings\.json has .*0\.18"):
        do_plans(STUDY, plans, Console(quiet=True))


def test_a_record_of_other_sizes_or_draws_is_refused_before_anything_is_copied(paper: Path, tmp_path: Path):
    record = find_record(paper, STUDY.id, "demo")
    with pytest.raises(SettingError, match=r"have scale '.*dev_examples=24', and '.*dropout=0.3' is asked for"):
        restore_runs(record, plan(tmp_path / "runs", STUDY, 1, "dropout=0.3"))
    drawn = [
        dataclasses.replace(one, tuned={"plain": BestDraw("plain:dropout=0.3")}) for one in plan(tmp_path, STUDY, 1)
    ]
    with pytest.raises(SettingError, match=r"have tuned\.plain None, and 'plain:dropout=0.3' is asked for"):
        restore_runs(record, drawn)
    # the data is prepared, for its digest
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["data"]


@pytest.mark.usefixtures("inline")
def test_runs_are_not_put_beside_those_of_another_comparison(paper: Path, tmp_path: Path):
    plans = plan(tmp_path / "runs", STUDY.only(["1x"], "demo"), 1)
    (place,) = {one.comparison.out for one in plans}
    place.mkdir(parents=True)
    (place / "comparison.json").write_text(json.dumps({"task": "logic", "scale": "another"}))
    with pytest.raises(
        SettingError, match=r"comparison\.json has scale 'another' but '.*dev_examples=24' is requested"
    ):
        restore_runs(find_record(paper, STUDY.id, "demo"), plans)
    assert [path.name for path in place.iterdir()] == ["comparison.json"]


def test_a_dry_run_counts_the_runs_of_the_record(paper: Path, tmp_path: Path):
    recorded = list_runs(find_record(paper, STUDY.id, "demo"))
    assert recorded["1x"] >= {("plain", 0), ("cka:ratio=3.0", 0)}
    screen = Console(record=True, width=200, quiet=False, file=io.StringIO())
    show_plans(STUDY, plan(tmp_path / "runs", STUDY, 2), screen, recorded)
    # three arms, two parts, two seeds; one seed of one part is there
    assert "9 runs to do" in screen.export_text()


def test_a_damaged_record_is_named(tmp_path: Path):
    record = tmp_path / "dose-logic-demo.json"
    record.write_text("{}")
    for read in (list_runs, lambda path: restore_runs(path, ())):
        with pytest.raises(DataError, match="is not the record of a reproduction"):
            read(record)
    record.write_text('{"parts": {"1x": ""}}')
    record.with_suffix(ARCHIVE).write_text("nothing")
    with pytest.raises(DataError, match="cannot be read as an archive of runs"):
        restore_runs(record, ())


def test_the_command_wants_the_folder_of_the_record(tmp_path: Path, capsys):
    assert call("reproduce", WHOLE.id, "--scale", "demo", "--resume", "--out", str(tmp_path)) == 2
    assert "name its folder with --record" in " ".join(capsys.readouterr().err.split())
    words = ["--resume", "--record", str(tmp_path), "--out", str(tmp_path)]
    assert call("reproduce", WHOLE.id, "--scale", "demo", *words) == 2
    assert "results holds no record; `headwise reproduce` writes them" in " ".join(capsys.readouterr().err.split())
