"""Strengths with a target, where several processes train a model together: every process has the same strength."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import headwise as hw
from distributed.engines import ENGINES, TOKENS, batch, gathered, made, own
from distributed.processes import Processes

TARGET = hw.Target(3.95, proportional=1.5)


def train(engine: str, method: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The controllers' ratios after some steps on each process's examples, and the whole parameters."""
    model = ENGINES[engine](made())
    heads, optimizer = hw.find_heads(model), torch.optim.SGD(model.parameters(), lr=0.05)
    if method == "penalty":
        penalty = hw.Disagreement(heads, hw.CKA(), across=dist.group.WORLD, strength=TARGET, every=2)
    else:
        repulsion = hw.repel(optimizer, heads, hw.SVGD(alpha=TARGET), every=2)
    for step in range(3):
        optimizer.zero_grad()
        mask = torch.arange(TOKENS) >= TOKENS - own(torch.arange(12) % 3)[:, None]
        loss = (model(batch(engine, step), key_padding_mask=mask) - 1.0).square().mean()
        (penalty.add_to(loss) if method == "penalty" else loss).backward()
        optimizer.step()
    controls = penalty.relative.controls if method == "penalty" else repulsion.steering.controls
    return [control.ratio for control in controls.values()], gathered(model)


def assert_as_one(engine: str, method: str) -> None:
    ratios, parameters = train(engine, method)
    assert all(0.0 < ratio < 1.0 for ratio in ratios)
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, (ratios, {name: p.tolist() for name, p in parameters.items()}))
    assert every[0] == every[1]


@pytest.mark.parametrize("method", ["penalty", "repulsion"])
def test_every_process_has_the_same_strength(two: Processes, method: str):
    two.run(assert_as_one, "DDP", method)


def test_divided_columns_have_the_same_strength(two: Processes):
    two.run(assert_as_one, "FSDP2 columns", "repulsion")
