"""Compare repulsion, penalties and routing with what they cannot do without: bytes, operators and Python.

The floor of a run is the time in which this machine copies as many bytes as the run must read and write; the copy runs
in the same rounds. Bytes are those of particles and gradients read once and gradients written once, for repulsion, and
of head outputs read in both passes and their gradient written, for the penalty. Times are of the CPU (events on CUDA).
Python per layer is that of a model of many narrow layers, on which arithmetic takes no time, over what the same model
takes without a method. Run by `make bench`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
import overhead
from headwise.repulsion.groups import ParticleGroup, find_groups
from headwise.repulsion.step import apply_rule
from headwise.similarity.terms import output_similarity
from timing import console, default_device, interleaved, interleaved_clocks, new_record, ratio, write

RULE = hw.SVGD(alpha=0.01)
# Numbers in the copy that measures the speed of a device.
COPIED = {"cpu": 2**24, "cuda": 2**28}
TOKENS = (32, 64)
# Wide layers, by number of heads.
WIDE, WIDE_HEADS = 4096, (32, 128)
NARROW, DEEP, ATTACHED = 16, 96, 384
THREE = hw.similarity.Output() + hw.similarity.Subspace() + hw.similarity.Position()
# sentences, tokens and heads
SCALING = [(32, 64, 8), (128, 64, 8), (8, 256, 8), (32, 64, 4), (32, 64, 16)]
# What is wanted at most: times the floor, microseconds per layer, times the operators of plain, seconds.
GOALS = {
    "svgd, 54 groups": 3.0,
    "svgd, first encoder layer": 3.0,
    "svgd, width 4096, 32 heads": 4.0,
    "svgd, width 4096, 128 heads": 4.0,
    "output penalty, 18 attentions": 3.0,
    "microseconds per layer, svgd": 150.0,
    "microseconds per layer, output": 100.0,
    "operators, output": 1.1,
    "operators, three terms": 1.2,
    "seconds to attach": 0.2,
}


class _Counted(TorchDispatchMode):
    """Counts the calls of torch's operators."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def bytes_table(device: torch.device, rounds: int) -> dict[str, object]:
    """Return the time of repulsion and the output penalty over that of copying the bytes they must move."""
    model = overhead.Translation().to(device)
    heads = hw.find_heads(model)
    fill_gradients(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    every = {
        "svgd, 54 groups": find_groups(heads),
        "svgd, first encoder layer": find_groups(heads.kind("self").layer(0)),
    }
    for count in WIDE_HEADS:
        attention = nn.MultiheadAttention(WIDE, count, batch_first=True).to(device)
        fill_gradients(attention)
        every[f"svgd, width {WIDE}, {count} heads"] = find_groups(hw.find_heads(attention))
    outputs = [
        torch.randn(*TOKENS, overhead.HEADS, overhead.WIDTH // overhead.HEADS, device=device, requires_grad=True)
        for _ in heads
    ]
    source = torch.randn(COPIED[device.type], device=device)
    target = torch.empty_like(source)
    moved = {name: 3 * count_bytes(groups) for name, groups in every.items()}
    moved["output penalty, 18 attentions"] = 3 * sum(own.numel() * own.element_size() for own in outputs)
    runs: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "copy again": lambda: target.copy_(source),
    }
    for name, groups in every.items():
        runs[name] = partial(apply_rule, RULE, groups, strength=1.0, scale=None)
    for name, groups in every.items():
        runs[f"products of {name}"] = partial(multiply, groups)
    runs["output penalty, 18 attentions"] = partial(penalize, outputs)
    runs["fused AdamW on the whole model"] = optimizer.step
    wall, cpu = interleaved_clocks(device, runs, rounds, "bytes")
    seconds = overhead.choose_clock(device, wall, cpu)
    speed = 2 * source.numel() * source.element_size() / statistics.median(seconds["copy"])
    rows = {
        name: {
            "bytes": size,
            "milliseconds": 1e3 * statistics.median(seconds[name]),
            "milliseconds of wall time": 1e3 * statistics.median(wall[name]),
            "floor milliseconds": 1e3 * size / speed,
            "times the floor": statistics.median(seconds[name]) * speed / size,
            "times the floor, products alone": statistics.median(seconds[f"products of {name}"]) * speed / size
            if name in every
            else None,
            "wanted": GOALS.get(name),
        }
        for name, size in moved.items()
    }
    return {
        "bytes a second of copying": speed,
        "copy again": ratio(seconds, "copy again", "copy"),
        "fused AdamW milliseconds": 1e3 * statistics.median(seconds["fused AdamW on the whole model"]),
        "rows": rows,
    }


def fill_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn_like(parameter)


def count_bytes(groups: Sequence[ParticleGroup]) -> int:
    views = [head_slice.of(head_slice.parameter) for group in groups for head_slice in group.slices]
    return sum(view.numel() * view.element_size() for view in views)


def multiply(groups: Sequence[ParticleGroup]) -> None:
    """Compute the three products of a step with repulsion, in single precision, and nothing else."""
    for group in groups:
        for head_slice in group.slices:
            theta = head_slice.of(head_slice.parameter.detach()).flatten(1)
            gram = theta @ theta.T
            # of these columns a core's cache holds gradient, particles and result
            for columns in theta.split(max(1, 2**18 // len(theta)), dim=1):
                torch.mm(gram, columns).addmm_(gram, columns)


def penalize(every: Sequence[Tensor]) -> None:
    for outputs in every:
        outputs.grad = None
    torch.stack([output_similarity(outputs) for outputs in every]).sum().backward()


class Narrow:
    """A deep encoder of narrow layers, trained with a method or without."""

    def __init__(self, layers: int, attach: Callable[[hw.Heads, torch.optim.Optimizer], Any]) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(NARROW, 4, NARROW, dropout=0.0, batch_first=True)
        self.model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        for own in self.model.layers:
            # copies of one layer would be particles at one place only by chance of this class
            for parameter in own.parameters():
                parameter.data.add_(1e-2 * torch.randn_like(parameter))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, foreach=True)
        self.method = attach(hw.find_heads(self.model), self.optimizer)
        self.x = torch.randn(2, 4, NARROW)

    def step(self) -> None:
        loss = self.model(self.x).square().mean()
        if isinstance(self.method, hw.Disagreement):
            loss = loss + self.method()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


def leave(_heads: hw.Heads, _optimizer: torch.optim.Optimizer) -> None:
    """Attach nothing."""


def penalty(term: Any) -> Callable[[hw.Heads, torch.optim.Optimizer], hw.Disagreement]:
    return lambda heads, _optimizer: hw.Disagreement(heads, term)


METHODS: dict[str, Callable[[hw.Heads, torch.optim.Optimizer], Any]] = {
    "plain": leave,
    "plain again": leave,
    "output": penalty(hw.similarity.Output()),
    "three terms": penalty(THREE),
    "svgd": lambda heads, optimizer: hw.repel(heads, RULE, optimizer),
}


def python_table(rounds: int) -> dict[str, object]:
    """Return the CPU microseconds that a method adds to a step for each layer, and the operators of a step."""
    variants = {name: Narrow(DEEP, attach) for name, attach in METHODS.items()}
    _, cpu = interleaved_clocks(
        torch.device("cpu"), {name: variant.step for name, variant in variants.items()}, rounds, f"{DEEP} layers"
    )
    plain = cpu["plain"]
    added = {
        name: 1e6 * statistics.median(a - b for a, b in zip(cpu[name], plain, strict=True)) / DEEP
        for name in METHODS
        if name != "plain"
    }
    calls = {name: count_calls(variant.step) for name, variant in variants.items()}
    heads = hw.find_heads(Narrow(ATTACHED, METHODS["plain"]).model)
    attach = interleaved(
        torch.device("cpu"),
        {"attach": lambda: hw.Disagreement(heads, hw.similarity.Output()).remove()},
        5,
        "attaching",
        time.process_time,
    )
    return {
        "layers": DEEP,
        "microseconds per layer, plain": 1e6 * statistics.median(plain) / DEEP,
        "microseconds per layer": added,
        "operators": calls,
        "operators of plain": {name: number / calls["plain"] for name, number in calls.items()},
        "attached layers": ATTACHED,
        "seconds to attach": statistics.median(attach["attach"]),
    }


def count_calls(step: Callable[[], None]) -> int:
    with _Counted() as counted:
        step()
    return counted.calls


def scaling_table(device: torch.device, rounds: int) -> list[dict[str, object]]:
    """Compare SVGD, O(M^2 D), with the output penalty, O(B L M e): milliseconds by batch, length and heads."""
    rows = []
    for batch, length, count in SCALING:
        attention = hw.nn.MultiheadAttention(overhead.WIDTH, count, batch_first=True).to(device)
        groups = find_groups(hw.find_heads(attention))
        fill_gradients(attention)
        outputs = torch.randn(batch, length, count, overhead.WIDTH // count, device=device, requires_grad=True)
        x = torch.randn(batch, length, overhead.WIDTH, device=device, requires_grad=True)
        runs = {
            "attention": partial(attend, attention, x),
            "svgd": partial(apply_rule, RULE, groups, strength=1.0, scale=None),
            "output penalty": partial(penalize, [outputs]),
        }
        clocks = interleaved_clocks(device, runs, rounds, f"batch {batch} x {length}, {count} heads")
        seconds = overhead.choose_clock(device, *clocks)
        milliseconds = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
        rows.append({"batch": batch, "length": length, "heads": count, "milliseconds": milliseconds})
    return rows


def attend(attention: nn.Module, x: Tensor) -> None:
    # gradients of its own, so that those that are repelled stay as they are
    result = attention(x, x, x, need_weights=False)[0].sum()
    torch.autograd.grad(result, [x, *attention.parameters()])


def show(record: dict) -> None:
    table = record["bytes"]
    console.print(
        f"\n[bold]Bytes[/bold]: a copy moves {table['bytes a second of copying'] / 1e9:.1f} GB/s "
        f"(A/A {table['copy again']:.3f}); fused AdamW on the model {table['fused AdamW milliseconds']:.1f} ms"
    )
    for name, row in table["rows"].items():
        wanted = "" if row["wanted"] is None else f"   wanted: at most {row['wanted']:g}"
        console.print(
            f"  {name:<34} {row['milliseconds']:8.2f} ms, floor {row['floor milliseconds']:7.2f} ms: "
            f"{row['times the floor']:5.1f} times{wanted}"
        )
    table = record["python"]
    console.print(f"\n[bold]Python[/bold] of {table['layers']} narrow layers, added to each, and operators of plain")
    for name, value in table["microseconds per layer"].items():
        console.print(f"  {name:<34} {value:8.1f} us   {table['operators of plain'][name]:6.3f}")
    console.print(f"  attaching to {table['attached layers']} layers: {table['seconds to attach']:.2f} s")
    console.print("\n[bold]Cost by batch, length and heads[/bold], ms")
    for row in record["scaling"]:
        cells = "   ".join(f"{name} {value:.2f}" for name, value in row["milliseconds"].items())
        console.print(f"  batch {row['batch']:>3} x {row['length']:>3}, {row['heads']:>2} heads   {cells}")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default=default_device().type)
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args(given)
    device = torch.device(arguments.device)
    record = new_record("floors", device) | {"wanted": GOALS}
    record["bytes"] = bytes_table(device, arguments.rounds)
    record["python"] = python_table(arguments.rounds)
    record["scaling"] = scaling_table(device, 2 * arguments.rounds)
    show(record)
    write(record, device, arguments.out)


if __name__ == "__main__":
    main()
