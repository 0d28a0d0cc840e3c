"""Heads are removed from every layout of weights, once where layers share them, or the model stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw
from heads.attentions import FusedAttention, GatedAttention, LinearAttention, SeparateAttention
from heads.families import FAMILIES
from heads.own import LensAttention, ListAttention, ParameterAttention, unpack
from headwise.gating import SigmoidGate
from shrinking.cutting import ablated, apart, compute, lift, named


def prune_alone(module: nn.Module, gone: list[int], *rows: hw.layouts.Layout, width: int = 12) -> float:
    """How far a pruned attention is from one whose columns of W_O are zero, in float64."""
    torch.manual_seed(3)
    x = torch.randn(2, 6, width, dtype=torch.float64)
    model = module.double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    heads = hw.find_heads(model, (*rows, *hw.layouts.LAYOUTS))
    zeroed = copy.deepcopy(model)
    found = hw.find_heads(zeroed, (*rows, *hw.layouts.LAYOUTS)).sites[0].output
    assert found is not None
    with torch.no_grad():
        found.of(found.parameter)[gone] = 0.0
    hw.prune(heads, {0: gone}, inputs=(x,))
    return apart([zeroed(x)], [model(x)])


@pytest.mark.parametrize(
    "module",
    [
        SeparateAttention(),
        SeparateAttention(key_value_heads=2),
        FusedAttention(),
        FusedAttention(order=("value", "query", "key")),
        FusedAttention(interleaved=True),
        GatedAttention(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_heads_of_own_modules_are_removed(module: nn.Module):
    interleaved = getattr(module, "interleaved", False)
    row = hw.layouts.FusedLinear(
        "mine",
        ("qkv",),
        ("proj",),
        order=getattr(module, "order", ("query", "key", "value")),
        interleaved=interleaved,
    )
    rows = (row,) if isinstance(module, FusedAttention) else ()
    assert prune_alone(module, [2, 3], *rows) <= 1e-12


@pytest.mark.parametrize("axes", ["h d e", "d h e", "d (h e)", "(h e) d", "e h d"])
@pytest.mark.parametrize("output_axes", ["", "h e d", "(h e) d"])
def test_heads_in_parameters_of_any_axes_are_removed(axes: str, output_axes: str):
    class Counted(ParameterAttention):
        """Reads its number of heads at each call, where others have it written into their code."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for sizes in (self.sizes, *self.counts.values()):
                sizes["h"] = self.num_heads
            q, k, v = (torch.einsum("bld,hed->bhle", x, self.weights()[kind]) for kind in ("query", "key", "value"))
            heads = (q @ k.mT).softmax(-1) @ v
            if not self.output_axes:
                return self.proj(heads.transpose(1, 2).flatten(2))
            return torch.einsum("bhqe,hed->bqd", heads, unpack(self.W_O, self.output_axes, self.sizes))

    row = hw.layouts.SeparateParameters("mine", axes=axes, output_axes=output_axes)
    assert prune_alone(Counted(axes, output_axes), [0, 2], row, width=10) <= 1e-12


def test_the_shapes_of_transformer_lens_are_cut_with_their_biases():
    module = LensAttention()
    row = hw.layouts.SeparateParameters("lens", axes="h d e", output_axes="h e d")
    assert prune_alone(module, [1], row, width=10) <= 1e-12
    assert module.W_Q.shape == (3, 10, 3)
    assert module.b_V.shape == (3, 3)


