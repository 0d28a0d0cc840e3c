"""Differential attention: the second map of each head is subtracted from its first."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import LayoutError, SettingError, require_boolean, require_integer
from headwise.nn.mixing import compute_weights, find_mixer
from headwise.nn.scores import clear_empty_rows

# The name under which an attention holds its difference of maps.
CHILD = "head_difference"
# As in the authors' code.
DEVIATION, EPSILON = 0.1, 1e-5


class HeadDifference(nn.Module):
    """What makes an attention with G heads of 2e numbers differential (Ye et al. 2024, with their released code).

    The queries of a head are [Q1; Q2], its keys [K1; K2], of e numbers each, and its values V of 2e:

        A = softmax(Q1 K1^T / sqrt(e) + mask) - lambda softmax(Q2 K2^T / sqrt(e) + mask)
        O = (1 - lambda_0) RMSNorm(A V), with one gain [2e] for all heads
        lambda = exp(l_q1 . l_k1) - exp(l_q2 . l_k2) + lambda_0,  lambda_0 = 0.8 - 0.6 exp(-0.3 (layer - 1))

    The four vectors [e] are drawn from N(0, 0.1^2), and are shared by the heads of the attention. Rows of A sum to
    1 - lambda and may be negative. With `second=False` A = softmax(Q K^T / sqrt(2e) + mask), of the whole queries and
    keys, and there is no lambda: the control. Dropout, which their code does not have, acts on each map (ours).

    Args:
        head_size: Width 2e of a head; even.
        layer: Number of the layer, from 1.
        second: Whether there is a second map.

    Raises:
        SettingError: A value is something else.

    Example:
        >>> round(HeadDifference(4, layer=3).start, 4), round(HeadDifference(4, layer=1).start, 4)
        (0.4707, 0.2)
    """

    def __init__(self, head_size: int, layer: int = 1, *, second: bool = True) -> None:
        super().__init__()
        require_integer("layer", layer, low=1)
        require_boolean("second", second)
        if head_size < 2 or head_size % 2:
            raise SettingError(f"heads have {head_size} numbers; expected an even number, half of them for each map.")
        self.start = 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))
        # [l_q1, l_k1, l_q2, l_k2]
        self.vectors = nn.Parameter(torch.empty(4, head_size // 2)) if second else None
        self.norm = nn.RMSNorm(head_size, eps=EPSILON)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors of lambda; the gain is reset by its own module."""
        if self.vectors is not None:
            nn.init.normal_(self.vectors, std=DEVIATION)

    def find_lambda(self) -> Tensor:
        """Return lambda, in float32 at least; 0 without a second map."""
        if self.vectors is None:
            return self.norm.weight.new_zeros(())
        vectors = self.vectors.to(torch.promote_types(self.vectors.dtype, torch.float32))
        powers = (vectors[::2] * vectors[1::2]).sum(-1).exp()
        return powers[0] - powers[1] + self.start

    def split(self, tensor: Tensor) -> Tensor:
        """Return queries or keys [B, G, L, 2e] of the maps one by one, [B, 2G, L, e]; as they are for one map."""
        if self.vectors is None:
            return tensor
        return tensor.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)

    def subtract(self, maps: Tensor) -> Tensor:
        """Return the first minus lambda times the second of each pair of maps, [B, 2G, ...] to [B, G, ...]."""
        return maps if self.vectors is None else maps[:, ::2] - self.find_lambda().to(maps) * maps[:, 1::2]

    def take_first(self, maps: Tensor) -> Tensor:
        """Return the first of each pair of maps, or of their queries and keys, [B, 2G, ...] to [B, G, ...]."""
        return maps if self.vectors is None else maps[:, ::2]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        explicit: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return O [B, G, Q, 2e], and if `explicit` the first maps and A after dropout, [B, G, Q, K].

        Queries are [B, G, Q, 2e], keys and values [B, G, K, 2e]. The mask is additive, broadcastable to [B, G, Q, K];
        if `causal`, query i sees keys 0 to i only instead. A query without a key has O = 0.
        """
        q, k = self.split(q), self.split(k)
        repeated = 1 if self.vectors is None else 2
        if mask is not None and mask.dim() > 3 and mask.shape[1] > 1:
            mask = mask.repeat_interleave(repeated, 1)
        first = dropped = None
        if explicit:
            maps = compute_weights(q, k, mask, causal)
            first = self.take_first(maps)
            dropped = self.subtract(F.dropout(maps, dropout) if dropout > 0.0 else maps)
            heads = dropped @ v
        else:
            mask, empty = (None, None) if mask is None else clear_empty_rows(mask)
            heads = F.scaled_dot_product_attention(q, k, v.repeat_interleave(repeated, 1), mask, dropout, causal)
            heads = self.subtract(heads if empty is None else heads.masked_fill(empty, 0.0))
        # under autocast heads are of less precision than the gain
        normed = self.norm(heads.to(self.norm.weight.dtype)).to(heads.dtype)
        return (1.0 - self.start) * normed, first, dropped

    def extra_repr(self) -> str:
        """Return what it has, for printing."""
        return f"start={self.start:.4g}, second={self.vectors is not None}"


def find_difference(module: nn.Module) -> Any:
    """Return the `HeadDifference` of an attention, perhaps in a wrapper of peft; None where its heads have one map."""
    return module._modules.get(CHILD)


def pair_heads(attention: nn.Module, layer: int = 1, *, second: bool = True) -> None:
    """Turn an attention with an even number H of heads into differential attention with H / 2, in place.

    Heads 2g and 2g + 1 become one head, whose first and second map are theirs and whose values are those of both. The
    parameters of the projections stay as they are, with 4 e + 2 e new ones; what the attention computes does not: this
    is for a model that is yet to be trained. Find heads, and build the optimizer, afterwards.

    Args:
        attention: A `headwise.nn.MultiheadAttention`; `adopt` makes one of torch's.
        layer: Number of its layer, from 1.
        second: As in `HeadDifference`.

    Raises:
        LayoutError: It is something else, has an odd number of heads, or is paired or mixed already.

    Example:
        >>> from headwise.nn.multihead import MultiheadAttention
        >>> attention = MultiheadAttention(8, 4, batch_first=True)
        >>> pair_heads(attention)
        >>> attention.num_heads, attention.head_dim
        (2, 4)
    """
    given = type(attention).__name__
    if not isinstance(attention, nn.MultiheadAttention) or not hasattr(attention, "attend_heads"):
        raise LayoutError(
            f"{given} is not a headwise.nn.MultiheadAttention; differential attention needs one; adopt makes one of "
            "torch's own: adopt(model, attention)."
        )
    if attention.num_heads % 2:
        raise LayoutError(f"{given} has {attention.num_heads} heads; expected an even number, to be paired.")
    if find_difference(attention) is not None or find_mixer(attention) is not None:
        raise LayoutError(f"{given} has paired or talking heads already; pair the heads of a new one.")
    difference = HeadDifference(2 * attention.head_dim, layer, second=second)
    weight: Any = attention.out_proj.weight
    attention.num_heads, attention.head_dim = attention.num_heads // 2, 2 * attention.head_dim
    attention.add_module(CHILD, difference.to(device=weight.device, dtype=weight.dtype))
