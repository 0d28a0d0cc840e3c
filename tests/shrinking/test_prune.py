"""Heads are removed from every layout of weights, once where layers share them, or the model stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw
from cases import cases
from heads.attentions import FusedAttention, GatedAttention, SeparateAttention
from heads.families import FAMILIES
from heads.own import LensAttention, ParameterAttention, unpack
from headwise.shrinking.prune import choose_heads
from shrinking.cutting import ablated, apart, compute, lift, named
from shrinking.planted import build, tokens


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


@cases(
    "module",
    [
        SeparateAttention(),
        SeparateAttention(key_value_heads=2),
        FusedAttention(),
        FusedAttention(order=("value", "query", "key")),
        FusedAttention(interleaved=True),
        GatedAttention(),
    ],
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


@cases("axes", ["h d e", "d h e", "d (h e)", "(h e) d", "e h d"])
@cases("output_axes", ["", "h e d", "(h e) d"])
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


@cases("settings", [{}, {"kdim": 6, "vdim": 10}, {"add_bias_kv": True}, {"bias": False}])
@cases("own", [nn.MultiheadAttention, hw.nn.MultiheadAttention])
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


def worth_of(heads: hw.Heads, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {site.name: torch.rand(site.num_heads, generator=generator) for site in heads}


@cases(("keep", "left"), [(0.5, 2), (0.7, 3), (0.2, 1), (0.01, 1)])
def test_the_heads_that_matter_least_go(keep: float, left: int):
    family = named(FAMILIES, "BERT")[0]
    model = family.build()
    heads = hw.find_heads(model)
    worth = worth_of(heads)
    gone = {name: tuple(sorted(numbers.argsort()[: 4 - left].tolist())) for name, numbers in worth.items()}
    expected = ablated(heads, gone, family.inputs())
    pruning = hw.prune(heads, keep=keep, importance=worth)
    assert pruning.removed == gone
    assert list(pruning.heads.values()) == [left] * 2
    assert apart(expected, compute(model, family.inputs())) < 1e-5


def test_importance_as_it_was_measured_chooses_and_transformers_loads_the_result():
    model = build("Llama", 8)
    heads = hw.find_heads(model)

    def losses() -> torch.Tensor:
        logits = model(tokens(0)).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.mT, tokens(0)[:, 1:], reduction="none").mean(1)

    worth = hw.importance(heads, losses, method="first_order")
    pruning = hw.prune(heads, keep=0.25, importance=worth)
    assert pruning.stock is None
    for name, gone in pruning.removed.items():
        left = [head for head in range(8) if head not in gone]
        assert len(left) == 2
        assert worth.drops[name][left].min() > worth.drops[name][list(gone)].max()


def test_groups_go_as_a_whole_by_the_sum_of_their_heads():
    heads = hw.find_heads(build("Llama", 4))
    worth = {site.name: torch.tensor([9.0, 0, 4, 4, 1, 1, 5, 5]) for site in heads}
    assert choose_heads(heads, 0.5, worth)["model.layers.0.self_attn"] == [2, 3, 4, 5]
    # the heads of the only group go one by one
    heads = hw.find_heads(build("Llama", 1))
    assert choose_heads(heads, 0.5, {site.name: torch.arange(8) for site in heads})["model.layers.1.self_attn"] == [
        *range(4)
    ]


def test_layers_that_share_a_table_of_positions_lose_the_same_heads():
    family = named(FAMILIES, "T5")[0]
    model = family.build()
    heads = hw.find_heads(model)
    worth = {site.name: torch.tensor([3.0, 1, 2, 4]) for site in heads}
    worth["encoder.block.1.layer.0.SelfAttention"] = torch.tensor([0.0, 5, 5, 0])
    removed = hw.prune(heads, keep=0.5, importance=worth).removed
    assert removed["encoder.block.0.layer.0.SelfAttention"] == (0, 3)
    assert removed["encoder.block.1.layer.0.SelfAttention"] == (0, 3)
    assert removed["decoder.block.1.layer.0.SelfAttention"] == (1, 2)
