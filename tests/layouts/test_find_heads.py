"""`find_heads` reads the heads of torch's and users' attention modules, or says why it cannot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import headwise as hw
from headwise.heads import Slab, check_slab
from layouts.attentions import SeparateAttention


def test_every_attention_of_a_torch_transformer_is_found_with_its_kind_and_layer():
    heads = hw.find_heads(nn.Transformer(8, 2, 2, 3, 16, batch_first=True))
    found = [(site.kind, site.stack, site.layer) for site in heads]
    assert found[:2] == [("self", "encoder.layers", 0), ("self", "encoder.layers", 1)]
    assert sorted(found[2:]) == sorted(
        (kind, "decoder.layers", layer) for kind in ("decoder", "cross") for layer in range(3)
    )
    assert all(site.num_heads == 2 and site.head_size == 4 for site in heads)


def test_packed_and_separate_weights_give_the_rows_of_each_projection():
    packed = nn.MultiheadAttention(6, 3)
    views = [slab.view(slab.parameter) for slab in hw.find_heads(packed).slabs()]
    weight = packed.in_proj_weight
    for index, view in enumerate(views):
        for head in range(3):
            start = 6 * index + 2 * head
            assert torch.equal(view[head], weight[start : start + 2])
    separate = nn.MultiheadAttention(6, 3, kdim=5, vdim=4)
    shapes = [tuple(slab.view(slab.parameter).shape) for slab in hw.find_heads(separate).slabs()]
    assert shapes == [(3, 2, 6), (3, 2, 5), (3, 2, 4)]


def test_grouped_queries_and_narrow_heads_are_counted_from_the_weights():
    site = hw.find_heads(SeparateAttention(key_value_heads=2)).sites[0]
    assert (site.num_heads, site.key_value_heads, site.head_size) == (4, 2, 5)
    assert [slab.heads for slab in site.slabs] == [4, 2, 2]
    assert site.width == 12


@settings(max_examples=30, deadline=None)
@given(
    heads=st.integers(1, 4),
    size=st.integers(1, 3),
    gap=st.integers(0, 2),
    start=st.integers(0, 2),
    axis=st.sampled_from([0, 1]),
    transposed=st.booleans(),
)
def test_a_view_reads_and_writes_exactly_its_rows(heads, size, gap, start, axis, transposed):
    owner = nn.Module()
    rows = start + heads * (size + gap)
    shape = (rows, 3) if axis == 0 else (3, rows)
    owner.weight = nn.Parameter(torch.arange(float(rows * 3)).reshape(shape))
    slab = Slab("query", "weight", owner, "weight", heads, size, start=start, stride=size + gap, axis=axis)
    check_slab(slab)
    tensor = torch.arange(float(rows * 3)).reshape(shape)
    if transposed:
        tensor = tensor.t().contiguous().t()
    before = tensor.clone()
    view = slab.view(tensor)
    assert view.data_ptr() >= tensor.data_ptr()
    for head in range(heads):
        own = slice(start + head * (size + gap), start + head * (size + gap) + size)
        assert torch.equal(view[head], before[own] if axis == 0 else before[:, own])
    view[-1] = -1.0
    own = slice(start + (heads - 1) * (size + gap), start + (heads - 1) * (size + gap) + size)
    expected = before.clone()
    expected[own if axis == 0 else (slice(None), own)] = -1.0
    assert torch.equal(tensor, expected)


def test_selectors_narrow_and_refuse_to_be_empty():
    heads = hw.find_heads(nn.Transformer(8, 2, 2, 2, 16, batch_first=True))
    assert [site.name for site in heads.kind("self").layer(-1)] == ["encoder.layers.1.self_attn"]
    assert len(heads.where("decoder.*")) == 4
    assert heads.kind("cross").layers(0, 1).projection("value", "query").projections == ("query", "value")
    with pytest.raises(hw.LayoutError, match=r"several places.*select one first with \.kind"):
        heads.layer(0)
    with pytest.raises(hw.LayoutError, match=r"no attention in layer 7.*layers \[0, 1\]"):
        heads.kind("self").layer(7)
    with pytest.raises(hw.LayoutError, match="named like 'head'"):
        heads.where("head")
    with pytest.raises(hw.SettingError, match="projection is 'output'"):
        heads.projection("output")


def test_heads_print_as_a_table_that_counts_them():
    text = str(hw.find_heads(nn.Transformer(8, 2, 1, 1, 16, batch_first=True)))
    assert "decoder.layers.0.multihead_attn" in text
    assert text.splitlines()[-1] == "6 heads in 3 sites; projections: query, key, value"


def test_a_model_without_a_known_layout_is_refused_with_its_candidates_and_a_row_to_add():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nh, self.w1, self.w2, self.w3, self.w4 = 2, *(nn.Linear(4, 4) for _ in range(4))

    model = nn.Sequential(nn.Linear(4, 4))
    model.odd_attention = Odd()
    with pytest.raises(hw.LayoutError, match=r"(?s)odd_attention: Odd with w1\.weight \[4, 4\].*find_heads\(model"):
        hw.find_heads(model)
    row = hw.SeparateLinears(name="odd", query=("w1",), key=("w2",), value=("w3",), output=("w4",), num_heads=("nh",))
    assert hw.find_heads(model, (row, *hw.LAYOUTS)).sites[0].layout == "odd"


def test_rows_that_do_not_divide_and_heads_that_do_not_group_are_refused():
    wrong = SeparateAttention()
    wrong.head_dim = 3
    with pytest.raises(hw.LayoutError, match="20 rows do not divide into heads of 3 rows"):
        hw.find_heads(wrong)
    ungrouped = SeparateAttention()
    ungrouped.k_proj = nn.Linear(12, 15)
    with pytest.raises(hw.LayoutError, match="4 query, 3 key and 4 value heads"):
        hw.find_heads(ungrouped)
    unknown = SeparateAttention()
    del unknown.head_dim, unknown.num_heads
    with pytest.raises(hw.LayoutError, match="name its number of heads in a layout row"):
        hw.find_heads(unknown)


def test_a_parametrised_weight_is_refused_by_name():
    model = SeparateAttention()
    nn.utils.parametrizations.spectral_norm(model.q_proj)
    with pytest.raises(hw.LayoutError, match=r"q_proj\.weight of .*Linear is not a plain parameter"):
        hw.find_heads(model)


def test_a_shared_module_is_one_site():
    attention = SeparateAttention()
    assert len(hw.find_heads(nn.ModuleList([attention, attention]))) == 1
