"""Compare the time of methods and tasks in this version with an earlier one, interleaved in one process.

Each version brings its own sources and its own benchmarks, which know its calls; its modules stand in `sys.modules`
only while it runs. The earlier version comes from git. This version runs twice, so that the two ratios show the noise
of the machine. Times are of the CPU. A task with its data, as `--task translation=FOLDER`, is timed for some steps of
a run of plain, and the peak memory of such a run is read in processes of its own. Run by
`make bench NAME=versions ARGS="--before COMMIT"`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from timing import console, interleaved_clocks, new_record, ratio, write

ROOT = Path(__file__).parents[1]
OWN = ("headwise", "headwise_lab", "floors", "overhead", "laboratory", "timing")
SOURCES = ("src", "laboratory/src", "benchmarks")
CPU = torch.device("cpu")
SHAPE = (8, 64)
TOKENS = 512
# Of a run of a task: its scale, and the steps after which it stops.
SCALE, STEPS = "demo", 30
# The ratio to the earlier version that is wanted at most.
WANTED = 1.03


class Version:
    """The modules of one version and its finders of modules, which Python sees inside of a `with` block."""

    def __init__(self, root: Path) -> None:
        self._finders = list(sys.meta_path)
        self._paths = [*(str(root / name) for name in SOURCES), *sys.path]
        self._modules: dict[str, ModuleType] = {}

    def __enter__(self) -> Self:
        self._modules = _exchange_modules(self._modules)
        sys.path, self._paths = self._paths, sys.path
        sys.meta_path, self._finders = self._finders, sys.meta_path
        return self

    def __exit__(self, *_error: object) -> None:
        self.__enter__()

    def run(self, work: Callable[[], object]) -> None:
        with self:
            work()


def _exchange_modules(modules: dict[str, ModuleType]) -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in OWN]
    taken = {name: sys.modules.pop(name) for name in names}
    sys.modules.update(modules)
    return taken


def extract(commit: str, folder: Path) -> None:
    """Write the sources and benchmarks of a commit into a folder."""
    tar = subprocess.run(["git", "archive", commit, *SOURCES], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(fileobj=BytesIO(tar.stdout)) as archive:
        archive.extractall(folder, filter="data")


def collect() -> dict[str, Callable[[], object]]:
    """Return what is timed, made by the version whose modules can be imported now."""
    floors: Any = import_module("floors")
    overhead: Any = import_module("overhead")
    hw = floors.hw
    model, wide = overhead.Translation(), torch.nn.MultiheadAttention(2048, 32, batch_first=True)
    works: dict[str, Callable[[], object]] = {}
    for name, heads in {"54 groups": hw.find_heads(model), "width 2048, 32 heads": hw.find_heads(wide)}.items():
        floors.fill_gradients(heads.model)
        works[f"svgd, {name}"] = partial(
            floors.apply_rule, floors.RULE, floors.find_groups(heads), strength=1.0, scale=None
        )
    outputs = [torch.randn(32, 64, 8, 64, requires_grad=True) for _ in range(4)]
    works["output penalty, 4 attentions"] = partial(floors.penalize, outputs)
    # later versions know these names too, with a warning
    for name, routing in {"em": hw.EMRouting(), "simple": hw.SimpleRouting()}.items():
        module = overhead.build(routing, 8, 64, 512)
        works[f"{name} routing, {TOKENS} tokens"] = partial(route, module, torch.randn(TOKENS, 512))
    for name, attach in floors.METHODS.items():
        works[f"{floors.DEEP} narrow layers, {name}"] = floors.Narrow(floors.DEEP, attach).step
    works["LoRA in 6 layers of width 512, svgd"] = make_adapted(hw, floors.METHODS["svgd"])
    batch = [torch.randint(overhead.VOCABULARY, SHAPE, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    plain = overhead.no_penalty
    for name, variant in {
        "plain": overhead.Variant("plain", CPU, plain),
        "output": overhead.Variant("output", CPU, overhead.with_penalty(hw.Output())),
        "position": overhead.Variant("position", CPU, overhead.with_penalty(hw.Position())),
        "svgd": overhead.Variant("svgd", CPU, plain, floors.RULE),
    }.items():
        works[f"Transformer-base, {name}"] = partial(variant.step, *batch)
    return works


def make_run(task: str, data: Path | None, cache: Path) -> Callable[[], object]:
    """Return the first steps of a run of plain on a task, by the version whose modules can be imported now."""
    laboratory: Any = import_module("laboratory")
    settings = laboratory.RunSettings(
        task, laboratory.named_task(task).scales[SCALE], laboratory.named_arms()["plain"], 0, data, cache
    )
    return lambda: laboratory.train_ours(settings, laboratory.Clock(1, STEPS - 1))


def read_peak(root: Path, task: str, data: Path | None, cache: Path) -> float:
    """Return the peak memory, in MiB, of a process of a version that does the first steps of a run."""
    program = (
        "import sys; from pathlib import Path; from laboratory import *; task, data, cache = sys.argv[1:]; "
        f"scale = named_task(task).scales[{SCALE!r}]; data = Path(data) if data else None; "
        "settings = RunSettings(task, scale, named_arms()['plain'], 0, data, Path(cache)); "
        f"train_ours(settings, Clock(1, {STEPS - 1})); "
        # of this program alone: `ru_maxrss` begins with what the process that starts it holds
        "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])"
    )
    paths = os.pathsep.join(str(root / name) for name in SOURCES)
    command = [sys.executable, "-P", "-W", "ignore", "-c", program, task, str(data or ""), str(cache)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1]) / 1024


def make_adapted(hw: Any, attach: Callable[..., object]) -> Callable[[], object]:
    """Return a training step of LoRA adapters of rank 8 under a method."""
    config = LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules=targets, init_lora_weights=False))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    attach(hw.find_heads(model), optimizer)
    tokens = torch.randint(1000, SHAPE)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    return step


def route(module: torch.nn.Module, heads: torch.Tensor) -> None:
    module(heads).sum().backward()


def compare(commit: str, rounds: int, only: str, tasks: Mapping[str, Path | None]) -> list[dict[str, object]]:
    """Return the milliseconds of each work in both versions, and the median over rounds of their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        extract(commit, Path(folder))
        roots = {"before": Path(folder), "now": ROOT}
        before, now = map(Version, roots.values())
        runs: dict[str, dict[str, Callable[[], object]]] = {}
        for label, version in {"before": before, "now": now, "now again": now}.items():
            with version:
                for name, work in collect().items():
                    runs.setdefault(name, {})[label] = partial(version.run, work)
                for task, data in tasks.items():
                    work = make_run(task, data, Path(folder) / label / task)
                    runs.setdefault(f"{task}, {STEPS} steps", {})[label] = partial(version.run, work)
        rows: list[dict[str, object]] = []
        for name, own in runs.items():
            if only not in name:
                continue
            _, seconds = interleaved_clocks(CPU, own, rounds, name)
            milliseconds = {label: 1e3 * statistics.median(values) for label, values in seconds.items()}
            ratios = {label: ratio(seconds, label, "before") for label in ("now", "now again")}
            rows.append({"work": name, "milliseconds": milliseconds, "ratio to before": ratios})
            console.print(
                f"  {name:<36} before {milliseconds['before']:8.2f} ms   now {ratios['now']:6.3f} times"
                f"   (again {ratios['now again']:6.3f})"
            )
        for task, data in tasks.items():
            caches = {label: Path(folder) / label / task for label in roots}
            peaks = {
                label: statistics.median(read_peak(root, task, data, caches[label]) for _ in range(3))
                for label, root in roots.items()
            }
            rows.append(
                {"work": f"{task}, peak memory", "MiB": peaks, "ratio to before": peaks["now"] / peaks["before"]}
            )
            console.print(
                f"  {f'{task}, peak memory':<36} before {peaks['before']:8.1f} MiB  now "
                f"{peaks['now'] / peaks['before']:6.3f} times"
            )
        return rows


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, help="the commit of the earlier version")
    parser.add_argument("--rounds", type=int, default=45)
    parser.add_argument("--only", default="", help="time only works whose name holds this text")
    parser.add_argument(
        "--task", action="append", default=[], metavar="TASK=FOLDER", help="a task and its data, or TASK alone"
    )
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args(given)
    warnings.simplefilter("ignore", DeprecationWarning)
    record = new_record("versions", CPU) | {"before": arguments.before, "wanted at most": WANTED}
    named = [one.partition("=") for one in arguments.task]
    tasks = {task: Path(folder).resolve() if folder else None for task, _, folder in named}
    write(record | {"rows": compare(arguments.before, arguments.rounds, arguments.only, tasks)}, CPU, arguments.out)


if __name__ == "__main__":
    main()
