"""Time interleaved runs in one process and write the record of a benchmark; no record overwrites another."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from headwise.input_files import encode_json

RECORDS = Path(__file__).parent / "records"
console = Console()


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(device: torch.device, run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one run by a clock, on CUDA between two events."""
    synchronize(device)
    if device.type == "cuda":
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3
    start = clock()
    run()
    return clock() - start


def interleaved(
    device: torch.device,
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    description: str,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each run in each round, after one warm-up round.

    Each round begins with another run, as the one before may leave caches and memory better or worse.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in track(range(rounds + 1), description, console=console, transient=True):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            elapsed = timed(device, runs[name], clock)
            if number:
                seconds[name].append(elapsed)
    return seconds


def interleaved_clocks(
    device: torch.device, runs: Mapping[str, Callable[[], object]], rounds: int, description: str
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return what `interleaved` does by two clocks: seconds of wall time (events on CUDA), and of CPU time.

    CPU time is that of all threads: on a shared machine it does not count what others compute, and on CUDA it is what
    launching costs.
    """
    spent: dict[str, list[float]] = {name: [] for name in runs}

    def clocked(name: str) -> None:
        start = time.process_time()
        runs[name]()
        spent[name].append(time.process_time() - start)

    wall = interleaved(device, {name: partial(clocked, name) for name in runs}, rounds, description)
    # the first round is the warm-up
    return wall, {name: every[1:] for name, every in spent.items()}


def flushes_subnormal() -> bool:
    """Return whether arithmetic on this CPU flushes subnormal numbers to zero (`torch.set_flush_denormal`)."""
    return not bool(torch.full((8,), 1e-38).mul(1e-2).any())


def ratio(seconds: Mapping[str, Sequence[float]], name: str, against: str) -> float:
    """Return the median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[against], strict=True))


def new_record(benchmark: str, device: torch.device) -> dict[str, Any]:
    """Return the header of a record: benchmark, date and machine."""
    return {"benchmark": benchmark, "date": time.strftime("%Y-%m-%d"), "machine": _machine(device)}


def write(record: dict[str, Any], device: torch.device, out: Path | None) -> None:
    """Write a record to `out`, or to the first free name for its date and benchmark in the folder of records."""
    record["machine"]["load after"] = os.getloadavg()[0]
    name = f"{record['date']}-{record['benchmark']}-{device.type}"
    names = [name, *(f"{name}-{number}" for number in range(2, 1000))]
    out = out or next(RECORDS / f"{n}.json" for n in names if not (RECORDS / f"{n}.json").exists())
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".part")
    temporary.write_text(encode_json(record, indent=1) + "\n", encoding="utf-8")
    temporary.replace(out)
    console.print(f"\nwritten to {out}")


def _machine(device: torch.device) -> dict[str, object]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    if device.type == "cpu" and Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), name)
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "flushes subnormal numbers": flushes_subnormal(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load before": os.getloadavg()[0],
    }
