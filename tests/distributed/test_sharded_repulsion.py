"""Repulsion of a model that several processes train together equals repulsion in one of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import headwise as hw
from distributed.engines import (
    ENGINES,
    HEADS,
    LAYERS,
    as_it_is,
    batch,
    columns,
    ddp,
    examples,
    fsdp_columns,
    fused,
    gathered,
    made,
    own,
)
from distributed.processes import Processes
from heads.attentions import SeparateAttention
from headwise.heads.view import gather_full

# a process imports torch for seconds
pytestmark = pytest.mark.full
RATE, STEPS = 0.05, 3
RULES = {
    "SVGD": hw.SVGD(alpha=0.7, step_size=0.3, data_size=3.0),
    "prior": hw.SVGD(alpha=0.7, step_size=0.3, prior_precision=0.2, data_size=3.0, inverse_temperature=1.7),
    "relative": hw.SVGD(alpha=hw.Relative(0.4), step_size=0.3, prior_precision=0.2),
    "SPOS": hw.SPOS(alpha=0.5, step_size=0.3, inverse_temperature=7.0),
    "SGLD": hw.SGLD(step_size=0.3, inverse_temperature=7.0, prior_precision=0.1),
    "cosine": hw.repulsion.CosineRepulsion(alpha=0.3),
}


def trained(engine: str, rule: hw.Rule, model: nn.Module, divide: Any, **options: Any) -> tuple[dict[str, Tensor], Any]:
    """Parameters after some steps, and what the repulsion recorded of the last."""
    model = divide(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    repulsion = hw.repel(hw.find_heads(model), rule, optimizer, seed=11, **options)
    for step in range(STEPS):
        # ranks that have drawn different amounts of randomness draw the same noise all the same
        torch.rand(step + (dist.get_rank() if engine != "alone" else 0))
        optimizer.zero_grad()
        (model(batch(engine, step)) - 1.0).square().mean().backward()
        if options.get("when") == "manual":
            repulsion.apply()
            clip(model, 0.01)
        optimizer.step()
    repulsion.check(optimizer)
    return gathered(model), repulsion.last


def clip(model: nn.Module, norm: float) -> None:
    # torch's own refuses a model of which tensor parallel divides a part
    total = torch.stack([gather_full(p.grad).square().sum() for p in model.parameters()]).sum().sqrt()
    assert total > norm
    for parameter in model.parameters():
        parameter.grad.mul_(norm / float(total))


def assert_as_alone(engine: str, rule: str, make: Any, **options: Any) -> None:
    alone, expected = trained("alone", RULES[rule], make(), as_it_is, **options)
    together, found = trained(engine, RULES[rule], make(), ENGINES[engine], **options)
    for name, parameter in alone.items():
        torch.testing.assert_close(
            together[name], parameter, rtol=0.0, atol=1e-9, msg=lambda t, n=name: f"{rule}, {n}: {t}"
        )
    assert sorted(found.names) == sorted(expected.names)
    order = [expected.names.index(name) for name in found.names]
    for norm in ("driving_norm", "repulsion_norm", "particle_norm"):
        torch.testing.assert_close(getattr(found, norm), getattr(expected, norm)[order], rtol=1e-6, atol=1e-9)
    assert found.finite.all()


@pytest.mark.parametrize("engine", ENGINES)
def test_repulsion_equals_one_process(two: Processes, engine: str):
    two.run(assert_every_rule, engine)


def assert_every_rule(engine: str) -> None:
    for rule in RULES:
        assert_as_alone(engine, rule, made)
    # before clipping, and of joined projections
    assert_as_alone(engine, "prior", made, when="manual")
    assert_as_alone(engine, "prior", made, joint=True)
    # three projections in one parameter, with fewer heads of keys
    if engine.startswith("FSDP2"):
        assert_as_alone(engine, "prior", fused)


@pytest.mark.slow
def test_heads_that_do_not_divide_over_three_processes_equal_one_process(three: Processes):
    """Rows of 4 heads of 5 and 11 columns: neither divides by 3."""
    three.run(assert_uneven)


def uneven() -> nn.Module:
    torch.manual_seed(5)
    model = made(layers=1)
    attention = model.layers[0].attention
    # columns that do not divide either, of one projection alone: what is joined is divided in two ways
    attention.q_proj = nn.Linear(11, HEADS * attention.head_dim).double()
    return NarrowQueries(model)


class NarrowQueries(nn.Module):
    """Queries of fewer features than keys and values have."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers = model.layers
        attention = self.layers[0].attention
        attention.q_proj.register_forward_pre_hook(lambda _module, given: (given[0][..., :11],))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def assert_uneven() -> None:
    assert_as_alone("FSDP2 rows", "prior", uneven)
    assert_as_alone("FSDP2 rows", "relative", uneven, joint=True)
    # tensor parallelism computes with no third of 4 heads: the gradients of whole heads are handed out here
    mesh = init_device_mesh("cpu", (3,))
    expected, found = uneven(), uneven()
    for model in (expected, found):
        (model(examples(0)) - 1.0).square().mean().backward()
    for module in found.layers[0].attention.children():
        weight, gradient = module.weight, module.weight.grad
        module.weight = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
        module.weight.grad = distribute_tensor(gradient, mesh, [Shard(0)])
    for model in (expected, found):
        hw.repel(hw.find_heads(model), RULES["prior"], torch.optim.SGD(model.parameters(), lr=0.0)).apply()
    for one, together in zip(expected.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(gather_full(together.grad), one.grad, rtol=0.0, atol=1e-12)


def test_meshes_of_two_dimensions_equal_one_process(two: Processes):
    for layout in ("replicated rows", "replicated columns", "rows of heads"):
        two.run(assert_on_two_dimensions, layout)


def assert_on_two_dimensions(layout: str) -> None:
    shape = (1, 2) if layout == "replicated columns" else (2, 1)
    names = ("data", "heads") if layout == "rows of heads" else ("replicas", "shards")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def divide(model: nn.Module) -> nn.Module:
        if layout == "rows of heads":
            for layer in model.layers:
                plan = {f"{name}_proj": ColwiseParallel() for name in "qkv"}
                parallelize_module(layer.attention, mesh["heads"], plan | {"o_proj": RowwiseParallel()})
            return fully_shard(model, mesh=mesh["data"])
        place = columns if layout == "replicated columns" else None
        return fully_shard(model, mesh=mesh, shard_placement_fn=place)

    alone, _ = trained("alone", RULES["relative"], made(), as_it_is)
    together, _ = trained("divided", RULES["relative"], made(), divide)
    for name, parameter in alone.items():
        torch.testing.assert_close(together[name], parameter, rtol=0.0, atol=1e-9, msg=lambda t, n=name: f"{n}: {t}")


def test_columns_are_summed_in_one_message_for_the_whole_model(two: Processes):
    """L H (H + 1) numbers: a triangle of each of two symmetric matrices, and H norms of particles for the record."""
    groups, pairs = 3 * LAYERS, HEADS * HEADS
    for rule, more in (("SVGD", 0), ("prior", HEADS * (HEADS + 1) // 2 + pairs)):
        for messages, others in two.run(messages_of_a_step, rule):
            assert messages == [(groups * (pairs + HEADS + more), torch.float64)]
            assert others == {"c10d.allreduce_": 1}


def messages_of_a_step(rule: str) -> tuple[list[tuple[int, torch.dtype]], dict[str, int]]:
    model = fsdp_columns(made())
    repulsion = hw.repel(hw.find_heads(model), RULES[rule], torch.optim.SGD(model.parameters(), lr=RATE))
    (model(own(examples(0))) - 1.0).square().mean().backward()
    messages, send = [], dist.all_reduce

    def noted(tensor: Tensor, *given: Any, **named: Any) -> Any:
        messages.append((tensor.numel(), tensor.dtype))
        return send(tensor, *given, **named)

    dist.all_reduce = noted
    try:
        with CommDebugMode() as counted:
            repulsion.apply()
    finally:
        dist.all_reduce = send
    return messages, {str(operation): count for operation, count in counted.get_comm_counts().items() if count}


def test_noise_is_that_of_one_process_to_the_bit_and_replicas_stay_equal(two: Processes):
    for engine in ENGINES:
        two.run(assert_same_noise, engine)
        first, second = two.run(after_noise, engine)
        for name, parameter in first.items():
            assert torch.equal(parameter, second[name]), name


def assert_same_noise(engine: str) -> None:
    rule = hw.SGLD(step_size=0.3, inverse_temperature=7.0)

    def noise(model: nn.Module) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.rand(1 + dist.get_rank())
        hw.repel(hw.find_heads(model), rule, optimizer, seed=5, noise="apply").apply()
        return {n.removeprefix("module."): gather_full(p.grad).clone() for n, p in model.named_parameters()}

    alone, together = noise(made()), noise(ENGINES[engine](made()))
    for name, expected in alone.items():
        assert torch.equal(together[name], expected), name
        assert expected.any() == (name.endswith("weight") and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"))


def after_noise(engine: str) -> dict[str, Tensor]:
    return trained(engine, RULES["SPOS"], made(), ENGINES[engine])[0]


def test_a_gradient_that_is_not_finite_somewhere_is_left_alone_everywhere(two: Processes):
    for engine in ("FSDP2 rows", "FSDP2 columns", "tensor parallel"):
        two.run(assert_left_alone, engine)


def assert_left_alone(engine: str) -> None:
    model = ENGINES[engine](made())
    repulsion = hw.repel(hw.find_heads(model), RULES["SVGD"], torch.optim.SGD(model.parameters(), lr=RATE))
    (model(batch(engine, 0)) - 1.0).square().mean().backward()
    weights = {n: p for n, p in model.named_parameters() if n.endswith("_proj.weight") and "o_proj" not in n}
    spoilt = "layers.1.attention.k_proj.weight"
    if dist.get_rank() == 1:
        weights[spoilt].grad.to_local()[0, 0] = torch.inf
    before = {name: gather_full(parameter.grad).clone() for name, parameter in weights.items()}
    repulsion.apply()
    for name, parameter in weights.items():
        assert torch.equal(gather_full(parameter.grad), before[name]) == (name == spoilt), name
    assert [n for n, f in zip(repulsion.last.names, repulsion.last.finite, strict=True) if not f] == [
        "layers.1.attention key"
    ]


def test_equal_heads_are_refused_and_jitter_separates_them_as_in_one_process(two: Processes):
    for engine in ("FSDP2 rows", "FSDP2 columns", "tensor parallel"):
        two.run(assert_jittered, engine)


def assert_jittered(engine: str) -> None:
    def equal() -> nn.Module:
        model = made()
        for head_slice in hw.find_heads(model).slices():
            view = head_slice.of(head_slice.parameter.detach())
            view.copy_(view[:1].expand_as(view).clone())
        return model

    alone, model = equal(), ENGINES[engine](equal())
    with pytest.raises(hw.errors.HeadwiseError, match=r"all 4 heads are equal.*hw\.repulsion\.jitter"):
        hw.repel(hw.find_heads(model), RULES["SVGD"], torch.optim.SGD(model.parameters(), lr=RATE))
    for one in (alone, model):
        hw.repulsion.jitter(hw.find_heads(one), 1e-2, seed=4)
        hw.repel(hw.find_heads(one), RULES["SVGD"], torch.optim.SGD(one.parameters(), lr=RATE))
    found = gathered(model)
    for name, parameter in gathered(alone).items():
        assert torch.equal(found[name], parameter), name


def test_repulsion_under_lora_equals_one_process(two: Processes):
    pytest.importorskip("peft")
    two.run(assert_lora_as_alone)


def assert_lora_as_alone() -> None:
    from repulsion.test_repulsion_lora import RULE, adapted

    whole = torch.randn(4, 6, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rank = dist.get_rank()
    torch.manual_seed(9)
    alone = adapted(SeparateAttention())
    together = copy.deepcopy(alone)
    start = [parameter.detach().clone() for parameter in alone.parameters()]
    for model, given in ((alone, whole), (together, whole[2 * rank : 2 * rank + 2])):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        called = model if given is whole else ddp(model)
        hw.repel(hw.find_heads(called), RULE, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            (called(given) - 1.0).square().mean().backward()
            optimizer.step()
    for one, other in zip(alone.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-12)
    moved = [not torch.equal(one, before) for one, before in zip(alone.parameters(), start, strict=True)]
    assert sum(moved) == 6
