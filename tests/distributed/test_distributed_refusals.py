"""Engines that leave no matrix of a head are refused in a sentence: FSDP1 and DeepSpeed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import headwise as hw
from distributed.engines import batch, ddp, gathered, made, tensor_parallel
from distributed.processes import Processes
from heads.attentions import SeparateAttention

RULE = hw.SVGD(alpha=0.5)


@pytest.mark.full
def test_fsdp1_is_refused(two: Processes):
    for original in (True, False):
        for first in (True, False):
            two.run(assert_fsdp1_refused, original, first)


def assert_fsdp1_refused(original: bool, first: bool) -> None:
    model = made()
    heads = hw.find_heads(model) if first else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says itself that it is old, and that it is on a CPU
        model = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        hw.errors.LayoutError, match=r"flattened by FSDP1 .* no matrix to read heads in; shard .* FSDP2"
    ):
        hw.repel(heads or hw.find_heads(model), RULE, optimizer)


def test_zero_3_is_refused_by_what_it_leaves_of_a_parameter():
    model = SeparateAttention()
    model.q_proj.weight.ds_id = 0
    with pytest.raises(hw.errors.LayoutError, match=r"q_proj.weight is partitioned by DeepSpeed's ZeRO-3.* FSDP2"):
        hw.repel(hw.find_heads(model), RULE, torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_optimizers_of_deepspeed_are_refused_by_name_and_in_a_wrapper():
    model = SeparateAttention()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    # as they are built: no torch optimizer themselves, around one that holds flat parts
    zero = type("DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero.stage_1_and_2"})()
    half = type("FP16_Optimizer", (), {"__module__": "deepspeed.runtime.fp16.fused_optimizer"})()
    wrapper = type("AcceleratedOptimizer", (), {"__module__": "accelerate.optimizer"})()
    zero.optimizer, half.optimizer, wrapper.optimizer = inner, inner, half
    for optimizer in (zero, half, wrapper):
        with pytest.raises(hw.errors.SettingError, match=r"of DeepSpeed, which steps on parts of flat vectors.*FSDP2"):
            hw.repel(hw.find_heads(model), RULE, optimizer)


@pytest.mark.full
def test_heads_of_a_module_that_counts_its_own_are_found_before_it_is_divided(two: Processes):
    two.run(assert_heads_found_before)


def assert_heads_found_before() -> None:
    model = made(layers=1)
    attention = model.layers[0].attention
    size = attention.head_dim
    # a module that says how many heads it has, and not how wide they are
    attention.split = lambda tensor: tensor.unflatten(-1, (-1, size)).transpose(1, 2)
    del attention.head_dim
    heads = hw.find_heads(model)
    tensor_parallel(model)
    with pytest.raises(
        hw.errors.LayoutError, match=r"divided by tensor parallelism and has none of head_dim.*find_heads"
    ):
        hw.find_heads(model)
    repulsion = hw.repel(heads, RULE, torch.optim.SGD(model.parameters(), lr=0.1))
    model(batch("tensor parallel", 0)).square().mean().backward()
    repulsion.apply()
    assert repulsion.last.particles == (4, 4, 4)


@pytest.mark.full
def test_torchs_own_zero_redundancy_equals_one_process(two: Processes):
    """Its gradients are whole everywhere; every process steps a part of the parameters and hands them out."""
    two.run(assert_zero_redundancy)


def assert_zero_redundancy() -> None:
    # torch warns of a part of its own when this is imported
    from torch.distributed.optim import ZeroRedundancyOptimizer

    results = []
    for engine in ("alone", "DDP"):
        model: nn.Module = made() if engine == "alone" else ddp(made())
        parameters = model.parameters()
        optimizer = (
            torch.optim.AdamW(parameters, lr=0.05)
            if engine == "alone"
            else ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, lr=0.05)
        )
        repulsion = hw.repel(hw.find_heads(model), hw.SPOS(alpha=0.5, inverse_temperature=7.0), optimizer)
        for step in range(3):
            optimizer.zero_grad()
            (model(batch(engine, step)) - 1.0).square().mean().backward()
            optimizer.step()
        repulsion.check()
        assert repulsion.steps == 3
        results.append(gathered(model))
    for name, expected in results[0].items():
        # Adam divides by the root of small squares
        torch.testing.assert_close(results[1][name], expected, rtol=0.0, atol=1e-6)
