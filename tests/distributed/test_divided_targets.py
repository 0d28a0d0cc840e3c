"""Strengths with a target, where several processes train a model together: every process has the same strength."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import headwise as hw
from distributed.engines import ENGINES, TOKENS, WIDTH, batch, gathered, made, own
from distributed.processes import Processes

# a process imports torch for seconds
pytestmark = pytest.mark.full
TARGET = hw.Target(3.95, proportional=1.5)


def train(engine: str, method: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The controllers' ratios after some steps on each process's examples, and the whole parameters."""
    model = ENGINES[engine](made())
    heads, optimizer = hw.find_heads(model), torch.optim.SGD(model.parameters(), lr=0.05)
    if method == "penalty":
        penalty = hw.Disagreement(heads, hw.similarity.CKA(), across=dist.group.WORLD, strength=TARGET, every=2)
    else:
        repulsion = hw.repel(heads, hw.SVGD(alpha=TARGET), optimizer, every=2)
    for step in range(3):
        optimizer.zero_grad()
        mask = torch.arange(TOKENS) >= TOKENS - own(torch.arange(12) % 3)[:, None]
        loss = (model(batch(engine, step), key_padding_mask=mask) - 1.0).square().mean()
        (penalty.loss(loss) if method == "penalty" else loss).backward()
        optimizer.step()
    controls = penalty.relative.controls if method == "penalty" else repulsion.steering.controls
    return [control.ratio for control in controls.values()], gathered(model)


def assert_as_one(engine: str, method: str) -> None:
    ratios, parameters = train(engine, method)
    assert all(0.0 < ratio < 1.0 for ratio in ratios)
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, (ratios, {name: p.tolist() for name, p in parameters.items()}))
    assert every[0] == every[1]


def test_every_process_has_the_same_strength(two: Processes):
    for engine, method in (("DDP", "penalty"), ("DDP", "repulsion"), ("FSDP2 columns", "repulsion")):
        two.run(assert_as_one, engine, method)


def train_on_parts() -> list[tuple[float, float | None]]:
    """The controllers after some steps in which the second process does not use the second layer."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(12, 3, 16, 0.0, batch_first=True) for _ in range(2))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05)
    repulsion = hw.repel(hw.find_heads(layers), hw.SVGD(alpha=hw.Target(2.9)), optimizer, every=1)
    for step in range(2):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        x = layers[0](torch.randn(4, 7, 12))
        (x if rank else layers[1](x)).square().mean().backward()
        optimizer.step()
    return [(control.ratio, control.effective_heads) for control in repulsion.steering.controls.values()]


def test_a_process_that_does_not_use_an_attention_leaves_its_strength_to_those_that_do(two: Processes):
    first, other = two.run(train_on_parts)
    assert first == other
    assert all(ratio > 0.0 for ratio, _ in first)


def train_static(added: bool) -> list[bool]:
    """Whether both processes have the same gradients after each step under DistributedDataParallel(static_graph)."""
    model = made()
    wrapped = torch.nn.parallel.DistributedDataParallel(model, static_graph=True)
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.CKA(), every=2)
    alike = []
    for step in range(4):
        model.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        loss = (wrapped(torch.randn(4, TOKENS, WIDTH, dtype=torch.float64)) - 1.0).square().mean()
        (penalty.loss(loss) if added else loss + 0.1 * penalty()).backward()
        own = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
        every = [torch.zeros_like(own) for _ in range(2)]
        dist.all_gather(every, own)
        alike.append(torch.equal(*every))
    assert not added or len(penalty.relative.shares) > 0
    return alike


def test_a_static_graph_goes_on_averaging_gradients(two: Processes):
    for added in (True, False):
        assert two.run(train_static, added) == [[True] * 4] * 2


def train_on_few_tokens() -> list[float | None]:
    """The controllers of a penalty where the second process has too few tokens to tell anything."""
    model = made()
    penalty = hw.Disagreement(
        hw.find_heads(model), hw.similarity.CKA(), across=dist.group.WORLD, strength=TARGET, every=1
    )
    x = torch.randn(1, 2 if dist.get_rank() else TOKENS, WIDTH, dtype=torch.float64)
    penalty.loss(model(x).square().mean())
    return [control.effective_heads for control in penalty.relative.controls.values()]


def test_a_process_with_too_few_tokens_leaves_the_number_to_those_that_know_it(two: Processes):
    first, other = two.run(train_on_few_tokens)
    assert first == other
    # half of four would be the mean with a process that counts none
    assert all(2.0 < number <= 4.0 for number in first)
