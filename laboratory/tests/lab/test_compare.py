from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from headwise.atomic import seal
from headwise.errors import DataError, SettingError
from headwise_lab import compare as compare_module
from headwise_lab.compare import Comparison, compare
from headwise_lab.experiment.arm_text import parse_arms
from headwise_lab.experiment.run_folder import Watch, first_difference, read_progress
from headwise_lab.jobs.pool import count_workers
from headwise_lab.jobs.workers import do_job, run_jobs
from headwise_lab.results.runs import read_results
from headwise_lab.tasks.logic.data import load_logic
from headwise_lab.tasks.logic.task import LogicTask
from lab.inline import do_inline
from lab.jobs.pool_target import jobs, work
from lab.tasks.logic.logic_toy import TOY


class Recorded(Watch):
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def started(self, job):
        self.events.append(("started", job.name))

    def ended(self, job, failure):
        self.events.append(("failed" if failure else "done", job.name))


def test_a_run_that_fails_or_dies_does_not_stop_the_others(tmp_path):
    watch = Recorded()
    failures = run_jobs(work, jobs(tmp_path, "fail", "die", "refuse", "fine", "fine"), 2, watch)
    assert sorted((f.job.name, f.refused) for f in failures) == [
        ("die 1", False),
        ("fail 0", False),
        ("refuse 2", True),
    ]
    assert [name for event, name in watch.events if event == "started"] == [
        *("fail 0", "die 1", "refuse 2", "fine 3", "fine 4")
    ]
    by_name = {failure.job.name: str(failure) for failure in failures}
    assert by_name["fail 0"] == f"fail 0 failed: ValueError: the first line (log: {tmp_path}/0/log.txt)"
    assert "ended by signal 9" in by_name["die 1"]
    assert by_name["refuse 2"].startswith("refuse 2 failed: this file is missing; make it. (log:")
    assert {("done", "fine 3"), ("done", "fine 4")} <= set(watch.events)
    log = (tmp_path / "0" / "log.txt").read_text()
    assert "to the log" in log
    assert "Traceback" in log
    assert (tmp_path / "3" / "threads").read_text() == "1"


SCRIPT = """
import signal
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from headwise_lab.experiment.run_folder import Watch
from headwise_lab.jobs.workers import run_jobs
from lab.jobs.pool_target import jobs, work

class Told(Watch):
    def started(self, job):
        job.folder.mkdir()
        (job.folder / "started").touch()

if __name__ == "__main__":
    # what starts the tests in the background may have Ctrl-C ignored, and children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_jobs(work, jobs(Path({folder!r}), "fine"), 1, Told())
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.full
def test_ctrl_c_while_a_worker_starts_shows_no_traceback(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path)))
    source = str(Path(__file__).parents[3] / "src")
    process = subprocess.Popen(
        [sys.executable, str(script)],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "0" / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
    assert time.monotonic() - began < 10


@pytest.mark.full
def test_a_comparison_without_repulsion_starts_without_torchs_compiler():
    code = """
