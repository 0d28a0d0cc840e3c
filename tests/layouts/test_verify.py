"""`verify` accepts true layouts and rejects the five wrong readings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.heads import Heads
from layouts.attentions import SeparateAttention, ShuffledAttention, StridedAttention, SwappedAttention

X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
def test_separate_projections_verify_also_with_grouped_queries(key_value_heads):
    heads = hw.find_heads(SeparateAttention(key_value_heads=key_value_heads))
    assert hw.verify(heads, (X,)).sites == ("",)


@pytest.mark.parametrize(
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


def test_a_whole_transformer_verifies_and_is_left_as_it_was():
    model = nn.Transformer(12, 2, 1, 1, 24, batch_first=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert len(hw.verify(hw.find_heads(model), (X, X)).sites) == 3
    assert type(model.encoder.layers[0].self_attn) is nn.MultiheadAttention
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training


@pytest.mark.parametrize("wrong", [StridedAttention, ShuffledAttention, SwappedAttention])
def test_strided_shuffled_and_swapped_heads_are_rejected(wrong):
    sizes = {"num_heads": 4, "head_dim": 5}
    with pytest.raises(hw.LayoutError, match="misreads"):
        hw.verify(hw.find_heads(wrong(**sizes)), (X,))


@pytest.mark.parametrize("count", [2, 8])
def test_half_and_twice_the_heads_are_rejected(count):
    heads = hw.find_heads(SeparateAttention(head_dim=8, num_heads=4))
    size = 32 // count

    def misread(slab):
        return replace(slab, heads=count, head_size=size, stride=size)

    (site,) = heads.sites
    wrong = replace(
        site,
        slabs=tuple(misread(slab) for slab in site.slabs),
        output=misread(site.output),
        num_heads=count,
        key_value_heads=count,
        head_size=size,
    )
    with pytest.raises(hw.LayoutError, match=f"with {count} heads of {size} misreads"):
        hw.verify(Heads(heads.model, (wrong,)), (X,))


@pytest.mark.parametrize("projection", ["query", "key"])
def test_wrong_queries_alone_and_wrong_keys_alone_are_rejected(projection):
    heads = hw.find_heads(SeparateAttention(head_dim=4, num_heads=2, key_value_heads=2))
    (site,) = heads.sites
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    linear = site.module.q_proj if projection == "query" else site.module.k_proj
    linear.register_forward_hook(lambda _m, _i, output: output[..., order])
    with pytest.raises(hw.LayoutError, match=f"changing the {projection} rows"):
        hw.verify(heads, (X,))


def test_a_site_that_is_not_reached_or_has_no_output_projection_is_told():
    model = SeparateAttention()
    model.o_proj = nn.Identity()
    with pytest.raises(hw.LayoutError, match="no site could be verified"):
        hw.verify(hw.find_heads(model), (X[..., :12],))

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = SeparateAttention()

        def forward(self, x):
            return x

    with pytest.raises(hw.NotFired, match="attention was not reached"):
        hw.verify(hw.find_heads(Around()), (X,))
