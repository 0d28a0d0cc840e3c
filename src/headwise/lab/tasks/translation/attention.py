"""Attention in two steps, so that a decoder projects each key and value once."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from headwise.nn.multihead import MultiheadAttention


class CachedAttention(MultiheadAttention):
    """`headwise.nn.MultiheadAttention`, batch first, with keys and values that outlive a call.

    `attend(query, *project(states))` equals `forward(query, states, states)` in evaluation: the output projection is
    called as a module in both, so aggregators and ablations act in both.

    Args:
        width: Model width d.
        num_heads: Number of heads H; must divide `width`.
        dropout: Probability of dropping an attention weight while training, in [0, 1).
        bias: Whether the projections have biases.

    Example:
        >>> import torch
        >>> attention = CachedAttention(8, 2).eval()
        >>> states = torch.randn(3, 5, 8)
        >>> whole = attention(states, states, states, need_weights=False)[0]
        >>> torch.allclose(attention.attend(states[:, 1:2], *attention.project(states)), whole[:, 1:2], atol=1e-6)
        True
    """

    def __init__(self, width: int, num_heads: int, *, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__(width, num_heads, dropout=dropout, bias=bias, batch_first=True)

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [B, H, K, e], of states [B, K, d]."""
        bias = None if self.in_proj_bias is None else self.in_proj_bias[self.embed_dim :]
        keys, values = F.linear(states, self.in_proj_weight[self.embed_dim :], bias).chunk(2, dim=-1)
        return self._by_head(keys), self._by_head(values)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, may_attend: Tensor | None = None) -> Tensor:
        """Return the output [B, Q, d] of queries [B, Q, d] on projected keys and values [B, H, K, e].

        Args:
            query: States that ask.
            keys: From `project`.
            values: From `project`.
            may_attend: True where a query may attend a key, bool, broadcastable to [B, H, Q, K]; None allows all.
        """
        bias = None if self.in_proj_bias is None else self.in_proj_bias[: self.embed_dim]
        queries = self._by_head(F.linear(query, self.in_proj_weight[: self.embed_dim], bias))
        heads = F.scaled_dot_product_attention(queries, keys, values, may_attend)
        return self.out_proj(heads.transpose(1, 2).flatten(2))

    def _by_head(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
