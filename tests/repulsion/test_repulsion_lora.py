"""Repulsion under LoRA of peft: the heads of W + s B A repel one another, and A and B get their force exactly.

Also in the loops people have: compiled, with noise, and attached at a wrong time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases, tiers
from heads.attentions import SeparateAttention
from heads.families import BY_NAME
from heads.own import ListAttention
from heads.wrappers import wrap
from headwise.kernels import Geometry
from headwise.repulsion.rules import Mixing
from repulsion.lora_by_hand import base_weight, expected_gradients, lora_layers, product_of

peft = pytest.importorskip("peft")

RULE = hw.SVGD(alpha=0.7, step_size=0.3, prior_precision=0.2, data_size=3.0, inverse_temperature=1.7)
ALL = ("query", "key", "value")
X = torch.randn(3, 6, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def adapted(module: nn.Module, targets=("q_proj", "k_proj", "v_proj"), **settings) -> nn.Module:
    """The module under LoRA in double precision, with B away from its start at zero."""
    torch.manual_seed(2)
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": list(targets), **settings})
    model = peft.get_peft_model(module, config).double()
    fill(model)
    return model


def fill(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def squares(model: nn.Module) -> Tensor:
    return (model(X) - 1.0).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def stepped(model: nn.Module, heads: hw.Heads, loss: Callable[[nn.Module], Tensor], rule, **options) -> dict:
    """The gradients that the optimizer gets."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    handle = hw.repel(heads, rule, optimizer, **options)
    loss(model).backward()
    optimizer.step()
    handle.check()
    handle.remove()
    return gradients(model)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@cases("unused", ["query", "key"])
def test_heads_without_a_gradient_are_told_where_all_of_their_kind_lack_one(unused):
    model = adapted(SeparateAttention(), targets=("q_proj",))
    plain = model.base_model.model.k_proj.weight.requires_grad_()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    handle = hw.repel(hw.find_heads(model).projection("query", "key"), RULE, optimizer)
    squares(model).backward()
    for parameter in trained:
        if (parameter is plain) == (unused == "key"):
            parameter.grad = None
    optimizer.step()
    (skipped,) = handle.last.skipped
    assert skipped.endswith(unused)
    with pytest.raises(hw.errors.NotFired, match=f"{skipped}: no gradient at any step"):
        handle.check()


@dataclass(frozen=True)
class OneWay:
    """A rule of a user's own, under which head i hears the heads before it: coefficients that are not symmetric."""

    needs_inner = False

    def noise_scale(self) -> float:
        return 0.0

    def mixing(self, geometry: Geometry) -> Mixing:
        lower = torch.tril(torch.ones_like(geometry.squared_distances)) / (1.0 + geometry.squared_distances)
        # repulsion is computed from differences of particles: its rows sum to zero
        return Mixing(0.3 * lower, 0.2 * lower.mT, 0.1 * (lower - lower.sum(-1).diag_embed()), None)


@cases(
    "rule",
    [
        RULE,
        hw.SVGD(alpha=0.5, smoothing=False),
        hw.SVGD(alpha=0.6, kernel=hw.kernels.NormalizedRBF()),
        hw.SVGD(alpha=0.6, kernel=hw.kernels.RadialRBF()),
        hw.repulsion.CosinePenalty(alpha=0.4),
    ],
)
@cases("settings", [{}, {"use_rslora": True}, {"lora_bias": True}])
@tiers("key_value_heads", [2], [4])
def test_a_step_carries_the_rule_on_the_effective_weight_to_a_and_b(rule, settings, key_value_heads):
    attention = SeparateAttention(key_value_heads=key_value_heads)
    attention.k_proj.bias = nn.Parameter(torch.zeros(5 * key_value_heads))
    model = adapted(attention, **settings)
    heads = hw.find_heads(model)
    expected = expected_gradients(model, heads, squares, rule)
    plain = copy.deepcopy(model)
    squares(plain).backward()
    found = stepped(model, heads, squares, rule)
    assert_same(found, expected)
    others = gradients(plain)
    assert all(torch.equal(found[name], others[name]) for name in others if name.endswith("lora_B.default.bias"))
    assert not any(torch.allclose(found[name], others[name], rtol=1e-2) for name in expected)


