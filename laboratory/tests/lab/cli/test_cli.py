"""The `headwise` command: its commands, what they print, how they end, and the settings that options become."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

import headwise
from headwise.cli import main
from headwise.cli.options import UNWRITTEN, Without, command, list_options
from headwise.cli.output import asked_output, with_output_options
from headwise_lab.experiment.arm import named_arms
from headwise_lab.experiment.run_folder import Failure
from headwise_lab.jobs import pool
from headwise_lab.papers.declarations import REPRODUCTIONS
from headwise_lab.tasks.logic import task
from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES
from headwise_lab.tasks.translation.task import TranslationTask
from lab.command import call, refused
from lab.sentences import write_sentences
from lab.tasks.logic.logic_toy import TOY
from lab.tasks.translation.translation_toy import SMALLEST, write_toy_corpus

PLAIN = ("compare", "logic", "--arms", "plain", "--seeds", "1", "--workers", "1")


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inline: list[str]) -> None:  # noqa: ARG001  jobs run here
    """Make the demo a toy, do jobs in this process, and work in an empty folder."""
    small = dataclasses.replace(TOY, name="demo", train_examples=96)
    monkeypatch.setattr(task, "LOGIC_SCALES", {**task.LOGIC_SCALES, "demo": small})
    monkeypatch.setattr(task.LogicTask, "scales", {**task.LOGIC_SCALES, "demo": small})
    monkeypatch.chdir(tmp_path)


def test_a_comparison_prints_json_alone_a_table_or_nothing_into_a_folder_of_task_and_scale(capsys):
    asked = ("compare", "logic", "--arms", "scaled,smooth", "--seeds", "1", "--workers", "1")
    assert call(*asked, "--json") == 0
    found = capsys.readouterr()
    assert {row["arm"] for row in json.loads(found.out)["rows"]} == {"majority", "counts", "scaled", "smooth"}
    assert "smooth seed 0 is done" in found.err
    assert Path("runs/logic-demo/smooth/seed-0/result.json").exists()
    assert call(*asked) == 0
    assert "no verdict (1 seed)" in " ".join(capsys.readouterr().out.split())
    assert call(*asked, "--quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_every_named_arm_is_listed_with_what_it_does_and_its_control(capsys):
    assert call("arms", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == list(named_arms())
    assert listed["em"] == {"about": "EM routing instead of W_O", "control": "trunk"}
    assert call("arms") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines if line[:1].isalpha()} >= named_arms().keys()


def test_every_command_explains_itself_and_all_of_its_options(capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out == f"headwise {headwise.__version__}\n"
    commands: Any = typer.main.get_command(main.app)
    for asked in ((), ("-h",), ("--help",)):
        assert call(*asked) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in ("--show-completion", *commands.commands))
    texts: dict[str, set[str]] = {}
    for name, one in commands.commands.items():
        assert call(name, "-h") == 0
        shown = capsys.readouterr().out
        for given in one.params:
            assert given.help, (name, given.name)
            assert all(flag in shown for flag in given.opts if flag.startswith("-")), (name, given.opts)
            texts.setdefault(given.opts[0], set()).add(given.help)
    assert all(len(texts[flag]) == 1 for flag in ("--set", "--tuned", "--workers", "--trust-remote-code", "--json"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    """Settings in settings."""

    rate: Annotated[float, typer.Option(help="A rate.")] = 0.5
    left: Annotated[int, typer.Option(help="Left out.")] = 7
    cache: Annotated[str, typer.Option(help="Where things are kept."), UNWRITTEN] = "there"
    many: Annotated[tuple[str, ...], typer.Option("--each", help="Several.")] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    """Settings of a command."""

    place: Annotated[Path, typer.Argument(help="A place.")]
    inner: Annotated[Inner, Without("left")]
    loud: Annotated[bool, typer.Option("--loud", help="Loud.")] = False


def test_a_command_builds_its_settings_from_what_is_typed_and_they_give_their_options_back():
    built: list[Any] = []

    def keep(given: Outer) -> None:
        built.append((given, asked_output().command))

    app = typer.Typer()
    app.command()(with_output_options(command(keep)))
    runner = CliRunner()
    for words in (["a"], ["a", "--rate", "2", "--each", "x y", "--each", "z", "--loud"]):
        assert runner.invoke(app, words).exit_code == 0
    assert runner.invoke(app, ["a", "--left", "3"]).exit_code == 2
    usual, changed = (given for given, _ in built)
    assert usual == Outer(place=Path("a"), inner=Inner())
    assert changed == Outer(place=Path("a"), inner=Inner(rate=2.0, many=("x y", "z")), loud=True)
    assert list_options(changed) == {
        "place": Path("a"),
        "rate": 2.0,
        "cache": "there",
        "each": ("x y", "z"),
        "loud": True,
    }
    assert [words for _, words in built] == [
        "headwise keep a --rate 0.5",
        "headwise keep a --rate 2 --each 'x y' --each z --loud",
    ]


def test_help_imports_neither_torch_nor_transformers():
    slow = {"torch", "transformers", "numpy", "sklearn", "scipy", "matplotlib"}
    for asked in (["--version"], ["compare", "--help"]):
        command = [sys.executable, "-X", "importtime", "-m", "headwise", *asked]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "headwise.cli.main" in imported
        assert not imported & slow


def test_reproduce_lists_what_can_be_reproduced(capsys):
    assert call("reproduce") == 0
    listed = capsys.readouterr().out
    assert "diversify/figure-4" in listed
    assert "repulsive/table-2" in listed
    assert "hours" not in listed
    lines = listed.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines if "/" in line.split()[0]} == set(REPRODUCTIONS)


@pytest.mark.full
def test_reproduce_shows_the_runs_of_one_and_does_them(capsys):
    assert call("reproduce", "--list", "--scale", "demo") == 0
    assert "8 x 2" in capsys.readouterr().out
    asked = ("reproduce", "diversify/figure-4", "--scale", "demo", "--seeds", "1", "--workers", "1")
    assert call(*asked, "--dry-run") == 0
    assert "8 runs to do" in capsys.readouterr().out
    assert not Path("runs").exists()
    assert call(*asked, "--record", "paper") == 0
    assert "no verdict (1 seed)" in capsys.readouterr().out
    assert Path("runs/reproductions/logic-demo/em/seed-0/result.json").exists()
    assert Path("runs/reproductions/diversify-figure-4-demo/report.html").exists()
    command = "headwise reproduce diversify/figure-4 --scale demo --seeds 1"
    assert f"$ {command}\n" in "".join(path.read_text() for path in Path("paper").rglob("*.md"))
    assert call(*asked, "--dry-run") == 0
    assert "0 runs to do" in capsys.readouterr().out


def test_a_table_of_the_users_own_is_listed_and_planned_by_its_file_alone(capsys, monkeypatch):
    # what the command adds is in a copy
    monkeypatch.setattr("headwise_lab.papers.declarations.REPRODUCTIONS", dict(REPRODUCTIONS))
    monkeypatch.setattr(TranslationTask, "scales", {**TRANSLATION_SCALES, "demo": SMALLEST})
    write_toy_corpus(Path("pairs"))
    page = (Path(__file__).parents[4] / "docs" / "reproducing.md").read_text(encoding="utf-8")
    Path("mine.toml").write_text(page.partition("```toml\n")[2].partition("```")[0], encoding="utf-8")
    asked = ("reproduce", "mine/table-1", "--tables", "mine.toml", "--scale", "demo", "--data", "pairs", "--dry-run")
    assert call(*asked) == 0
    assert "svgd:layers=1" in capsys.readouterr().out
    assert "mine/table-1" not in REPRODUCTIONS
    Path("mine.toml").write_text("x = [", encoding="utf-8")
    assert call(*asked) != 0
    assert "mine.toml is not TOML" in capsys.readouterr().err


@pytest.mark.full
def test_the_record_of_a_part_names_the_part(capsys, monkeypatch):
    monkeypatch.setattr(TranslationTask, "scales", {**TRANSLATION_SCALES, "demo": SMALLEST})
    write_toy_corpus(Path("pairs"))
    asked = ("reproduce", "repulsive/figure-3b", "--scale", "demo", "--seeds", "1", "--workers", "1", "--data", "pairs")
    assert call(*asked, "--dry-run", "--part", "1 head", "--part", "2 heads") == 0
    assert "4 runs to do" in capsys.readouterr().out
    assert call(*asked, "--part", "1 head", "--record", "paper") == 0
    command = "headwise reproduce repulsive/figure-3b --scale demo --seeds 1 --part '1 head' --data FOLDER"
    assert f"$ {command}\n" in "".join(path.read_text() for path in Path("paper").rglob("*.md"))
    assert "2 heads" not in str([*Path("runs/reproductions").iterdir()])
    assert "part is '3 heads'; expected" in refused(capsys, *asked, "--part", "3 heads")


def test_the_statistics_of_data_are_shown_and_nothing_is_written(capsys, tmp_path):
    write_sentences(tmp_path / "my.tsv", 60)
    assert call("data", "classification", "--data", "my.tsv", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert re.fullmatch(r"texts: \d+ train, \d+ dev, \d+ test; labels .*; \d+ token ids", found["summary"])
    assert call("data", "logic") == 0
    assert capsys.readouterr().out.startswith("pairs: 96 train, ")
    assert [path.name for path in tmp_path.iterdir()] == ["my.tsv"]


@pytest.mark.full
def test_a_tuned_arm_is_printed_as_the_compare_command_takes_it(capsys):
    asked = ("tune", "logic", "output", "--draws", "2", "--seed", "5", "--workers", "1")
    assert call(*asked) == 0
    arm = capsys.readouterr().out.splitlines()[-2]
    assert call(*asked, "--json") == 0
    assert json.loads(capsys.readouterr().out)["arm"] == arm
    assert re.fullmatch(r"output(:weight=[\d.]+,learning_rate=[\d.e-]+,dropout=[\d.]+)?", arm)
    assert call("compare", "logic", "--arms", f"plain,{arm}", "--seeds", "1", "--workers", "1") == 0


def test_a_failed_run_is_named_with_its_log_and_the_code_says_whose_fault_it_is(capsys, monkeypatch):
    def fail(refused):
        return lambda _target, jobs, _workers, _watch: [Failure(jobs[0], "because.", refused=refused)]

    arguments = ("compare", "logic", "--arms", "plain", "--seeds", "1", "--out", "o")
    monkeypatch.setattr(pool, "run_jobs", fail(True))
    assert "majority failed: because. (log: o/majority/seed-0/log.txt)" in refused(capsys, *arguments)
    monkeypatch.setattr(pool, "run_jobs", fail(False))
    assert call(*arguments) == 1


def test_a_corrupt_checkpoint_is_refused(capsys, monkeypatch):
    arguments = ("compare", "logic", "--arms", "plain", "--seeds", "1", "--out", "out")

    def interrupted(target, jobs, _workers, _watch):
        beats = iter(range(1))
        target(jobs[-1].settings, jobs[-1].folder, lambda: next(beats, None) is None)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool, "run_jobs", interrupted)
        assert call(*arguments) == 130
    (checkpoint,) = Path("out/plain/seed-0").glob("checkpoint-*")
    (checkpoint / "optimizer.pt").write_bytes(b"not what was written")
    capsys.readouterr()
    assert f"{checkpoint}/optimizer.pt was changed since it was written" in refused(capsys, *arguments)


def test_ctrl_c_says_how_to_go_on(capsys, monkeypatch):
    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "run_jobs", interrupted)
    assert call(*PLAIN) == 130
    error = capsys.readouterr().err.strip()
    assert error == "headwise: stopped; give the same command again to resume."


def test_a_defect_is_not_dressed_up_as_bad_input(monkeypatch):
    def broken(*_arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(pool, "run_jobs", broken)
    with pytest.raises(ZeroDivisionError):
        main.main([*PLAIN])


@pytest.mark.slow
def test_the_installed_command_stopped_by_ctrl_c_goes_on_to_the_same_bits():
    def start(out: str) -> subprocess.Popen[str]:
        arguments = ["compare", "logic", "--arms", "plain,spos", "--seeds", "1", "--set", "train_examples=4000"]
        return subprocess.Popen(
            [sys.executable, "-m", "headwise", *arguments, "--out", out],
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(out: str) -> int:
        process = start(out)
        process.communicate(timeout=300)
        return process.returncode

    assert finish("whole") == 0
    process = start("parts")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = Path("parts/spos/seed-0/progress.json")
        if found.exists() and '"step": 0' not in found.read_text():
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.strip().endswith("give the same command again to resume.")
    assert "Traceback" not in error
    assert not Path("parts/spos/seed-0/result.json").exists()
    assert list(Path("parts/spos/seed-0").glob("checkpoint-*"))
    assert finish("parts") == 0
    for arm in ("plain", "spos"):
        name = f"{arm}/seed-0/model.safetensors"
        assert Path("whole", name).read_bytes() == Path("parts", name).read_bytes()


@pytest.mark.full
def test_a_file_of_ones_own_is_compared_with_sizes_of_ones_own(capsys):
    write_sentences(Path("mine.tsv"), 80)
    small = ("width=12", "head_size=3", "hidden=12", "epochs=1", "train_examples=40")
    sizes = [word for size in small for word in ("--set", size)]
    arms = ("--arms", "plain,guided:roles=rare/window", "--seeds", "1", "--workers", "1")
    assert call("compare", "classification", "--data", "mine.tsv", *arms, *sizes) == 0
    (out,) = Path("runs").glob("classification-demo-width=12-*")
    page = (out / "report.html").read_text()
    assert "--data mine.tsv" in page
    assert "--set width=12" in page
    assert "guided:roles=rare/window seed 0 is done" in capsys.readouterr().out


def test_the_runs_of_a_reproduction_with_several_sets_are_listed(capsys):
    for folder in ("cr", "trec", "subj", "mpqa", "mr", "sst2"):
        (Path("sets") / folder).mkdir(parents=True)
        for split in ("train", "test"):
            (Path("sets") / folder / f"{split}.tsv").touch()
    assert call("reproduce", "guided/table-3", "--data", "sets", "--dry-run") == 0
    assert "180 runs to do" in capsys.readouterr().out


def test_a_verbose_command_shows_where_a_refusal_came_from(capsys):
    assert call(*PLAIN, "--data", "missing", "-v") == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.splitlines()[-1].startswith("headwise: missing does not exist")


@pytest.mark.full
def test_arms_without_their_controls_are_named_before_training_or_run_too(capsys, inline):
    few = ("--seeds", "1", "--workers", "1")
    assert call("compare", "logic", "--arms", "plain,svgd,em", *few) == 0
    said = capsys.readouterr().out
    assert said.startswith("no verdict without its control: svgd (needs smooth), em (needs trunk). --controls adds ")
    assert "--controls adds smooth, trunk: 2 more runs to these 3." in said.partition("\n")[0]
    assert call("compare", "logic", "--arms", "plain,svgd,em", *few, "--controls") == 0
    said = capsys.readouterr().out
    assert "without its control" not in said
    assert inline[-2:] == ["smooth seed 0", "trunk seed 0"]
    # at the pace of finished runs, the time can be told
    assert call("compare", "logic", "--arms", "simple:iterations=2", *few) == 0
    assert re.search(r"1 more run to these 1 or about \d+ min", capsys.readouterr().out)
