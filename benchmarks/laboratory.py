"""Compare runs of the laboratory with a bare loop over the same model and batches, and time how a run starts.

    python benchmarks/laboratory.py --data FOLDER [--rounds 9] [--out record.json]

FOLDER holds sentence pairs, as headwise compare translation --data takes them. Both train the same model on the same
batches in turns in one process: `train_run` as `headwise compare` calls it, and ten lines of torch. The clock is CPU
time; it starts after some steps and stops before anything is evaluated or saved. A start is from the command to the
first step, for a seed added to a comparison. Exits with 1 where a figure misses its bar. Run by
`make bench NAME=laboratory ARGS="--data FOLDER"`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import get_scheduler

from headwise_lab.experiment.arm import named_arms
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.run_folder import PROGRESS
from headwise_lab.experiment.seeding import derive_key
from headwise_lab.experiment.settings import RunSettings, load_data
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.optimizer import build_optimizer
from headwise_lab.training.train import train_run
from timing import console, default_device, new_record, ratio, write

LEAST_SPEED, MOST_SECONDS = 0.9, 5.0
CASES = (("logic", "demo"), ("logic", "cpu"), ("translation", "demo"))


class Clock:
    """CPU seconds of some steps after a warm-up; calling it counts a step and returns whether they are done."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup, self.last, self.counted, self.seconds = warmup, warmup + steps, 0, 0.0

    def __call__(self) -> bool:
        """Count a step."""
        self.counted += 1
        if self.counted == self.warmup:
            self.seconds = -time.process_time()
        if self.counted == self.last:
            self.seconds += time.process_time()
        return self.counted >= self.last


def train_bare(settings: RunSettings, clock: Clock) -> None:
    """Train the model of a run with the optimizer, schedule and batches of its recipe."""
    data, task, recipe = load_data(settings), named_task(settings.task), settings.scale.recipe
    model: Any = attach_arm(task, settings.arm, data, settings.scale, seed=settings.seed)[0]
    batches: Any = task.batches(data, settings.scale, derive_key(settings.seed, "order"))
    steps = recipe.epochs * len(batches)
    optimizer = build_optimizer(model, recipe.learning_rate, recipe)
    schedule = get_scheduler(recipe.schedule, optimizer, recipe.warmup(steps), steps)
    for batch in DataLoader(data.train, batch_sampler=batches, collate_fn=task.collate):
        model(**batch)["loss"].backward()
        if recipe.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if clock():
            return


def train_ours(settings: RunSettings, clock: Clock) -> None:
    """Do a run until the clock stops it."""
    with tempfile.TemporaryDirectory() as folder:
        train_run(settings, Path(folder) / "run", clock)


def compare_speeds(settings: RunSettings, rounds: int, warmup: int, steps: int) -> dict[str, Any]:
    """Return the examples per second of both in each round, and the median ratio of a round."""
    data, task = load_data(settings), named_task(settings.task)
    batches: Any = task.batches(data, settings.scale, derive_key(settings.seed, "order"))
    if warmup + steps > len(batches):
        raise SystemExit(
            f"an epoch of {settings.task} has {len(batches)} batches, and the bare loop trains for one: --warmup and "
            f"--steps add up to {warmup + steps}; expected at most as many."
        )
    examples = sum(map(len, itertools.islice(batches, warmup, warmup + steps)))
    train: dict[str, Callable[[RunSettings, Clock], None]] = {
        "laboratory": train_ours,
        "bare": train_bare,
        "bare again": train_bare,
    }
    seconds: dict[str, list[float]] = {name: [] for name in train}
    for turn in range(rounds + 1):
        for name, kept in seconds.items():
            clock = Clock(warmup, steps)
            train[name](settings, clock)
            # the first turn warms up
            kept.extend([clock.seconds] if turn else [])
    more = statistics.median(ours - bare for ours, bare in zip(seconds["laboratory"], seconds["bare"], strict=True))
    return {
        "examples_per_second": {name: [examples / one for one in kept] for name, kept in seconds.items()},
        "ratio": ratio(seconds, "bare", "laboratory"),
        "bare_again": ratio(seconds, "bare", "bare again"),
        "microseconds_more_a_step": 1e6 * more / steps,
    }


def time_start(task: str, data: list[str], out: Path, starts: int) -> dict[str, list[float]]:
    """Return the CPU and wall seconds from a command to the first step of a seed that it adds to a comparison."""
    command = [sys.executable, "-m", "headwise", "compare", task, "--arms", "plain", "--workers", "1", *data]
    command += ["--out", str(out), "--set", "epochs=1", "--set", "train_examples=640", "--quiet", "--seeds"]
    subprocess.run([*command, "1"], check=True)
    seconds: dict[str, list[float]] = {"cpu": [], "wall": []}
    for number in range(1, starts + 1):
        began = time.monotonic()
        process = psutil.Popen([*command, str(number + 1)])
        try:
            while not (out / "plain" / f"seed-{number}" / PROGRESS).exists():
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(command)} ended before its first step.")
                time.sleep(0.02)
            seconds["wall"].append(time.monotonic() - began)
            times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        finally:
            process.wait()
        seconds["cpu"].append(sum(one.user + one.system for one in times))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="sentence pairs")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=20, help="steps of a turn that are not timed")
    parser.add_argument("--steps", type=int, default=80, help="steps of a turn that are timed")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args()
    device = default_device()
    record = new_record("laboratory", device)
    record |= {"clock": "CPU seconds", "warmup": arguments.warmup, "steps": arguments.steps, "speeds": {}, "starts": {}}
    with tempfile.TemporaryDirectory() as folder:
        for task, scale in CASES:
            data = arguments.data if named_task(task).prepares else None
            sizes = named_task(task).scales[scale]
            settings = RunSettings(task, sizes, named_arms()["plain"], 0, data, Path(folder) / task)
            found = compare_speeds(settings, arguments.rounds, arguments.warmup, arguments.steps)
            record["speeds"][f"{task} {scale}"] = found
            console.print(
                f"{task} at scale {scale}: {found['ratio']:.3f} of the bare loop's examples per second (at least "
                f"{LEAST_SPEED}), {found['microseconds_more_a_step']:.0f} us more a step; the bare loop over itself "
                f"{found['bare_again']:.3f}"
            )
        for task, words in (("logic", []), ("translation", ["--data", str(arguments.data)])):
            found = time_start(task, words, Path(folder) / f"start-{task}", arguments.starts)
            record["starts"][task] = found
            console.print(
                f"start of a run of {task}: {statistics.median(found['cpu']):.1f} s of CPU time (at most "
                f"{MOST_SECONDS} s), {statistics.median(found['wall']):.1f} s of wall time"
            )
    write(record, device, arguments.out)
    slow = min(found["ratio"] for found in record["speeds"].values()) < LEAST_SPEED
    late = max(statistics.median(found["cpu"]) for found in record["starts"].values()) > MOST_SECONDS
    if slow or late:
        raise SystemExit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
