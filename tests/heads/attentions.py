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


class FusedAttention(nn.Module):
    """One projection `qkv` of query, key and value, in any order of blocks or with the heads alternating."""

    def __init__(
        self,
        order: tuple[str, ...] = ("query", "key", "value"),
        interleaved: bool = False,
        width: int = 12,
        num_heads: int = 4,
        key_value_heads: int = 4,
        head_dim: int = 5,
    ) -> None:
        super().__init__()
        self.order, self.interleaved = order, interleaved
        self.num_heads, self.key_value_heads, self.head_dim = num_heads, key_value_heads, head_dim
        self.qkv = nn.Linear(width, (num_heads + 2 * key_value_heads) * head_dim)
        self.proj = nn.Linear(num_heads * head_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x)
        if self.interleaved:
            parts = fused.unflatten(-1, (self.num_heads, 3, self.head_dim)).unbind(-2)
        else:
            counts = [self.num_heads if kind == "query" else self.key_value_heads for kind in self.order]
            split = fused.split([count * self.head_dim for count in counts], -1)
            parts = [part.unflatten(-1, (-1, self.head_dim)) for part in split]
        found = dict(zip(self.order, (part.transpose(1, 2) for part in parts), strict=True))
        heads = F.scaled_dot_product_attention(
            found["query"],
            *(found[kind].repeat_interleave(self.num_heads // self.key_value_heads, 1) for kind in ("key", "value")),
        )
        return self.proj(heads.transpose(1, 2).flatten(2))


class KeyValueAttention(nn.Module):
    """Queries of their own beside one projection of keys and values; attends to a context."""

    def __init__(self, width: int = 12, num_heads: int = 4, head_dim: int = 5) -> None:
        super().__init__()
        self.heads, self.dim_head = num_heads, head_dim
        self.to_q, self.to_kv = nn.Linear(width, num_heads * head_dim), nn.Linear(width, 2 * num_heads * head_dim)
        self.to_out = nn.Sequential(nn.Linear(num_heads * head_dim, width), nn.Dropout(0.1))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        projected = (self.to_q(x), *self.to_kv(context).chunk(2, -1))
        q, k, v = (part.unflatten(-1, (self.heads, self.dim_head)).transpose(1, 2) for part in projected)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class GatedAttention(SeparateAttention):
    """Qwen3-Next's queries: head h of `q_proj` is [query; gate], and the gate multiplies what reaches W_O."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.q_proj = nn.Linear(self.q_proj.in_features, 2 * self.num_heads * self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (self.num_heads, 2 * self.head_dim)).chunk(2, -1)
        k, v = self.split(self.k_proj(x)), self.split(self.v_proj(x))
        heads = F.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2)
        return self.o_proj((heads * gate.sigmoid()).flatten(2))


class JointlyNormedAttention(SeparateAttention):
    """OLMo 2's queries and keys: a norm over all heads at once, computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        projected = [F.rms_norm(p(x).float(), (p.out_features,)).to(x.dtype) for p in (self.q_proj, self.k_proj)]
        q, k, v = (self.split(part) for part in (*projected, self.v_proj(x)))
        return self.o_proj(self.join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class LinearAttention(SeparateAttention):
    """No softmax, and one state for all heads: what its projections are called does not make them heads."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (projection(x).relu() for projection in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(q @ (k.transpose(1, 2) @ v))


class BlendedAttention(SeparateAttention):
    """Scores that are symmetric: what is called query and what is called key both enter both."""

    def forward(self, x: Tensor) -> Tensor:
        blended, v = self.split(self.q_proj(x) + self.k_proj(x)), self.split(self.v_proj(x))
        return self.o_proj(self.join(F.scaled_dot_product_attention(blended, blended, v)))


class PointwiseGates(SeparateAttention):
    """No token sees another: queries and keys gate the values at their own position."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.join(q.sigmoid() * k.tanh() * v))


class NormedValuesAttention(SeparateAttention):
    """Gemma 4's values: divided by their norm in each head."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.join(F.scaled_dot_product_attention(q, k, F.rms_norm(v, (self.head_dim,)))))


class RotatedValuesAttention(SeparateAttention):
    """RoFormer's values: rotated by their position, as queries and keys are."""

    def rotate(self, heads: Tensor) -> Tensor:
        """[B, H, L, e] with the first two features of each head turned by the angle of their position."""
        angle = torch.arange(heads.shape[-2], dtype=heads.dtype)
        x, y, *rest = heads.unbind(-1)
        return torch.stack([x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos(), *rest], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.rotate(self.split(projection(x))) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.join(F.scaled_dot_product_attention(q, k, v)))


class SinglePrecisionAttention(SeparateAttention):
    """Canine's mask: the least number of the scores' dtype, times a mask in float32."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.mT / self.head_dim**0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.float32).tril()
        scores = scores + (1.0 - hidden) * torch.finfo(scores.dtype).min
        return self.o_proj(self.join(scores.softmax(-1) @ v))


class MixedHeadsAttention(SeparateAttention):
    """The heads of each query are mixed by a matrix that starts at the identity: the rest of it is zero."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.mixing = nn.Parameter(torch.zeros(self.num_heads, self.num_heads))

    def join(self, heads: Tensor) -> Tensor:
        return super().join(heads + torch.einsum("gh,bhle->bgle", self.mixing, heads))