@pytest.mark.parametrize("settings", [{}, {"kdim": 6, "vdim": 10}, {"add_bias_kv": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("own", [nn.MultiheadAttention, hw.nn.MultiheadAttention])
def test_heads_of_torchs_attention_are_removed_in_every_form(own: type, settings: dict):
    torch.manual_seed(2)
    attention = own(12, 4, batch_first=True, **settings).double().eval()
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    widths = (12, settings.get("kdim", 12), settings.get("vdim", 12))
    x = [torch.randn(2, 5, width, dtype=torch.float64) for width in widths]
    heads = hw.find_heads(attention)
    with hw.ablate(heads, 1, 2):
        expected = attention(*x, need_weights=False)[0]
    hw.prune(heads, {0: [1, 2]})
    assert apart([expected], [attention(*x, need_weights=False)[0]]) <= 1e-12
    again = hw.find_heads(attention)
    assert (again.sites[0].num_heads, attention.embed_dim, attention.head_dim) == (2, 12, 3)
    # the sizes are right for a second time
    with hw.ablate(again, 0):
        expected = attention(*x, need_weights=False)[0]
    hw.prune(again, {0: [0]})
    assert apart([expected], [attention(*x, need_weights=False)[0]]) <= 1e-12


class Tied(nn.Module):
    """Two attentions with one query projection, the second with one of its own for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SeparateAttention(), SeparateAttention()])
        first, second = self.layers
        assert isinstance(first, SeparateAttention)
        assert isinstance(second, SeparateAttention)
        second.q_proj.weight = first.q_proj.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_tied_weight_is_cut_once_and_stays_tied():
    torch.manual_seed(0)
    model: Any = Tied().double().eval()
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    heads = hw.find_heads(model)
    with hw.ablate(heads, 0, 3):
        expected = model(x)
    tied = model.layers[0].q_proj.weight
    tied.grad = torch.arange(tied.numel(), dtype=torch.float64).view_as(tied)
    gradient = tied.grad.clone()
    hw.prune(heads, {0: [0, 3], 1: [3, 0, 3]}, inputs=(x,))
    assert apart([expected], [model(x)]) <= 1e-12
    assert model.layers[1].q_proj.weight is model.layers[0].q_proj.weight is tied
    assert model.layers[1].q_proj.out_features == len(tied) == 10
    torch.testing.assert_close(tied.grad, gradient[5:15], rtol=0, atol=0)


def test_a_tied_weight_of_which_two_layers_keep_other_heads_is_refused():
    model, x = Tied(), torch.randn(2, 6, 12)
    expected = model(x)
    heads = hw.find_heads(model)
    for removed in ({0: [0, 3]}, {0: [0, 3], 1: [0, 2]}, {1: [1]}):
        with pytest.raises(hw.errors.LayoutError, match=r"is shared by .* would keep different heads; remove the same"):
            hw.prune(heads, removed, inputs=(x,))
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_code_that_counts_on_its_heads_is_told_and_the_model_put_back():
    class Fixed(SeparateAttention):
        """Reshapes to the number of heads it was written for."""

        def join(self, heads: torch.Tensor) -> torch.Tensor:
            return heads.transpose(1, 2).reshape(2, 6, 20)

    class Scaled(SeparateAttention):
        """Divides by the number of heads."""

        def forward(self, x: torch.Tensor, key_padding_mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x, key_padding_mask) / self.num_heads

    x = torch.randn(2, 6, 12)
    for module, message in ((Fixed(), r"cannot run .*counts on the heads"), (Scaled(), "something holds heads that")):
        heads, expected = hw.find_heads(module), module(x)
        with pytest.raises(hw.errors.SettingError, match=r"only a call shows .* pass inputs=\.\.\."):
            hw.prune(heads, {0: [1]})
        weight, data = module.q_proj.weight, module.q_proj.weight.clone()
        with pytest.raises(hw.errors.LayoutError, match=message):
            hw.prune(heads, {0: [1]}, inputs=(x,))
        assert module.q_proj.weight is weight
        assert torch.equal(weight, data)
        assert all(part.training for part in module.modules())
        assert (module.num_heads, module.q_proj.out_features, module.o_proj.in_features) == (4, 20, 20)
        torch.testing.assert_close(module(x), expected, rtol=0, atol=0)


def test_a_parameter_that_may_hold_heads_is_told_unless_the_result_is_proved():
    class Tempered(hw.nn.MultiheadAttention):
        """Another length of queries for each head, which only a call shows."""

        def __init__(self) -> None:
            super().__init__(12, 4, batch_first=True)
            self.temperature = nn.Parameter(torch.rand(4))

        def _project(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            q, k, v = super()._project(query, key, value)
            heads = q.unflatten(-1, (self.num_heads, -1)) * self.temperature[:, None]
            return heads.flatten(-2), k, v

    Tempered.__module__ = "headwise.tests"
    model, x = Tempered(), torch.randn(2, 5, 12)
    with pytest.raises(
        hw.errors.LayoutError, match=r"temperature of shape \(4,\) may hold something of each of 4 heads"
    ):
        hw.prune(hw.find_heads(model), {0: [1]})
    inputs = {"query": x, "key": x, "value": x, "need_weights": False}
    with hw.ablate(hw.find_heads(model), 1):
        expected = model(**inputs)[0]
    hw.prune(hw.find_heads(model), {0: [1]}, inputs=inputs)
    assert apart([expected], [model(**inputs)[0]]) <= 1e-5
    assert model.temperature.shape == (3,)


def test_sites_from_before_are_told_to_be_found_again():
    model, x = SeparateAttention(), torch.randn(2, 6, 12)
    heads = hw.find_heads(model)
    hw.prune(heads, {0: [1]}, inputs=(x,))
    for use in (
        lambda: hw.ablate(heads, 0),
        heads.sites[0].slices[0].read,
        lambda: hw.prune(heads, {0: [0]}),
    ):
        with pytest.raises(hw.errors.LayoutError, match=r"has 15 rows, and had 20 .*call find_heads again"):
            use()
    assert hw.find_heads(model).sites[0].num_heads == 3


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        (0.5, r"removed is 0\.5; expected the heads to remove by layer or name"),
        ({}, "names no head"),
        ({0: []}, "names no head"),
        ({0: [4]}, "head of encoder.layer.0.attention.self is 4; expected an integer of .* at most 3"),
        ({0: [1.0]}, r"is 1\.0; expected an integer"),
        ({0: 1}, "are 1; expected a list of integers"),
        ({0: "1"}, "are '1'; expected a list of integers"),
        ({"encoder": [1]}, "names 'encoder'; expected a layer, or one of 2 names: 'encoder.layer.0"),
        ({0: [1], "encoder.layer.0.attention.self": [2]}, "twice"),
        ({1: [0, 1, 2, 3]}, "would lose all its 4 heads"),
    ],
)
def test_what_is_no_choice_of_heads_is_refused(removed: Any, message: str):
    heads = hw.find_heads(named(FAMILIES, "BERT")[0].build())
    with pytest.raises(hw.errors.SettingError, match=message):
        hw.prune(heads, removed)


def test_a_layer_that_is_not_there_an_optimizer_that_is_none_and_a_model_are_refused():
    model: Any = named(FAMILIES, "BERT")[0].build()
    with pytest.raises(hw.errors.LayoutError, match="no attention in layer 5"):
        hw.prune(hw.find_heads(model), {5: [0]})
    with pytest.raises(hw.errors.SettingError, match="optimizer is a list; expected the torch optimizer"):
        hw.prune(hw.find_heads(model), {0: [0]}, optimizer=[])
    with pytest.raises(hw.errors.SettingError, match="expected heads of a model"):
        hw.prune(model, {0: [0]})


def test_inputs_that_are_no_arguments_are_refused_as_by_verify():
    heads = hw.find_heads(SeparateAttention())
    for given in (torch.randn(1, 2, 6, 12), "x"):
        with pytest.raises(
            hw.errors.SettingError, match=r"^inputs is a (Tensor|str); expected what .*, \(x,\)"
        ) as pruned:
            hw.prune(heads, {0: [1]}, inputs=given)
        with pytest.raises(hw.errors.SettingError) as verified:
            hw.verify(heads, given)
        assert str(pruned.value) == str(verified.value)
    assert hw.find_heads(heads.model).sites[0].num_heads == 4


def test_heads_of_a_group_stay_together_or_go_in_equal_numbers():
    model: Any = named(FAMILIES, "Llama")[0].build()
    heads = hw.find_heads(model)
    with pytest.raises(
        hw.errors.LayoutError, match=r"heads 0 would leave 1 of group 0, 2 of group 1; remove whole groups"
    ):
        hw.prune(heads, {0: [0]})
    hw.prune(heads, {0: [0, 3], 1: [0, 1]})
    assert [(s.num_heads, s.key_value_heads) for s in hw.find_heads(model)] == [(2, 2), (2, 1)]
    assert [layer.self_attn.num_key_value_groups for layer in model.model.layers] == [1, 2]


def test_what_cannot_be_cut_is_refused_with_the_reason():
    import peft

    model = peft.get_peft_model(
        named(FAMILIES, "BERT")[0].build(), peft.LoraConfig(target_modules=["query", "value"], r=2)
    )
    with pytest.raises(hw.errors.LayoutError, match="has LoRA adapters; merge them"):
        hw.prune(hw.find_heads(model), {0: [1]})
    model: Any = named(FAMILIES, "BERT")[0].build()
    hw.aggregate(hw.find_heads(model).layer(0), hw.routing.SimpleRouting())
    with pytest.raises(hw.errors.LayoutError, match="SimpleAggregator as its output, built for all heads; remove it"):
        hw.prune(hw.find_heads(model), {0: [1]})
    hw.prune(hw.find_heads(model), {1: [1]})
    with pytest.raises(hw.errors.LayoutError, match="keeps its heads in a list of modules"):
        hw.prune(hw.find_heads(ListAttention()), {0: [1]}, inputs=(torch.randn(2, 5, 10),))
    without = LinearAttention()
    del without.o_proj
    with pytest.raises(hw.errors.LayoutError, match="no output projection that was found"):
        hw.prune(hw.find_heads(without), {0: [1]}, inputs=(torch.randn(2, 6, 12),))


@pytest.mark.parametrize(
    ("attach", "name"),
    [(lambda heads: hw.gate_heads(heads, SigmoidGate()), "head_gates"), (hw.mix_heads, "head_mixer")],
)
def test_gates_and_mixers_of_all_heads_are_told_to_be_removed_first(attach, name: str):
    family = named(FAMILIES, "BERT")[0]
    model: Any = family.build()
    handle = attach(hw.find_heads(model))
    for inputs in (None, family.inputs()):
        with pytest.raises(hw.errors.LayoutError, match=f"has {name}, made for all heads; remove them"):
            hw.prune(hw.find_heads(model), {0: [1]}, inputs=inputs)
    handle.remove()
    hw.prune(hw.find_heads(model), {0: [1]})


def test_norms_over_all_heads_are_refused():
    from transformers import Olmo2Config, Olmo2Model

    config = Olmo2Config(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, eos_token_id=2)
    with pytest.raises(hw.errors.LayoutError, match=r"q_norm\.weight normalizes all heads together"):
        hw.prune(hw.find_heads(Olmo2Model(config)), {0: [1]})


def test_a_shared_layer_is_cut_once_and_a_compiled_one_as_it_is():
    family = named(FAMILIES, "ALBERT")[0]
    model: Any = family.build()
    inputs = family.inputs()
    inputs = lift(model, inputs)
    attention = model.encoder.albert_layer_groups[0].albert_layers[0]
    heads = hw.find_heads(model)
    expected = ablated(heads, {heads.sites[0].name: (3,)}, inputs)
    attention.attention = torch.compile(attention.attention, backend="eager")
    hw.prune(hw.find_heads(model), {0: [3]})
    assert apart(expected, compute(model, inputs)) <= 1e-12
