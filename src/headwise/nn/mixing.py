"""Talking heads: matrices that mix the heads of an attention before and after its softmax."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import SettingError, require_integer
from headwise.nn.scores import normalize_scores

# The name under which an attention holds its mixer.
CHILD = "head_mixer"


class HeadMixer(nn.Module):
    """The matrices of talking heads of one attention (Shazeer et al. 2020).

    L_g = sum_h P_l[h, g] J_h and U_g = sum_h P_w[h, g] W_h, with J the scores of the heads and W = softmax(L + mask).
    Both matrices start as the identity, with which attention is what it was.

    Args:
        num_heads: Heads H.
        logits: Whether there is P_l, which mixes scores.
        weights: Whether there is P_w, which mixes weights.

    Attributes:
        logits: P_l, [H, H], from the head of the row to that of the column; None without it.
        weights: P_w likewise.

    Raises:
        SettingError: There are no two heads, or neither matrix is wanted.

    Example:
        >>> mixer = HeadMixer(2, weights=False)
        >>> mixer.logits.data = torch.tensor([[1.0, 0.0], [3.0, 1.0]])
        >>> mixer(torch.tensor([1.0, 10.0]).view(1, 2, 1, 1), "logits").flatten().tolist()
        [31.0, 10.0]
    """

    def __init__(self, num_heads: int, *, logits: bool = True, weights: bool = True) -> None:
        super().__init__()
        require_integer("num_heads", num_heads, low=2)
        if not (logits or weights):
            raise SettingError("talking heads were given neither matrix; expected logits, weights or both to be True.")
        self.logits = nn.Parameter(torch.eye(num_heads)) if logits else None
        self.weights = nn.Parameter(torch.eye(num_heads)) if weights else None

    def reset_parameters(self) -> None:
        """Set the matrices to the identity."""
        for matrix in (self.logits, self.weights):
            if matrix is not None:
                nn.init.eye_(matrix)

    def forward(self, maps: Tensor, which: str) -> Tensor:
        """Return mixed maps [B, H, Q, K]; as they are where there is no such matrix.

        Args:
            maps: Scores without any mask, or weights, [B, H, Q, K].
            which: "logits" or "weights". Mixed weights need not be positive, nor sum to 1.
        """
        matrix: nn.Parameter | None = getattr(self, which)
        return maps if matrix is None else mix_heads(maps, matrix)

    def extra_repr(self) -> str:
        """Return which matrices it has, for printing."""
        return ", ".join(name for name in ("logits", "weights") if getattr(self, name) is not None)


def mix_heads(maps: Tensor, matrix: Tensor) -> Tensor:
    """Return sum_h matrix[h, g] maps_h for each head g, of maps [B, H, Q, K] that are finite: -inf times 0 is NaN.

    >>> mix_heads(torch.tensor([1.0, 10.0]).view(1, 2, 1, 1), torch.tensor([[1.0, 2.0], [0.0, 1.0]])).flatten()
    tensor([ 1., 12.])
    """
    return (matrix.mT.to(maps.dtype) @ maps.flatten(2)).unflatten(2, maps.shape[2:])


def compute_weights(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool = False, mixer: nn.Module | None = None
) -> Tensor:
    """Return softmax(Q K^T / sqrt(e) + mask), [B, H, Q, K], of scores that are mixed first where there is a mixer.

    The mask is additive; a row of -inf alone has weights 0. If `causal`, query i sees keys 0 to i only instead.

    >>> compute_weights(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3), None, causal=True)
    tensor([[[[1.0000, 0.0000],
              [0.5000, 0.5000]]]])
    """
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    scores = scores if mixer is None else mixer(scores, "logits")
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(future, -math.inf)
    elif mask is not None:
        # in place: at long lengths a second tensor of this size costs more than the sum
        return normalize_scores(scores.add_(mask))
    return torch.softmax(scores, dim=-1)


def drop_weights(weights: Tensor, dropout: float, mixer: nn.Module | None) -> Tensor:
    """Return the weights that values are summed with: mixed where there is a mixer, then dropped."""
    weights = weights if mixer is None else mixer(weights, "weights")
    return F.dropout(weights, dropout) if dropout > 0.0 else weights


def find_mixer(module: nn.Module) -> nn.Module | None:
    """Return the mixer that an attention attends with, perhaps in a wrapper of peft; None without one."""
    return module._modules.get(CHILD)