import sys
from headwise_lab.compare import require_fits
from headwise_lab.experiment.arm import named_arms
from headwise_lab.tasks.logic.task import LogicTask
from lab.tasks.logic.logic_toy import TOY
task = LogicTask()
data = task.load(None, TOY, None)
require_fits(named_arms()["plain"], task, data, TOY)
print("torch._dynamo" in sys.modules)
require_fits(named_arms()["svgd"], task, data, TOY)
"""
    places = [str(Path(__file__).parents[3] / "src"), str(Path(__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["False"], "it takes a second to import, before the first run begins"


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_a_progress_file_that_cannot_be_read_is_no_progress(tmp_path):
    assert read_progress(tmp_path) is None
    (tmp_path / "progress.json").write_text('{"step": 1')
    assert read_progress(tmp_path) is None


def test_the_first_setting_that_differs_is_named():
    assert first_difference({"a": 1, "b": {"c": [1]}}, {"a": 1, "b": {"c": [2]}}) == ("b.c", [1], [2])
    assert first_difference({"a": 1}, {"a": 1, "new": 2}) == ("new", None, 2)
    assert first_difference({"a": 1}, {"a": 1}) is None


def toy(out: Path, arms: str = "plain,svgd:alpha=1", seeds: int = 2, **changes) -> Comparison:
    scale = dataclasses.replace(TOY, **changes)
    return Comparison("logic", tuple(parse_arms(arms)), tuple(range(seeds)), scale, out)


def test_a_comparison_goes_seed_by_seed_and_ends_with_its_table(inline, tmp_path):
    on = console()
    assert compare(toy(tmp_path), on) == []
    assert inline == [
        *("majority", "counts"),
        *("plain seed 0", "svgd:alpha=1.0 seed 0"),
        *("plain seed 1", "svgd:alpha=1.0 seed 1"),
    ]
    record = json.loads((tmp_path / "comparison.json").read_text())
    assert (record["arms"], record["seeds"], record["scale"]) == (["plain", "svgd:alpha=1.0"], [0, 1], "toy")
    assert set(np.load(tmp_path / "test.npz").files) == {"bins"}
    assert {row["arm"] for row in json.loads((tmp_path / "results.json").read_text())["rows"]} == {
        *("majority", "counts", "plain", "svgd:alpha=1.0")
    }
    assert isinstance(on.file, io.StringIO)
    assert "svgd:alpha=1.0" in on.file.getvalue()
    assert (tmp_path / "svgd@alpha=1.0" / "seed-1" / "result.json").exists()
    page = (tmp_path / "report.html").read_text()
    assert f"headwise compare logic --arms plain,svgd:alpha=1.0 --seeds 2 --scale toy --out {tmp_path}" in page
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of plain with one seed."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        do_inline(patch)
        compare(toy(folder, "plain", 1), console())
    return folder


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "out")


@pytest.mark.full
def test_a_second_call_does_only_what_is_missing_and_more_arms_and_seeds_are_added(inline, out, monkeypatch):
    before = (out / "plain" / "seed-0" / "result.json").stat().st_mtime_ns
    fitted = []
    monkeypatch.setattr("headwise_lab.compare.require_fits", lambda arm, *_: fitted.append(arm.name))
    compare(toy(out, "plain,smooth", 2), console())
    assert inline == ["smooth seed 0", "plain seed 1", "smooth seed 1"]
    assert fitted == ["smooth"], "an arm that was trained here fits"
    assert (out / "plain" / "seed-0" / "result.json").stat().st_mtime_ns == before
    compare(toy(out, "plain", 1), console())
    record = json.loads((out / "comparison.json").read_text())
    assert (record["arms"], record["seeds"]) == (["plain", "smooth"], [0, 1])


@pytest.mark.full
def test_a_comparison_says_what_its_data_is_and_an_older_folder_learns_it(inline, out):
    record = json.loads((out / "comparison.json").read_text())
    assert record["described"] == read_results(out).described == load_logic(None, TOY, out / "cache").summary()
    del record["described"]
    (out / "comparison.json").write_text(json.dumps(seal(record, out, ["test.npz"])))
    assert read_results(out).described == ""
    compare(toy(out, "plain", 1), console())
    assert inline == [], "nothing is run again"
    assert read_results(out).described


@pytest.mark.full
def test_a_flipped_bit_in_what_all_runs_share_is_noticed_and_written_anew(inline, out):
    table, bins = (out / "results.json").read_text(), out / "test.npz"
    content = bytearray(bins.read_bytes())
    content[len(content) // 2] ^= 4
    bins.write_bytes(content)
    with pytest.raises(DataError, match=r"test\.npz was changed since it was written.*give the command"):
        read_results(out)
    compare(toy(out, "plain", 1), console())
    assert inline == []
    assert (out / "results.json").read_text() == table
    path = out / "comparison.json"
    path.write_text(path.read_text().replace('"plain"', '"plaim"'))
    with pytest.raises(DataError, match=r"comparison\.json was changed since it was written"):
        read_results(out)
    with pytest.raises(DataError, match=r"comparison\.json was changed since it was written.*delete it"):
        compare(toy(out, "plain", 1), console())


def test_what_does_not_fit_is_refused_before_anything_runs(inline, out, tmp_path):
    record = json.loads((out / "plain" / "seed-0" / "settings.json").read_text())
    # the comparison agrees, one of its runs does not
    path = out / "plain" / "seed-1" / "settings.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**record, "seed": 1, "recipe": {**record["recipe"], "clip_norm": 7.0}}))
    blocked = tmp_path / "file"
    blocked.write_text("")
    other = r"comparison\.json has sizes\.width 8 but 16 is requested; choose another --out"
    for comparison, message in (
        (toy(out, "plain", 1, width=16), other),
        (
            toy(out, "plain,smooth", 2),
            r"seed-1/settings\.json has recipe\.clip_norm 7\.0 but 5\.0 is requested",
        ),
        (toy(tmp_path / "a", "plain,em:capsules=3"), r"arm em:capsules=3 does not fit the model of scale toy: .*3"),
        (toy(tmp_path / "b", "plain,svgd:layers=7"), r"arm svgd:layers=7 does not fit the model of scale toy: .*7"),
        (toy(blocked / "out"), rf"cannot write to {blocked}/out \(Not a directory\); choose another --out\."),
    ):
        with pytest.raises(SettingError, match=message):
            compare(comparison, console())
    assert inline == []


@pytest.mark.full
def test_translation_is_planned_without_a_models_library():
    code = "import sys, headwise_lab.tasks.translation.task; print('transformers' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False", "it takes seconds to import, before the first run begins"


@pytest.mark.full
def test_real_workers_leave_the_same_bits_as_this_process(tmp_path):
    here = tmp_path / "here"
    comparison = dataclasses.replace(toy(tmp_path / "pool", "plain", 2), workers=2)
    assert compare(comparison, console()) == []
    for job in compare_module._list_jobs(comparison, LogicTask(), load_logic(None, TOY, None)):
        if job.name == "plain seed 1":
            do_job(job.settings, here, lambda: False)
    name = "model.safetensors"
    assert (here / name).read_bytes() == (tmp_path / "pool" / "plain" / "seed-1" / name).read_bytes()


def test_workers_are_the_cores_of_this_process():
    assert 1 <= count_workers() <= (os.cpu_count() or 1)
