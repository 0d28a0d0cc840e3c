"""Attentions that call torch's `scaled_dot_product_attention` themselves, with the structure of nanoGPT and others."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


class CallingAttention(nn.Module):
    """Grouped queries, a mask of any form, dropout, a scale; the call is imported by name."""

    def __init__(
        self,
        width: int = 12,
        num_heads: int = 4,
        key_value_heads: int = 4,
        head_dim: int = 5,
        causal: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        grouped: str = "enable_gqa",
    ) -> None:
        super().__init__()
        self.num_heads, self.key_value_heads, self.head_dim = num_heads, key_value_heads, head_dim
        self.causal, self.dropout, self.scale, self.grouped = causal, dropout, scale, grouped
        self.q_proj = nn.Linear(width, num_heads * head_dim)
        self.k_proj, self.v_proj = (nn.Linear(width, key_value_heads * head_dim) for _ in range(2))
        self.o_proj = nn.Linear(num_heads * head_dim, width)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(-2, -3)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def allow(self, _keep: None) -> Tensor:
        """True where a query of the tests may attend, [Q, K]."""
        allowed = torch.ones(X.shape[1], X.shape[1], dtype=torch.bool)
        return allowed.tril() if self.causal else allowed

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        if self.grouped == "repeated":
            k, v = (part.repeat_interleave(self.num_heads // self.key_value_heads, -3) for part in (k, v))
        heads = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
            scale=self.scale,
            enable_gqa=self.grouped == "enable_gqa",
        )
        return self.o_proj(heads.transpose(-2, -3).flatten(-2))


class CausalSelfAttention(nn.Module):
    """nanoGPT's attention: `c_attn` in blocks, the fused kernel where there is one, dropout in training."""

    def __init__(self, width: int = 12, num_heads: int = 3, dropout: float = 0.1, context: int = 16) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout, self.flash = num_heads, width, dropout, True
        self.register_buffer("bias", torch.tril(torch.ones(context, context)).view(1, 1, context, context))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(batch, tokens, self.n_head, width // self.n_head).transpose(1, 2)
        q = q.view(batch, tokens, self.n_head, width // self.n_head).transpose(1, 2)
        v = v.view(batch, tokens, self.n_head, width // self.n_head).transpose(1, 2)
        if self.flash:
            dropped = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropped, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.bias[:, :, :tokens, :tokens] == 0, -math.inf)
            y = F.dropout(F.softmax(scores, dim=-1), self.dropout, self.training) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(batch, tokens, width)))


class NanoGPT(nn.Module):
    """A pre-norm decoder of such attentions on vectors."""

    def __init__(self, width: int = 12, num_heads: int = 3, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            nn.ModuleDict({"ln_1": nn.LayerNorm(width), "attn": CausalSelfAttention(width, num_heads, dropout)})
            for _ in range(layers)
        )
        self.ln_f = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = x + block["attn"](block["ln_1"](x))
        return self.ln_f(x)


class EinsumAttention(nn.Module):
    """Weights in parameters of its own around the call: [3, d, H, e] in, [H, e, d] out."""

    def __init__(self, width: int = 12, num_heads: int = 4, head_dim: int = 5) -> None:
        super().__init__()
        self.n_heads = num_heads
        self.w_qkv = nn.Parameter(torch.randn(3, width, num_heads, head_dim) / 2)
        self.w_o = nn.Parameter(torch.randn(num_heads, head_dim, width) / 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("bld,pdhe->pbhle", x, self.w_qkv)
        return torch.einsum("bhle,hed->bld", attend(q, k, v), self.w_o)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A function of the user's own between the attention and the call."""
    return partial(F.scaled_dot_product_attention, is_causal=True)(q, k, v)
