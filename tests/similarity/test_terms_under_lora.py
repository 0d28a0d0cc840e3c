"""Penalties on parameters under LoRA read the effective weights W + s B A, and their gradients reach A and B."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from heads.attentions import SeparateAttention
from repulsion.lora_by_hand import base_weight, lora_layers, product_of

peft = pytest.importorskip("peft")

X = torch.randn(3, 6, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def adapted() -> nn.Module:
    torch.manual_seed(2)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    return peft.get_peft_model(SeparateAttention(), config).double()


def penalize(model: nn.Module, heads: hw.Heads, term) -> Tensor:
    penalty = hw.Disagreement(heads, term)
    model(X)
    return penalty()


@pytest.mark.parametrize(
    "term",
    [
        hw.similarity.SpanOverlap(),
        hw.similarity.SpanOverlap("query"),
        hw.similarity.SpanOverlap("output"),
        hw.similarity.MapCosine(),
        hw.similarity.CKA(of="contributions"),
    ],
    ids=str,
)
def test_a_penalty_on_parameters_is_that_of_the_effective_weights(term):
    model = adapted()
    heads = hw.find_heads(model)
    found = penalize(model, heads, term)
    found.backward()

    plain = SeparateAttention().double()
    weights: dict[str, Tensor] = {}
    for name, layer in lora_layers(model).items():
        weights[f"{name.rpartition('.')[2]}.weight"] = base_weight(layer) + product_of(layer)
    for name, parameter in model.named_parameters():
        place = name.replace("base_layer.", "").removeprefix("base_model.model.")
        if "lora_" not in name and place not in weights:
            weights[place] = parameter.detach()
    plain.load_state_dict({name: weight.detach() for name, weight in weights.items()})
    expected = penalize(plain, hw.find_heads(plain), term)
    torch.testing.assert_close(found, expected)
    expected.backward()
    assert float(found.detach()) > 0.005

    for name, layer in lora_layers(model).items():
        force = plain.get_submodule(name.rpartition(".")[2]).weight.grad
        factors = {key: getattr(layer, key)["default"].weight for key in ("lora_A", "lora_B")}
        if force is None:
            assert all(factor.grad is None for factor in factors.values())
            continue
        exact = torch.autograd.grad(product_of(layer), list(factors.values()), force)
        for factor, gradient in zip(factors.values(), exact, strict=True):
            torch.testing.assert_close(factor.grad, gradient)


def test_a_penalty_on_parameters_of_which_none_is_trained_is_refused():
    config = peft.LoraConfig(r=3, target_modules=["q_proj"])
    model = peft.get_peft_model(SeparateAttention(), config)
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.SpanOverlap("value"))
    with pytest.raises(hw.errors.NotFired, match=r"no parameter that SpanOverlap.*target_modules"):
        penalty()
    with torch.no_grad():
        assert penalty() > 0
