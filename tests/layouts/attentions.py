"""Small attention modules of the kinds users write, for the tests of layouts, taps and repulsion."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SeparateAttention(nn.Module):
    """Separate projections; key/value heads may be fewer than query heads and heads narrower than d / H."""

    def __init__(self, width: int = 12, num_heads: int = 4, key_value_heads: int = 4, head_dim: int = 5) -> None:
        super().__init__()
        self.num_heads, self.key_value_heads, self.head_dim = num_heads, key_value_heads, head_dim
        self.q_proj = nn.Linear(width, num_heads * head_dim)
        self.k_proj = nn.Linear(width, key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, key_value_heads * head_dim)
        self.o_proj = nn.Linear(num_heads * head_dim, width)

    def split(self, tensor: Tensor) -> Tensor:
        """[B, L, G * e] -> [B, H, L, e], rows of a head together."""
        heads = tensor.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads.repeat_interleave(self.num_heads // heads.shape[1], dim=1)

    def join(self, heads: Tensor) -> Tensor:
        """[B, H, L, e] -> [B, L, H * e]."""
        return heads.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        mask = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]
        return self.o_proj(self.join(F.scaled_dot_product_attention(q, k, v, mask)))


class StridedAttention(SeparateAttention):
    """Heads own every H-th row: a contiguous reading of its projections is wrong."""

    def split(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (self.head_dim, self.num_heads)).permute(0, 3, 1, 2)

    def join(self, heads: Tensor) -> Tensor:
        return heads.permute(0, 2, 3, 1).flatten(2)


class ShuffledAttention(SeparateAttention):
    """Heads own a random partition of the rows."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.order = torch.randperm(self.num_heads * self.head_dim, generator=torch.Generator().manual_seed(5))

    def split(self, tensor: Tensor) -> Tensor:
        return super().split(tensor[..., self.order])

    def join(self, heads: Tensor) -> Tensor:
        return super().join(heads)[..., self.order.argsort()]


class SwappedAttention(SeparateAttention):
    """Computes its queries with k_proj and its keys with q_proj."""

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        self.q_proj, self.k_proj = self.k_proj, self.q_proj
        try:
            return super().forward(x, key_padding_mask)
        finally:
            self.q_proj, self.k_proj = self.k_proj, self.q_proj
