"""`verify` accepts true layouts and rejects the five wrong readings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import headwise as hw
from cases import cases, tiers
from heads.attentions import (
    FusedAttention,
    GatedAttention,
    JointlyNormedAttention,
    KeyValueAttention,
    NormedValuesAttention,
    RotatedValuesAttention,
    SeparateAttention,
    SinglePrecisionAttention,
)
from headwise.heads.heads import Heads

X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))


@cases("key_value_heads", [4, 2, 1])
def test_separate_projections_verify_also_with_grouped_queries(key_value_heads):
    heads = hw.find_heads(SeparateAttention(key_value_heads=key_value_heads))
    assert hw.verify(heads, (X,)).sites == ("",)


@cases(
    "settings",
    [
        {},
        {"bias": False},
        {"kdim": 12, "vdim": 12},
        {"kdim": 5, "vdim": 7},
        {"add_bias_kv": True, "add_zero_attn": True},
    ],
)
def test_torch_attention_verifies_packed_and_separate(settings):
    attention = nn.MultiheadAttention(12, 3, batch_first=True, **settings)
    key = torch.randn(2, 5, attention.kdim)
    inputs = {"query": X, "key": key, "value": torch.randn(2, 5, attention.vdim)}
    assert hw.verify(hw.find_heads(attention), inputs).sites == ("",)


def test_a_model_verifies_under_another_default_device():
    heads = hw.find_heads(SeparateAttention(key_value_heads=2))
    with torch.device("meta"):
        assert hw.verify(heads, (X,)).sites == ("",)


def test_a_whole_transformer_verifies_and_is_left_as_it_was():
    model = nn.Transformer(12, 2, 1, 1, 24, batch_first=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert len(hw.verify(hw.find_heads(model), (X, X)).sites) == 3
    assert type(model.encoder.layers[0].self_attn) is nn.MultiheadAttention
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training


@cases("attention", [SeparateAttention, NormedValuesAttention])
@cases("count", [2, 8])
def test_half_and_twice_the_heads_are_rejected(count, attention):
    heads = hw.find_heads(attention(head_dim=8, num_heads=4))
    assert hw.verify(heads, (X,)).sites == ("",)
    size = 32 // count

    def misread(head_slice):
        return replace(head_slice, heads=count, head_size=size, stride=size)

    (site,) = heads.sites
    wrong = replace(
        site,
        slices=tuple(misread(head_slice) for head_slice in site.slices),
        output=misread(site.output),
        num_heads=count,
        key_value_heads=count,
        head_size=size,
    )
    with pytest.raises(hw.errors.LayoutError, match=f"with {count} heads of {size} misreads"):
        hw.verify(Heads(heads.model, (wrong,)), (X,))


@cases("projection", ["query", "key"])
def test_wrong_queries_alone_and_wrong_keys_alone_are_rejected(projection):
    heads = hw.find_heads(SeparateAttention(head_dim=4, num_heads=2, key_value_heads=2))
    (site,) = heads.sites
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    linear = site.module.q_proj if projection == "query" else site.module.k_proj
    linear.register_forward_hook(lambda _m, _i, output: output[..., order])
    with pytest.raises(hw.errors.LayoutError, match=f"changing the {projection} rows of head 0 changed the features"):
        hw.verify(heads, (X,))


def test_a_site_without_an_output_projection_is_told():
    model = SeparateAttention()
    del model.o_proj

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole, self.part = SeparateAttention(), model

        def forward(self, x):
            return self.whole(x)

    result = hw.verify(hw.find_heads(Both()), (X,))
    assert (result.sites, result.skipped) == (("whole",), ("part",))
    assert str(result).splitlines()[1] == "not verifiable without an output projection: part"


@cases("attention", [GatedAttention, JointlyNormedAttention])
def test_gates_after_attention_and_norms_over_all_heads_do_not_hide_true_heads(attention):
    heads = hw.find_heads(attention(key_value_heads=2))
    assert hw.verify(heads, (X,)).sites == ("",)


def test_values_that_are_rotated_by_their_position_are_values_of_a_head():
    assert hw.verify(hw.find_heads(RotatedValuesAttention()), (X,)).sites == ("",)


def test_code_that_takes_float32_alone_is_proved_in_float32():
    heads = hw.find_heads(SinglePrecisionAttention())
    assert hw.verify(heads, (X,)).sites == ("",)
    (site,) = heads.sites
    query, key, value = site.slices
    swapped = (replace(value, projection="query"), key, replace(query, projection="value"))
    with pytest.raises(hw.errors.LayoutError, match="misreads"):
        hw.verify(Heads(heads.model, (replace(site, slices=swapped),)), (X,))


def test_gated_queries_are_read_beside_their_gates():
    (site,) = hw.find_heads(GatedAttention(key_value_heads=2)).sites
    assert (site.layout, site.num_heads, site.key_value_heads) == ("separate gated", 4, 2)
    query = site.slices[0]
    assert (query.heads, query.head_size, query.stride, query.along) == (4, 5, 10, 40)
    gates = replace(site, slices=(replace(query, start=5), *site.slices[1:]))
    with pytest.raises(hw.errors.LayoutError, match="misreads"):
        hw.verify(Heads(site.model, (gates,)), (X,))


@tiers("key_value_heads", [2], [4, 1])
@cases("order", [("query", "key", "value"), ("query", "value", "key"), ("key", "value", "query")])
def test_fused_blocks_verify_in_the_order_their_row_names_and_in_no_other(order, key_value_heads):
    model = FusedAttention(order, key_value_heads=key_value_heads)
    for read in (("query", "key", "value"), ("query", "value", "key"), ("key", "value", "query")):
        row = hw.layouts.FusedLinear("mine", ("qkv",), ("proj",), order=read)
        if read == order:
            assert hw.verify(hw.find_heads(model, (row,)), (X,)).sites == ("",)
        else:
            # some are told by the cheap experiment of find_heads
            with pytest.raises(hw.errors.LayoutError, match="layout 'mine' with 4 heads of 5 misreads FusedAttention"):
                hw.verify(hw.find_heads(model, (row,)), (X,))


@cases("interleaved", [True, False])
def test_blocks_and_alternating_heads_are_told_apart(interleaved):
    model = FusedAttention(interleaved=interleaved)
    row = hw.layouts.FusedLinear("right", ("qkv",), ("proj",), interleaved=interleaved)
    assert hw.verify(hw.find_heads(model, (row,)), (X,)).sites == ("",)
    row = hw.layouts.FusedLinear("wrong", ("qkv",), ("proj",), interleaved=not interleaved)
    with pytest.raises(hw.errors.LayoutError, match="layout 'wrong'"):
        hw.verify(hw.find_heads(model, (row,)), (X,))


def test_keys_and_values_fused_beside_the_queries_verify():
    heads = hw.find_heads(KeyValueAttention())
    assert heads.sites[0].layout == "fused key-value"
    assert heads.sites[0].output_projection.module is heads.model.to_out[0]
    assert hw.verify(heads, (X, X.flip(0)[:, :5])).sites == ("",)


def test_one_query_a_sequence_is_proved_by_the_number_of_its_tokens():
    pool = nn.MultiheadAttention(12, 3, batch_first=True)
    heads = hw.find_heads(pool)
    inputs = {"query": X[:, :1], "key": X, "value": X}
    assert hw.verify(heads, inputs).sites == ("",)
    query, key, value = heads.sites[0].slices
    swapped = (replace(key, projection="query"), replace(query, projection="key"), value)
    with pytest.raises(hw.errors.LayoutError, match="misreads"):
        hw.verify(Heads(pool, (replace(heads.sites[0], slices=swapped),)), inputs)


def test_a_swapped_aggregator_stands_where_the_output_projection_stood_and_its_heads_verify():
    model = SeparateAttention()
    model.dense = nn.Linear(20, 20)
    hw.aggregate(hw.find_heads(model), hw.routing.SimpleRouting(capsules=4))
    (site,) = hw.find_heads(model).sites
    assert site.output_projection.attribute == "o_proj"
    assert site.output is None
    assert hw.verify(hw.find_heads(model), (X,)).sites == ("",)


def test_gated_queries_are_still_gated_once_an_aggregator_stands_for_their_output_projection():
    model = GatedAttention(key_value_heads=2)
    hw.aggregate(hw.find_heads(model), hw.routing.SimpleRouting(capsules=4))
    (site,) = hw.find_heads(model).sites
    assert (site.layout, site.num_heads, site.output) == ("separate gated", 4, None)
    assert hw.verify(hw.find_heads(model), (X,)).sites == ("",)


def test_heads_found_before_aggregation_are_proved_still():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    heads = hw.find_heads(model)
    hw.aggregate(heads.layer(0), hw.routing.EMRouting(capsules=4))
    assert len(hw.verify(heads, (torch.randn(2, 5, 8),)).sites) == 2