@cases("projections", [("query",), ("query", "value"), ("query", "key", "value")])
@cases(
    ("family", "target"),
    [
        ("GPT-2", "c_attn"),
        ("GPT-NeoX", "query_key_value"),
        ("Phi-3", "qkv_proj"),
        ("Falcon, 40B and 180B", "query_key_value"),
        ("CodeGen", "qkv_proj"),
    ],
)
def test_fused_layers_share_a_between_query_key_and_value(family, target, projections):
    entry = BY_NAME[family]
    model = adapted(entry.build(), (target,), fan_in_fan_out=family == "GPT-2")
    heads = hw.find_heads(model).projection(*projections)
    inputs = entry.inputs()

    def loss(own: nn.Module) -> Tensor:
        return own(**inputs)[0].square().mean()

    expected = expected_gradients(model, heads, loss, RULE)
    assert_same(stepped(model, heads, loss, RULE), expected)


def dropped(own: nn.Module) -> Tensor:
    torch.manual_seed(7)
    return squares(own.train())


def through_checkpoint(own: nn.Module, reentrant: bool) -> Tensor:
    x = X.clone().requires_grad_()
    return (torch.utils.checkpoint.checkpoint(own, x, use_reentrant=reentrant) - 1.0).square().mean()


def of_ones_own() -> nn.Module:
    model = wrap(SeparateAttention().double(), "q_proj", "v_proj").double()
    fill(model)
    return model


CASES = {
    # name: the model, projections, the rule, whether joined, its loss, the loss by hand
    "not symmetric": (lambda: adapted(SeparateAttention()), ALL, OneWay(), False, squares, squares),
    "joined": (lambda: adapted(SeparateAttention()), ALL, RULE, True, squares, squares),
    "without hooks of peft": (of_ones_own, ("query", "value"), RULE, False, squares, squares),
    "dropout": (lambda: adapted(SeparateAttention(), lora_dropout=0.4), ALL, RULE, False, dropped, dropped),
    "checkpoint": (
        lambda: adapted(SeparateAttention()),
        ALL,
        RULE,
        False,
        partial(through_checkpoint, reentrant=False),
        squares,
    ),
    "reentrant checkpoint": (
        lambda: adapted(SeparateAttention()),
        ALL,
        RULE,
        False,
        partial(through_checkpoint, reentrant=True),
        squares,
    ),
}


@cases("name", CASES)
def test_a_step_is_the_one_by_hand(name):
    build, projections, rule, joint, loss, by_hand = CASES[name]
    model = build()
    heads = hw.find_heads(model).projection(*projections)
    expected = expected_gradients(model, heads, by_hand, rule, joint=joint)
    assert_same(stepped(model, heads, loss, rule, joint=joint), expected)


def test_of_two_active_adapters_each_gets_its_force_and_a_frozen_one_counts_as_weight():
    model = adapted(SeparateAttention())
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "k_proj", "v_proj"]))
    model.double().base_model.set_adapter(["default", "second"])
    fill(model)
    heads = hw.find_heads(model)
    assert_same(stepped(model, heads, squares, RULE), expected_gradients(model, heads, squares, RULE))
    model.zero_grad()
    for name, parameter in model.named_parameters():
        if ".default." in name:
            parameter.requires_grad_(False)
    expected = expected_gradients(model, heads, squares, RULE)
    found = stepped(model, heads, squares, RULE)
    assert_same(found, expected)
    assert set(found) == set(expected) == {name for name in found if ".second." in name}


def test_a_relative_strength_compares_the_forces_on_b():
    ratio = 0.35
    model = adapted(SeparateAttention())
    heads = hw.find_heads(model)
    rule = hw.SVGD(alpha=hw.Relative(ratio), step_size=0.3)
    weak, strong = (
        expected_gradients(model, heads, squares, hw.SVGD(alpha=alpha, step_size=0.3)) for alpha in (0.0, 1.0)
    )
    found = stepped(model, heads, squares, rule)
    for name in (key for key in weak if "lora_B" in key):
        drive, push = weak[name], weak[name] - strong[name]
        factor = ratio * drive.norm() / push.norm()
        torch.testing.assert_close(found[name], drive - factor * push, rtol=1e-9, atol=1e-12)
        other = name.replace("lora_B", "lora_A")
        push = weak[other] - strong[other]
        torch.testing.assert_close(found[other], weak[other] - factor * push, rtol=1e-9, atol=1e-12)


