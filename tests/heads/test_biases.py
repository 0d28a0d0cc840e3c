"""Biases that an attention adds itself, apart from its projection, belong to the slices of its heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.families import BY_NAME
from headwise.heads.heads import Heads

X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3)).double()


class FastAttention(nn.Module):
    """LayoutLMv2's fast attention: one projection without a bias, and biases of queries and values [1, 1, H e]."""

    def __init__(self, width: int = 12, num_heads: int = 4) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size = num_heads, width // num_heads
        self.qkv_proj, self.o_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(1, 1, width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).chunk(3, -1)
        split = [
            part.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for part in (q + self.q_bias, k, v + self.v_bias)
        ]
        return self.o_proj(F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2))


def deberta() -> nn.Module:
    model = BY_NAME["DeBERTa"].build()
    with torch.no_grad():
        for layer in model.encoder.layer:
            for bias in (layer.attention.self.q_bias, layer.attention.self.v_bias):
                bias.copy_(torch.randn(bias.shape))
    return model


def test_the_biases_of_deberta_belong_to_the_slices_of_its_queries_and_to_the_values_it_weighs():
    model = deberta()
    heads = hw.find_heads(model)
    (site, _) = heads.sites
    query, key, value = site.slices
    assert (query.bias, key.bias, value.bias) == ("q_bias", None, "v_bias")
    for head_slice in (query, value):
        bias = getattr(site.module, head_slice.bias)
        assert head_slice.bias_owner is site.module
        torch.testing.assert_close(head_slice.bias_view(bias), bias.view(4, 8))
        torch.testing.assert_close(head_slice.added_bias, bias.view(4, 8))
    assert key.added_bias is None
    with hw.Taps(heads.layer(0), values=True, outputs=True) as taps:
        weights = model(**BY_NAME["DeBERTa"].inputs(), output_attentions=True).attentions[0]
        (capture,) = taps.read()
    torch.testing.assert_close(torch.einsum("bhqk,bkhe->bqhe", weights, capture.values), capture.outputs)


def test_values_are_read_with_the_bias_that_is_added_to_them():
    torch.manual_seed(0)
    model = FastAttention().double()
    heads = hw.find_heads(model)
    with hw.Taps(heads, values=True) as taps:
        model(X)
        (capture,) = taps.read()
    expected = model.qkv_proj(X)[..., 24:] + model.v_bias
    torch.testing.assert_close(capture.values, expected.unflatten(-1, (4, 3)))
    penalty = hw.Disagreement(heads, hw.similarity.Subspace())
    model(X)
    penalty().backward()
    assert float(model.v_bias.grad.abs().max()) > 0.0


@cases("projection", ["query", "value"])
def test_a_bias_in_another_order_is_disproved(projection: str):
    model = FastAttention().eval()
    heads = hw.find_heads(model)
    assert hw.verify(heads, (X.float(),)).sites == ("",)
    (site,) = heads.sites
    # read as if it were in the order (e h), and as if its heads came one feature later
    for change in ({"bias_stride": 1}, {"bias_start": 1, "bias_stride": 2}):
        slices = tuple(replace(s, **change) if s.projection == projection else s for s in site.slices)
        with pytest.raises(
            hw.errors.LayoutError, match=rf"changing the {projection} bias of head \d changed the heads of heads \d"
        ):
            hw.verify(Heads(model, (replace(site, slices=slices),)), (X.float(),))
