"""What is free in the heads of an attention is found out by experiment, for every way of telling positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw
from heads.families import FAMILIES
from headwise.errors import HeadwiseError
from headwise.shrinking.alignment import KeyFreedom
from headwise.shrinking.merge_heads import Freedom, find_freedoms
from shrinking.cutting import named
from shrinking.planted import SIZE, build, tokens

ANY = KeyFreedom(0)
EXPECTED = {
    "BERT": ANY,
    "T5": ANY,
    "Llama": KeyFreedom(8),
    "Mistral": KeyFreedom(6),
    "Phi-3": KeyFreedom(8),
    # queries and keys are normalized, with gains of 1
    "Qwen3": KeyFreedom(12, kind="rigid"),
    "GPT-NeoX": KeyFreedom(2),
    "GPT-J": KeyFreedom(4, interleaved=True),
    "GPT-OSS": KeyFreedom(8),
    # of the 12 features of a key a third turns
    "MiMo-V2-Flash": KeyFreedom(2),
}


def find(model: nn.Module, batch: Any) -> Freedom:
    heads = hw.find_heads(model)
    return find_freedoms([heads.sites[-1]], batch)[heads.sites[-1]]


@pytest.mark.parametrize("family", named(FAMILIES, *EXPECTED), ids=str)
def test_the_positions_of_a_family_are_recognized(family):
    model = family.build()
    found = find(model, family.inputs())
    assert found == Freedom(EXPECTED[family.name], ANY)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_gains_that_differ_leave_a_sign():
    gained = build("Qwen3")
    assert find(gained, (tokens(),)).key == KeyFreedom(SIZE, kind="signs")
    assert (
        str(find(gained, (tokens(),))) == "keys: a sign for each of 4 half-split pairs; values: any invertible matrix"
    )


def test_a_norm_that_subtracts_the_mean_leaves_nothing():
    model = build("Qwen3")
    for layer in model.model.layers:
        for name in ("q_norm", "k_norm"):
            setattr(layer.self_attn, name, nn.LayerNorm(SIZE))
    assert find(model, (tokens(),)) == Freedom(None, ANY)
    assert str(find(model, (tokens(),))).startswith("keys: nothing")
    # they are averaged as they are
    assert hw.merge(hw.find_heads(model), 1, batches=[tokens()]).free["model.layers.1.self_attn"].startswith("keys: no")


def test_values_with_a_norm_may_be_rotated():
    model = build("Llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(
            lambda _module, _inputs, output: nn.functional.rms_norm(output.unflatten(-1, (-1, SIZE)), (SIZE,)).flatten(
                -2
            )
        )
    assert find(model, (tokens(),)) == Freedom(KeyFreedom(SIZE), KeyFreedom(0, kind="rigid"))


def test_an_experiment_leaves_weights_gradients_and_modes_as_they_were():
    model = build("Llama").train()
    model(tokens(), labels=tokens()).loss.backward()
    weight = model.model.layers[1].self_attn.k_proj.weight
    data, gradient = weight.data.clone(), weight.grad.clone()
    buffer = model.model.rotary_emb.inv_freq
    find(model, (tokens(),))
    assert torch.equal(weight.data, data)
    assert torch.equal(weight.grad, gradient)
    assert model.model.rotary_emb.inv_freq is buffer
    assert all(module.training for module in model.modules())


def test_outputs_that_are_not_finite_are_told():
    model = build("Llama")
    nn.init.constant_(model.model.layers[1].self_attn.v_proj.weight, float("inf"))
    with pytest.raises(HeadwiseError, match=r"neither in float64 nor in float32 \(it computed NaN or infinity\)"):
        find(model, (tokens(),))