@cases("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_training_equals_training_by_hand(kind):
    one = adapted(SeparateAttention())
    other = copy.deepcopy(one)
    optimizers = [kind([p for p in m.parameters() if p.requires_grad], lr=0.05) for m in (one, other)]
    hw.repel(hw.find_heads(one), RULE, optimizers[0])
    heads = hw.find_heads(other)
    for _ in range(5):
        squares(one).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        expected = expected_gradients(other, heads, squares, RULE)
        for name, parameter in other.named_parameters():
            parameter.grad = expected.get(name)
        optimizers[1].step()
    for (name, parameter), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def test_micro_batches_a_gradient_scale_and_a_schedule_enter_as_in_full_training():
    model = adapted(SeparateAttention())
    heads = hw.find_heads(model)
    expected = expected_gradients(model, heads, squares, RULE, losses=3, strength=0.25)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    handle = hw.repel(heads, RULE, optimizer)
    handle.strength = 0.25
    scale = torch.tensor(64.0, dtype=torch.float64)
    for _ in range(3):
        (squares(model) * scale).backward()
    handle._before_step(handle._attachments[0], scale=scale)
    assert_same({name: gradient / scale for name, gradient in gradients(model).items()}, expected)


def test_attaching_changes_no_output_and_no_other_gradient():
    model = adapted(SeparateAttention(), ("q_proj", "v_proj", "o_proj"), lora_dropout=0.2).train()
    twin = copy.deepcopy(model)
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    handle = hw.repel(hw.find_heads(model).projection("query", "value"), RULE, optimizer)
    outputs = []
    for own, x in zip((model, twin), inputs, strict=True):
        torch.manual_seed(1)
        outputs.append(own(x))
        outputs[-1].square().sum().backward()
    assert torch.equal(*outputs)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-12, atol=1e-14)
    before, plain = gradients(model), gradients(twin)
    mixed = {name for name in plain if "lora_A" in name and "o_proj" not in name}
    assert all(torch.equal(before[name], plain[name]) for name in plain if name not in mixed)
    assert not any(torch.allclose(before[name], plain[name]) for name in mixed)
    handle.remove()
    model.zero_grad()
    torch.manual_seed(1)
    model(X).square().sum().backward()
    assert all(torch.equal(gradients(model)[name], plain[name]) for name in plain)


