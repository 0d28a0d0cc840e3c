"""Time and memory of routing against its own trunk: same votes, uniform weights, same chunks and recomputation.

    python benchmarks/routing.py [--threads 2] [--rounds 15] [--json FILE]

All arms run interleaved in one process, one forward and backward pass each round; the table gives medians and
their ratio to the trunk. The trunk runs twice under two names: the ratio of the two is the noise of the table.
Kept is what the forward pass holds for the backward pass beyond the weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from headwise.aggregators import Routing, build
from headwise.routing import Chunks, EMRouting, SimpleRouting, Trunk

WIDTH, HEADS, TOKENS = 512, 8, 2048
ARMS: dict[str, Routing | None] = {
    "trunk": Trunk(),
    "trunk again (A/A)": Trunk(),
    "linear W_O": None,
    "em": EMRouting(),
    "em compiled": EMRouting(chunks=Chunks(compile=True)),
    "em compiled, no activation": EMRouting(activation=False, chunks=Chunks(compile=True)),
    "simple": SimpleRouting(),
    "simple compiled": SimpleRouting(chunks=Chunks(compile=True)),
}


def module_of(setting: Routing | None) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH) if setting is None else build(setting, HEADS, WIDTH // HEADS, WIDTH)


def kept_bytes(module: nn.Module, heads: Tensor) -> int:
    weights = {parameter.data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(heads)
    return sum(kept.values())


def step_of(module: nn.Module, heads: Tensor, grad: Tensor) -> Callable[[], None]:
    def step() -> None:
        module.zero_grad()
        heads.grad = None
        module(heads).backward(grad)

    return step


def measure(rounds: int, clock: Callable[[], float], only: list[str]) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    heads = torch.randn(TOKENS, WIDTH, requires_grad=True)
    grad = torch.randn(TOKENS, WIDTH)
    chosen = {name: setting for name, setting in ARMS.items() if not only or name in only or "trunk" in name}
    modules = {name: module_of(setting) for name, setting in chosen.items()}
    steps = {name: step_of(module, heads, grad) for name, module in modules.items()}
    first: dict[str, float] = {}
    for name, step in steps.items():
        start = time.perf_counter()
        step()
        first[name] = time.perf_counter() - start
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = clock()
            step()
            times[name].append(clock() - start)
    trunk = statistics.median(times["trunk"])
    return {
        name: {
            "milliseconds": 1e3 * statistics.median(values),
            "ratio": statistics.median(values) / trunk,
            "ratio_of_minima": min(values) / min(times["trunk"]),
            "kept_mebibytes": kept_bytes(modules[name], heads) / 2**20,
            "first_call_seconds": first[name],
        }
        for name, values in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", action="append", default=[], help="an arm beside the trunk; repeatable")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="time of this thread instead of the wall's; for --threads 1 on a busy machine",
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = measure(arguments.rounds, time.thread_time if arguments.cpu_time else time.perf_counter, arguments.only)
    print(
        f"{TOKENS} tokens, d={WIDTH}, H={HEADS}, N={WIDTH}, T=3, {arguments.threads} threads, torch {torch.__version__}"
    )
    print(f"{'arm':28}{'ms':>9}{'x trunk':>9}{'x (min)':>9}{'kept MiB':>10}{'first s':>9}")
    for name, row in table.items():
        print(
            f"{name:28}{row['milliseconds']:9.1f}{row['ratio']:9.2f}{row['ratio_of_minima']:9.2f}"
            f"{row['kept_mebibytes']:10.1f}{row['first_call_seconds']:9.1f}"
        )
    if arguments.json is not None:
        record = {
            "tokens": TOKENS,
            "width": WIDTH,
            "heads": HEADS,
            "threads": arguments.threads,
            "clock": "thread" if arguments.cpu_time else "wall",
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
            "arms": table,
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
