"""Repulsion under LoRA in the loops people have: compiled, with noise, and attached at a wrong time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from heads.attentions import SeparateAttention
from heads.wrappers import LoraLinear, wrap
from repulsion.lora_by_hand import expected_gradients
from repulsion.test_repulsion_lora import RULE, X, adapted, assert_same, fill, gradients, squares

peft = pytest.importorskip("peft")


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=lr)


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


def test_an_optimizer_that_leaves_no_trace_of_what_it_writes_gets_the_coefficients_of_now():
    model = adapted(SeparateAttention())
    heads = hw.find_heads(model)
    optimizer = Quiet([p for p in model.parameters() if p.requires_grad])
    hw.repel(heads, RULE, optimizer)
    squares(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = expected_gradients(model, heads, squares, RULE)
    squares(model).backward()
    optimizer.step()
    assert_same(gradients(model), expected)


def test_weights_loaded_between_two_steps_are_seen():
    model = adapted(SeparateAttention())
    heads, optimizer = hw.find_heads(model), sgd(model, 0.0)
    hw.repel(heads, RULE, optimizer)
    squares(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    other = {name: 1.5 * tensor for name, tensor in model.state_dict().items()}
    model.load_state_dict(other)
    expected = expected_gradients(model, heads, squares, RULE)
    squares(model).backward()
    optimizer.step()
    assert_same(gradients(model), expected)


@pytest.mark.parametrize("joint", [False, True])
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
    from heads.families import BY_NAME

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


def test_an_optimizer_without_b_or_with_the_base_alone_is_refused():
    model = adapted(SeparateAttention())
    heads = hw.find_heads(model)
    without = [parameter for name, parameter in model.named_parameters() if "lora_B" not in name]
    with pytest.raises(hw.errors.LayoutError, match=r"query: its parameters are not held by the optimizer"):
        hw.repel(heads, RULE, torch.optim.SGD(without, lr=0.1))


def test_only_some_projections_adapted_says_what_to_select():
    model = adapted(SeparateAttention(), ("q_proj", "v_proj"))
    heads = hw.find_heads(model)
    with pytest.raises(
        hw.errors.LayoutError, match=r"k_proj\.weight does not require a gradient; unfreeze it \(under LoRA: name"
    ):
        hw.repel(heads, RULE, sgd(model))
    assert len(hw.repel(heads.projection("query", "value"), RULE, sgd(model)).groups) == 2


def test_jitter_in_a_base_that_no_adapter_saves_is_refused():
    model = adapted(SeparateAttention())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hw.errors.LayoutError, match=r"call hw\.repulsion\.jitter before adding the adapter"):
        hw.repulsion.jitter(hw.find_heads(model), 1e-3)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class ListOfHeads(nn.Module):
    """Heads as layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([OneHead() for _ in range(4)])
        self.proj = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class OneHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(12, 3, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


def test_heads_that_are_layers_of_their_own_are_read_under_lora_and_not_repelled():
    model = adapted(ListOfHeads(), ("query", "key", "value"))
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


def test_layers_like_peft_s_of_one_s_own_are_repelled_in_a_loop():
    model = wrap(SeparateAttention().double(), "q_proj", "v_proj", wrapper=LoraLinear).double()
    optimizer = sgd(model)
    handle = hw.repel(hw.find_heads(model).projection("query", "value"), RULE, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        (model(X) - 1.0).square().mean().backward()
        optimizer.step()
    handle.check()
    assert "force" not in str(handle.last)
    assert bool((handle.last.force_ratio > 0).all())