def test_a_copy_of_the_model_is_not_routed():
    model = adapted(SeparateAttention())
    twin = copy.deepcopy(model)
    hw.repel(hw.find_heads(model), RULE, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for own in (copy.deepcopy(model), twin):
        x = X.clone().requires_grad_()
        (own(x) - 1.0).square().mean().backward()
        found.append({**gradients(own), "x": x.grad})
    assert all(torch.equal(found[0][name], gradient) for name, gradient in found[1].items())


def test_autocast_keeps_the_small_numbers_of_a_small_step():
    model = adapted(SeparateAttention(width=64, head_dim=16)).float()
    x = torch.randn(8, 20, 64, generator=torch.Generator().manual_seed(1))
    rule = hw.SVGD(alpha=0.0, step_size=1e-3)

    def loss(own: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (own(x) - 1.0).float().square().mean()

    def exact_loss(own: nn.Module) -> Tensor:
        return (own(x.double()) - 1.0).square().mean()

    twin = copy.deepcopy(model).double()
    exact = expected_gradients(twin, hw.find_heads(twin), exact_loss, rule)
    loss(model).backward()
    exact_loss(twin).backward()
    plain, exact_plain = gradients(model), gradients(twin)
    model.zero_grad()
    found = stepped(model, hw.find_heads(model), loss, rule)

    def error(one: Tensor, other: Tensor) -> float:
        return float((one - other).norm() / other.norm())

    for name, gradient in exact.items():
        # K - 1 added to the plain gradient would lose three digits of the three that bfloat16 has
        assert error(found[name], gradient) < 3 * error(plain[name], exact_plain[name]), name


@cases("rule", [hw.repulsion.FunctionSVGD(alpha=0.8, step_size=0.3), hw.repulsion.SpanSVGD(alpha=0.6, step_size=0.4)])
def test_functions_and_spans_of_heads_repel_as_those_of_the_effective_weights(rule):
    model = adapted(SeparateAttention(), ("q_proj", "k_proj", "v_proj", "o_proj"))
    heads = hw.find_heads(model)
    layers = lora_layers(model)
    plain = SeparateAttention().double()
    merged = {"q_proj", "k_proj", "v_proj", "o_proj"}
    for name, layer in layers.items():
        target = plain.get_submodule(name.rpartition(".")[2])
        with torch.no_grad():
            target.weight.copy_(base_weight(layer) + product_of(layer))
            target.bias.copy_(layer.base_layer.bias) if target.bias is not None else None
    # the force on the four effective weights, by the rule without LoRA
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
    hw.repel(hw.find_heads(plain), rule, optimizer)
    squares(plain).backward()
    optimizer.step()
    found = stepped(model, heads, squares, rule)
    for name, layer in layers.items():
        force = plain.get_submodule(name.rpartition(".")[2]).weight.grad
        factors = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        for key, expected in zip(
            ("lora_A", "lora_B"), torch.autograd.grad(product_of(layer), factors, force), strict=True
        ):
            torch.testing.assert_close(found[f"{name}.{key}.default.weight"], expected, rtol=1e-9, atol=1e-12)
    assert {name.rpartition(".")[2] for name in layers} == merged


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=lr)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile itself
def test_a_compiled_model_trains_as_it_does_uncompiled_and_without_a_break():
    model = adapted(SeparateAttention())
    models = [model, copy.deepcopy(model)]
    optimizers = [sgd(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        hw.repel(hw.find_heads(model), RULE, optimizer)
    calls = (torch.compile(models[0], backend="aot_eager", fullgraph=True), models[1])
    for _ in range(3):
        for call, optimizer in zip(calls, optimizers, strict=True):
            optimizer.zero_grad()
            squares(call).backward()
            optimizer.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other)


class Quiet(torch.optim.Optimizer):
    """Writes parameters without their version numbers."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.3})

    def step(self, _closure=None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-0.3)


def test_functions_of_heads_repel_as_they_are_now_whatever_the_optimizer():
    model = adapted(SeparateAttention(), ("q_proj", "k_proj", "v_proj", "o_proj"))
    rule = hw.repulsion.FunctionSVGD(alpha=0.8, step_size=0.3)
    optimizer = Quiet([p for p in model.parameters() if p.requires_grad])
    first = hw.repel(hw.find_heads(model), rule, optimizer)
    squares(model).backward()
    optimizer.step()
    fresh = copy.deepcopy(model)
    for own, steps in ((model, optimizer), (fresh, sgd(fresh, 0.0))):
        if own is fresh:
            hw.repel(hw.find_heads(fresh), rule, steps)
        own.zero_grad()
        squares(own).backward()
        steps.step()
    assert first.steps == 2
    assert_same(gradients(model), gradients(fresh))


@cases("written_by", ["optimizer", "loading"])
def test_what_was_written_without_a_trace_or_between_two_steps_is_seen(written_by):
    model = adapted(SeparateAttention())
    heads = hw.find_heads(model)
    quiet = written_by == "optimizer"
    optimizer = Quiet([p for p in model.parameters() if p.requires_grad]) if quiet else sgd(model, 0.0)
    hw.repel(heads, RULE, optimizer)
    squares(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    if not quiet:
        model.load_state_dict({name: 1.5 * tensor for name, tensor in model.state_dict().items()})
    expected = expected_gradients(model, heads, squares, RULE)
    squares(model).backward()
    optimizer.step()
    assert_same(gradients(model), expected)


@cases("joint", [False, True])
def test_noise_is_that_of_a_and_b_once_each_and_the_same_for_a_seed(joint):
    rates = {"lora_A": 0.25, "lora_B": 4.0}
    rule = hw.SGLD(inverse_temperature=5.0, step_size=0.3)
    found = []
    for seed in (3, 3, 4):
        model = adapted(SeparateAttention())
        quiet = copy.deepcopy(model)
        for own, chosen in ((model, rule), (quiet, hw.SVGD(alpha=0.0, smoothing=False, step_size=0.3 * 4))):
            trained = [(name, parameter) for name, parameter in own.named_parameters() if parameter.requires_grad]
            parts = [{"params": [p for name, p in trained if kind in name], "lr": rates[kind]} for kind in rates]
            optimizer = torch.optim.SGD(parts)
            hw.repel(hw.find_heads(own), chosen, optimizer, seed=seed, joint=joint)
            squares(own).backward()
            optimizer.step()
        found.append({name: gradient - gradients(quiet)[name] for name, gradient in gradients(model).items()})
    # to the rounding of the gradients that it was added to
    assert_same(found[0], found[1])
    assert not any(torch.allclose(found[0][name], found[2][name]) for name in found[0])
    for kind, rate in rates.items():
        draws = torch.cat([noise.flatten() for name, noise in found[0].items() if kind in name])
        # sqrt(2 eps / beta / lr), known to 1/sqrt(2 n) with n = 108 draws for A and 180 for B: 7 % and 5 %
        assert float(draws.std()) == pytest.approx((2 * 0.3 / 5.0 / rate) ** 0.5, rel=0.2), kind


def test_noise_in_a_that_query_key_and_value_share_is_drawn_once():
    entry = BY_NAME["GPT-NeoX"]
    model = adapted(entry.build(), ("query_key_value",), r=16)
    optimizer = sgd(model, 1.0)
    hw.repel(hw.find_heads(model), hw.SGLD(inverse_temperature=2.0, step_size=1e-4), optimizer)
    (1e-9 * model(**entry.inputs())[0].square().mean()).backward()
    optimizer.step()
    for name, gradient in gradients(model).items():
        assert float(gradient.std()) == pytest.approx((2 * 1e-4 / 2.0) ** 0.5, rel=0.15), name


def test_heads_repelled_after_the_forward_pass_are_refused():
    model = adapted(SeparateAttention())
    optimizer, loss = sgd(model), squares(model)
    handle = hw.repel(hw.find_heads(model), RULE, optimizer)
    loss.backward()
    with pytest.raises(
        hw.errors.NotFired, match=r"'default' of \S+q_proj\S+ has a gradient from a forward pass that ran without"
    ):
        optimizer.step()
    optimizer.zero_grad()
    squares(model).backward()
    optimizer.step()
    handle.check()


def test_another_adapter_that_becomes_active_is_noticed():
    model = adapted(SeparateAttention())
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q_proj", "k_proj", "v_proj"]))
    fill(model.double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hw.repel(hw.find_heads(model), RULE, optimizer)
    model.set_adapter("second")
    squares(model).backward()
    with pytest.raises(
        hw.errors.LayoutError, match=r"q_proj\.lora_A\.default\.weight is another tensor .* adapter became active"
    ):
        optimizer.step()


def test_what_is_not_trained_is_refused():
    model = adapted(SeparateAttention())
    without = [parameter for name, parameter in model.named_parameters() if "lora_B" not in name]
    with pytest.raises(hw.errors.LayoutError, match=r"query: its parameters are not held by the optimizer"):
        hw.repel(hw.find_heads(model), RULE, torch.optim.SGD(without, lr=0.1))
    model = adapted(SeparateAttention(), ("q_proj", "v_proj"))
    message = r"k_proj\.weight does not require a gradient; unfreeze it \(under LoRA: name"
    with pytest.raises(hw.errors.LayoutError, match=message):
        hw.repel(hw.find_heads(model), RULE, sgd(model))


def test_jitter_in_a_base_that_no_adapter_saves_is_refused():
    model = adapted(SeparateAttention())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hw.errors.LayoutError, match=r"call hw\.repulsion\.jitter before adding the adapter"):
        hw.repulsion.jitter(hw.find_heads(model), 1e-3)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_heads_that_are_layers_of_their_own_are_read_under_lora_and_not_repelled():
    model = adapted(ListAttention(12), ("query", "key", "value"))
    heads = hw.find_heads(model)
    (site,) = heads.sites
    layer = model.base_model.model.heads[2].key
    torch.testing.assert_close(site.slices[1].read()[2], layer(torch.eye(12, dtype=torch.float64)).T)
    with pytest.raises(
        hw.errors.LayoutError, match=r"query: each head is a layer of its own with its own LoRA adapter"
    ):
        hw.repel(heads, RULE, sgd(model))


def test_a_gradient_that_is_not_finite_stays_for_the_loop_to_notice():
    model = adapted(SeparateAttention())
    optimizer = sgd(model, 0.0)
    handle = hw.repel(hw.find_heads(model), RULE, optimizer)
    (squares(model) * float("inf")).backward()
    optimizer.step()
    assert not handle.last.finite.any()
    assert not any(gradient.isfinite().all() for gradient in gradients(model).values())
