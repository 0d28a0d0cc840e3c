"""Estimate, without a GPU, how long the comparison of docs/translation.md takes on one.

For a training step (forward, backward, arm, optimizer) and a decoding step, the script counts what torch dispatches:
operations, each of which takes at least one launch; the bytes they read and write; and their arithmetic. It adds the
three times, although a GPU overlaps them, and multiplies by the number of steps of the recipe on the given data. A
batch of dev or test is assumed to decode the number of tokens of its longest reference. Routing is counted uncompiled,
which takes several times the operations and bytes of the compiled routing in the recipe. The default device is an H100
at about its nominal bandwidth and without its matrix units; 20 us per operation is slow for torch.

    python benchmarks/translation_gpu.py PREPARED_FOLDER [--arms plain,svgd] [--microseconds 20] [--teraflops 15]
        [--gigabytes 3000]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from headwise.routing.aggregate import Aggregate
from headwise.routing.modules import Chunks
from headwise.texts.batching import batch_by_tokens
from headwise_lab.data.subwords import PADDING, START
from headwise_lab.experiment.arm_text import parse_arms
from headwise_lab.tasks.translation.decoding import DECODED_TOKENS
from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES
from headwise_lab.tasks.translation.task import TranslationTask
from headwise_lab.training.attach import Methods

ARMS = (
    "plain,smooth,svgd,svgd-relative,output,"
    "trunk:layers=0/1,kinds=self,em:layers=0/1,kinds=self,output+em:layers=0/1,kinds=self"
)
SCALE = TRANSLATION_SCALES["gpu"]
# Tokens in the counted step, few enough for two cores; bytes and arithmetic are scaled up in proportion.
COUNTED_TOKENS = 1_024


class Operations(TorchDispatchMode):
    """Count the operations that are dispatched to a device, and the bytes of their inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        # a view launches nothing
        if not function.is_view:
            self.number += 1
            tensors = [leaf for leaf in tree_leaves((args, kwargs, found)) if isinstance(leaf, torch.Tensor)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return found


@dataclass(frozen=True)
class Work:
    """Operations, bytes and floating-point operations of one step."""

    operations: float
    bytes: float
    flops: float

    def __sub__(self, other: Work) -> Work:
        return Work(self.operations - other.operations, self.bytes - other.bytes, self.flops - other.flops)


@dataclass(frozen=True)
class Device:
    """Assumed speed of a GPU: seconds per operation, bytes per second, floating-point operations per second."""

    launch: float
    bandwidth: float
    speed: float

    def seconds(self, work: Work) -> float:
        return work.operations * self.launch + work.bytes / self.bandwidth + work.flops / self.speed


def counted(step: Callable[[], object]) -> Work:
    step()
    with FlopCounterMode(display=False) as flops, Operations() as operations:
        step()
    return Work(operations.number, operations.bytes, flops.get_total_flops())


def attached(arm: Any, model: Any) -> Methods:
    """Attach the arm to the model, with the token chunks used on a GPU."""
    routing = arm.find(Aggregate)
    if routing is not None:
        tokens, routed = Chunks().sizes("cuda", SCALE.width * SCALE.heads)
        chunked = replace(routing.setting, chunks=Chunks(tokens, routed))
        arm = replace(arm, methods=tuple(replace(m, setting=chunked) if m is routing else m for m in arm.methods))
    return Methods(arm, model, model, seed=0)


def training_step(arm: Any, data: Any) -> Work:
    task = TranslationTask()
    model = task.model(data, SCALE).train()
    methods = attached(arm, model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    methods.repel(optimizer)
    batch = task.collate([data.train[index] for index in batch_by_tokens(data.train.lengths, tokens=COUNTED_TOKENS)[0]])

    def step() -> None:
        optimizer.zero_grad()
        methods.loss(model(**batch)["loss"]).backward()
        methods.apply_repulsion()
        optimizer.step()

    work = counted(step)
    larger = SCALE.tokens / COUNTED_TOKENS
    return Work(work.operations, work.bytes * larger, work.flops * larger)


@torch.no_grad()
def decoding_step(arm: Any, data: Any, beams: int) -> Work:
    """Return the work per token, from the difference between searches of twelve tokens and of four."""
    model: Any = TranslationTask().model(data, SCALE).eval()
    attached(arm, model)
    ids = torch.randint(START + 2, 50, (8, 12))

    def search(tokens: int) -> Work:
        return counted(
            lambda: model.generate(
                ids,
                attention_mask=(ids != PADDING).long(),
                num_beams=beams,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
            )
        )

    difference = search(12) - search(4)
    return Work(*(value / 8 for value in (difference.operations, difference.bytes, difference.flops)))


def decoded_tokens(split: Any, beams: int) -> int:
    """Return the steps of a search over a split, assuming translations as long as their references."""
    sources, targets = split.sources.lengths, split.targets.lengths
    batches = batch_by_tokens(sources, tokens=max(int(sources.max()), DECODED_TOKENS // beams))
    return sum(max(int(targets[index]) for index in batch) for batch in batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--microseconds", type=float, default=20.0, help="time per operation, including its launch")
    parser.add_argument("--teraflops", type=float, default=15.0, help="arithmetic throughput")
    parser.add_argument("--gigabytes", type=float, default=3_000.0, help="memory bandwidth per second")
    given = parser.parse_args()
    device = Device(given.microseconds * 1e-6, given.gigabytes * 1e9, given.teraflops * 1e12)
    data = TranslationTask().load(given.folder, SCALE, None)
    steps = SCALE.epochs * len(TranslationTask().batches(data, SCALE, 0))
    dev = SCALE.epochs * decoded_tokens(data.dev, 1)
    test = decoded_tokens(data.test, SCALE.beams)
    console = Console()
    console.print(
        f"{steps:,} training steps, {dev:,} decoding steps on dev, {test:,} on test; "
        f"{given.microseconds:g} us per operation, {given.gigabytes:g} GB/s, {given.teraflops:g} TFLOP/s",
        highlight=False,
        soft_wrap=True,
    )
    for arm in parse_arms(given.arms):
        training = training_step(arm, data)
        greedy, beam = (decoding_step(arm, data, beams) for beams in (1, SCALE.beams))
        parts = [
            number * device.seconds(work) / 60 for number, work in ((steps, training), (dev, greedy), (test, beam))
        ]
        launches = steps * training.operations * device.launch / 60
        console.print(
            f"{arm.name}: {sum(parts):.1f} min = training {parts[0]:.1f} (launches {launches:.1f} of it) "
            f"+ dev {parts[1]:.1f} + test {parts[2]:.1f}",
            highlight=False,
            soft_wrap=True,
        )


if __name__ == "__main__":
    main()
