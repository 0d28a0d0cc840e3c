"""Projections around an attention that has projections of its own: the inner one has the heads, or both are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from heads.attentions import SeparateAttention

X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))


class Projected(nn.Module):
    """Aria's projector: Linears for queries, keys and values in front of torch's attention, and one behind it."""

    def __init__(self, width: int = 12, num_heads: int = 3) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.inner = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.inner(self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return self.linear(output)


class TwoAttentions(SeparateAttention):
    """Attends, and has another attention attend to what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        x = self.o_proj(self.join(F.scaled_dot_product_attention(q, k, v)))
        return self.inner(x, x, x)[0]


def test_of_projections_in_front_of_an_attention_the_inner_one_is_read():
    heads = hw.find_heads(Projected())
    assert [(site.name, site.layout, site.num_heads) for site in heads] == [("inner", "torch packed", 3)]
    assert hw.verify(heads, (X,)).sites == ("inner",)


def test_the_projector_of_aria_is_its_inner_attention():
    from transformers.models.aria.modeling_aria import AriaConfig, AriaProjector

    vision = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 16}
    words = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    config = AriaConfig(vision_config={**vision, "model_type": "idefics3_vision"}, text_config=words)
    config.projector_patch_to_query_dict = {6: 4}
    projector = AriaProjector(config)
    heads = hw.find_heads(projector)
    assert [(site.name, site.layout) for site in heads] == [("cross_attn.multihead_attn", "torch packed")]
    assert hw.verify(heads, (X,)).sites == ("cross_attn.multihead_attn",)


def test_an_attention_inside_one_that_attends_itself_is_refused_and_not_half_read():
    with pytest.raises(
        hw.errors.LayoutError, match=r"the model \(TwoAttentions\) holds .* and inner \(MultiheadAttention\)"
    ):
        hw.find_heads(TwoAttentions())
    (site,) = hw.find_heads(TwoAttentions(), exclude="inner").sites
    assert (site.name, site.num_heads) == ("", 4)
