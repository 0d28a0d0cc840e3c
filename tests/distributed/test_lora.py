"""Repulsion under LoRA with DistributedDataParallel equals that of one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import headwise as hw
from distributed.processes import Processes
from heads.attentions import SeparateAttention

pytest.importorskip("peft")


def test_two_processes_with_half_of_the_examples_each_equal_one_with_all(two: Processes):
    two.run(assert_together_as_alone)


def assert_together_as_alone() -> None:
    from repulsion.test_repulsion_lora import RULE, adapted

    batch = torch.randn(4, 6, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rank = dist.get_rank()
    torch.manual_seed(9)
    alone = adapted(SeparateAttention())
    together = copy.deepcopy(alone)
    start = [parameter.detach().clone() for parameter in alone.parameters()]
    for model, own in ((alone, batch), (together, batch[2 * rank : 2 * rank + 2])):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        called = model if own is batch else nn.parallel.DistributedDataParallel(model)
        hw.repel(hw.find_heads(called), RULE, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            (called(own) - 1.0).square().mean().backward()
            optimizer.step()
    for one, other in zip(alone.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-12)
    moved = [not torch.equal(one, before) for one, before in zip(alone.parameters(), start, strict=True)]
    assert sum(moved) == 6
