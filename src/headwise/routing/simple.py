"""Simple routing of votes (Li et al. 2021, Algorithm 1, Eqs. 10-11), and its hand-derived gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.routing.votes import full_precision


@dataclass(frozen=True)
class SimpleKernel:
    """Simple routing of one chunk of votes.

    Attributes:
        iterations: T.
        over_capsules: Whether the softmax runs over capsules rather than heads.
        floor: Lower bound of sum_h C_hn, also added to |s|^2 under the square root of the squash.
    """

    iterations: int
    over_capsules: bool
    floor: float

    def forward(self, votes: Tensor, *_weights: Tensor) -> Tensor:
        """Return the capsules [T, N, c]."""
        return simple_forward(full_precision(votes), self.iterations, self.over_capsules, self.floor)[0]

    def gradient(self, votes: Tensor, grad: Tensor, into: Tensor, *_weights: Tensor) -> tuple[Tensor, ...]:
        """Write the gradient of the votes into `into`; there are no weights."""
        votes, grad = full_precision(votes), full_precision(grad)
        into.copy_(simple_gradient(votes, grad, self.iterations, self.over_capsules, self.floor))
        return ()


def simple_forward(votes: Tensor, iterations: int, over_capsules: bool, floor: float) -> tuple[Tensor, Tensor]:
    """Return the output capsules [T, N, c] and the weights C [T, H, N]; see `headwise.routing.simple_routing`."""
    outputs, weights = _iterate(votes, iterations, over_capsules, floor)
    return _squash(outputs[-1], floor), weights[-1]


def simple_gradient(votes: Tensor, grad: Tensor, iterations: int, over_capsules: bool, floor: float) -> Tensor:
    """Return the gradient of `simple_forward` with respect to the votes, through all iterations.

    The gradient of each agreement b += x . V goes to x and V, that of x = squash(s) to s, and that of s to V through C
    and, through the softmax, to the agreements of all earlier iterations.
    """
    totals, all_weights = _iterate(votes, iterations, over_capsules, floor)
    d_votes = torch.zeros_like(votes)
    d_agreement = None
    for t in range(iterations - 1, -1, -1):
        total, weights = totals[t], all_weights[t]
        if d_agreement is None:
            d_output = grad
        else:
            d_output = (d_agreement.unsqueeze(-1) * votes).sum(1)
            d_votes = d_votes + d_agreement.unsqueeze(-1) * _squash(total, floor).unsqueeze(1)
        d_total = _squash_gradient(total, d_output, floor)
        drawn = (d_total.unsqueeze(1) * votes).sum(-1)
        if over_capsules:
            received = weights.sum(1)
            scale = 1.0 / received.clamp_min(floor)
            held = torch.where(received >= floor, (d_total * total).sum(-1), 0.0)
            share, d_weights = weights * scale.unsqueeze(1), (drawn - held.unsqueeze(1)) * scale.unsqueeze(1)
        else:
            share, d_weights = weights, drawn
        d_votes = d_votes + share.unsqueeze(-1) * d_total.unsqueeze(1)
        if t == 0:
            break
        axis = -1 if over_capsules else 1
        d_logits = weights * (d_weights - (d_weights * weights).sum(axis, keepdim=True))
        d_agreement = d_logits if d_agreement is None else d_agreement + d_logits
    return d_votes


def _iterate(votes: Tensor, iterations: int, over_capsules: bool, floor: float) -> tuple[list[Tensor], list[Tensor]]:
    """Return sum_h C V / sum_h C before squashing, [T, N, c], and C [T, H, N], of each iteration."""
    agreement = votes.new_zeros(votes.shape[:3])
    totals, all_weights = [], []
    for t in range(iterations):
        weights = torch.softmax(agreement, dim=-1 if over_capsules else 1)
        total = (weights.unsqueeze(-1) * votes).sum(1)
        if over_capsules:
            total = total / weights.sum(1).clamp_min(floor).unsqueeze(-1)
        totals.append(total)
        all_weights.append(weights)
        if t < iterations - 1:
            agreement = agreement + (_squash(total, floor).unsqueeze(1) * votes).sum(-1)
    return totals, all_weights


def _squash(total: Tensor, floor: float) -> Tensor:
    """Return s |s|^2 / ((1 + |s|^2) |s|) (Eq. 11), with `floor` added to |s|^2 under the square root."""
    square = total.square().sum(-1, keepdim=True)
    return total * (square / (1.0 + square) * torch.rsqrt(square + floor))


def _squash_gradient(total: Tensor, grad: Tensor, floor: float) -> Tensor:
    square = total.square().sum(-1, keepdim=True)
    root = torch.rsqrt(square + floor)
    ratio = square / (1.0 + square)
    slope = root / (1.0 + square).square() - 0.5 * ratio * root * root * root
    along = (grad * total).sum(-1, keepdim=True)
    return grad * (ratio * root) + total * (2.0 * slope * along)
