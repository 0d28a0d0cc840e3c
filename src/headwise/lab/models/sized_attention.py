"""Self-attention whose heads are as wide as one likes, whatever the width of the model.

Owns `SizedAttention`. Must not know layers.
"""

from __future__ import annotations

import torch
from torch import nn

from headwise.errors import require_integer
from headwise.nn.multihead import MultiheadAttention


class SizedAttention(MultiheadAttention):
    """`headwise.nn.MultiheadAttention`, batch first and without biases, with H heads of e numbers each.

    W_Q, W_K, W_V are [He, d] and W_O is [d, He]. With He = d it is that module with its parameters in one matrix; else
    queries, keys and values have a matrix each.

    Args:
        width: Model width d.
        num_heads: Number of heads H.
        head_size: Width e of a head; None for d / H.

    Raises:
        SettingError: A size is below 1.

    Example:
        >>> attention = SizedAttention(10, 3, head_size=4)
        >>> states = torch.randn(2, 5, 10)
        >>> attention(states, states, states, need_weights=False)[0].shape, attention.q_proj_weight.shape
        (torch.Size([2, 5, 10]), torch.Size([12, 10]))
    """

    def __init__(self, width: int, num_heads: int, head_size: int | None = None) -> None:
        inner = width if head_size is None else num_heads * head_size
        require_integer("num_heads times head_size", inner, low=1)
        super().__init__(inner, num_heads, bias=False, batch_first=True, kdim=width, vdim=width)
        if inner != width:
            # torch ties the width of queries and of the output to that of the heads
            self.embed_dim = width
            self.q_proj_weight = nn.Parameter(torch.empty(inner, width))
            self.out_proj = nn.modules.linear.NonDynamicallyQuantizableLinear(inner, width, bias=False)
            self._reset_parameters()
