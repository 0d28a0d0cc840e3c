"""Gates of heads from their logits, and the balance of the heads that tokens choose."""

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.errors import ShapeError, require_integer
from headwise.similarity.tokens import accumulation_dtype, require_keep


class Gates(NamedTuple):
    """Gates of one call of an attention.

    Attributes:
        weights: g, [..., H], or [..., H * e] where each feature has its own; without leading axes for every token.
        shares: p of the routed heads, [..., n]; None where no head is chosen.
        chosen: Which routed heads each token uses, bool [..., n].
    """

    weights: Tensor
    shares: Tensor | None = None
    chosen: Tensor | None = None


def sigmoid_gates(logits: Tensor, scale: float = 2.0) -> Gates:
    """Return g = scale sigmoid(logits), in float32 at least.

    >>> sigmoid_gates(torch.tensor([0.0, 50.0])).weights.tolist()
    [1.0, 2.0]
    """
    return Gates(scale * torch.sigmoid(logits.to(accumulation_dtype(logits))))


def mixture_gates(
    routed: Tensor, shared: Tensor | None, kinds: Tensor | None, active: int, scores: Tensor | None = None
) -> Gates:
    """Return the gates of shared and routed heads; the equations are those of `MixtureOfHeads`.

    Of equal scores the heads with the smaller index are chosen, on every device.

    Args:
        routed: Logits of the n routed heads, W_r x, [..., n].
        shared: Those of the S shared heads, W_s x, [..., S]; None where there are none.
        kinds: Those of both kinds of heads, W_a x, [..., 2]; None where there are no shared heads.
        active: Number K of routed heads that a token uses, at most n.
        scores: What heads are chosen by, [..., n]; None for `routed`.

    Returns:
        The gates, shared heads first, in float32 at least; p; and which heads are chosen.

    Raises:
        SettingError: `active` is outside [1, n].
        ShapeError: One of `shared` and `kinds` is given without the other.

    >>> gates = mixture_gates(torch.tensor([0.0, 1.0, 1.0]), torch.zeros(1), torch.zeros(2), active=2)
    >>> gates.weights.tolist(), gates.chosen.tolist()
    ([1.0, 0.0, 1.0, 1.0], [False, True, True])
    """
    require_integer("active", active, low=1, high=routed.shape[-1])
    if (shared is None) != (kinds is None):
        raise ShapeError("shared and kinds were not given together; expected the logits of both, or of neither.")
    routed = routed.to(accumulation_dtype(routed))
    order = (routed if scores is None else scores).detach().argsort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(routed, dtype=torch.bool).scatter(-1, order[..., :active], True)
    # p / sum_{chosen} p, without a division
    weights = active * torch.softmax(routed.masked_fill(~chosen, -torch.inf), dim=-1)
    shares = torch.softmax(routed, dim=-1)
    if shared is None or kinds is None:
        return Gates(weights, shares, chosen)
    alphas = 2.0 * torch.softmax(kinds.to(routed.dtype), dim=-1)
    common = shared.shape[-1] * torch.softmax(shared.to(routed.dtype), dim=-1)
    return Gates(torch.cat([alphas[..., :1] * common, alphas[..., 1:] * weights], dim=-1), shares, chosen)


def balance(shares: Tensor, chosen: Tensor, keep: Tensor | None = None) -> Tensor:
    """Return how unequally n heads are chosen: n sum_i f_i P_i over valid tokens (Jin et al. 2024, code).

    f_i is the share of tokens that chose head i, without a gradient, and P_i the mean of p_i. It is K when each head is
    chosen equally often and n at most. 0 where no token is valid.

    Args:
        shares: p, [..., n].
        chosen: bool [..., n], K of them True for each token.
        keep: bool [...], True = valid token; None keeps all. Padded tokens get no gradient.

    Raises:
        MaskError: `keep` is not bool or not of the leading shape of `shares`.

    >>> float(balance(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([[True, False], [False, True]])))
    1.0
    """
    rows, picked = shares.flatten(end_dim=-2), chosen.flatten(end_dim=-2).to(shares.dtype)
    if keep is None:
        return shares.shape[-1] * (picked.mean(0) * rows.mean(0)).sum()
    require_keep(keep, shares.shape[:-1])
    valid = keep.flatten()[:, None]
    count = valid.sum().clamp_min(1)
    # a padded token may hold anything, NaN too
    rows, picked = rows.where(valid, 0.0), picked.where(valid, 0.0)
    return shares.shape[-1] * (picked.sum(0) / count * (rows.sum(0) / count)).sum()
