"""Simple routing of votes (Li et al. 2021, Algorithm 1, Eqs. 10-11), and its hand-derived gradient.

The agreement B_hn is a sum of X . V over iterations, so it is (sum of X) . V: of earlier iterations only that sum is
kept.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.routing.passes import materialize, softmax, sum_axis
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


class _State(NamedTuple):
    """One iteration, with what its gradient needs.

    Attributes:
        outputs: y, the sum of X over earlier iterations, [T, N, c]; None in the first.
        weights: C, [T, H, N]; None where it is uniform.
        scale: 1 / max(sum_h C_hn, floor), [T, N]; None where it is 1 or a number.
        above: Whether sum_h C_hn is at least the floor, [T, N]; None where `scale` is.
        total: s = sum_h C V / sum_h C before squashing, [T, N, c].
    """

    outputs: Tensor | None
    weights: Tensor | None
    scale: Tensor | None
    above: Tensor | None
    total: Tensor


def simple_forward(votes: Tensor, iterations: int, over_capsules: bool, floor: float) -> tuple[Tensor, Tensor]:
    """Return the output capsules [T, N, c] and the weights C [T, H, N]; see `headwise.routing.simple_routing`."""
    last = _iterate(votes, iterations, over_capsules, floor)[-1]
    weights = last.weights
    if weights is None:
        count = votes.shape[2] if over_capsules else votes.shape[1]
        weights = votes.new_full(votes.shape[:3], 1.0 / count)
    return _squash(last.total, floor), weights


def simple_gradient(votes: Tensor, grad: Tensor, iterations: int, over_capsules: bool, floor: float) -> Tensor:
    """Return the gradient of `simple_forward` with respect to the votes, through all iterations.

    That of X = squash(s) goes to s, and that of s through C to V and to the agreement B = y . V, with y the sum of X of
    earlier iterations: V receives y d B, and each of these X receives sum_h d B V.
    """
    states = _iterate(votes, iterations, over_capsules, floor)
    d_output = grad
    d_votes = torch.zeros_like(votes)
    d_outputs = None
    for state in reversed(states):
        d_total = _squash_gradient(state.total, d_output, floor)
        if state.weights is None or state.outputs is None:
            share = _uniform_share(votes, over_capsules, floor)
            d_votes = d_votes + materialize(d_total * share).unsqueeze(1)
            break
        weights, outputs = state.weights, state.outputs
        if state.scale is not None:
            d_total = d_total * state.scale.unsqueeze(-1)
        d_total = materialize(d_total)
        d_weights = sum_axis(d_total.unsqueeze(1) * votes, -1)
        if state.above is not None:
            held = torch.where(state.above, sum_axis(d_total * state.total, -1), 0.0)
            d_weights = d_weights - materialize(held).unsqueeze(1)
        drawn = weights * d_weights
        axis = -1 if over_capsules else 1
        d_agreement = materialize(torch.addcmul(drawn, weights, drawn.sum(axis, keepdim=True), value=-1.0))
        d_votes = torch.addcmul(d_votes, weights.unsqueeze(-1), d_total.unsqueeze(1))
        d_votes = torch.addcmul(d_votes, d_agreement.unsqueeze(-1), outputs.unsqueeze(1))
        pulled = (d_agreement.unsqueeze(-1) * votes).sum(1)
        d_outputs = pulled if d_outputs is None else d_outputs + pulled
        d_output = d_outputs
    return d_votes


def _iterate(votes: Tensor, iterations: int, over_capsules: bool, floor: float) -> list[_State]:
    total = materialize(votes.sum(1)) * _uniform_share(votes, over_capsules, floor)
    states = [_State(None, None, None, None, total)]
    outputs = None
    for _ in range(iterations - 1):
        output = _squash(states[-1].total, floor)
        outputs = materialize(output if outputs is None else outputs + output)
        agreement = sum_axis(outputs.unsqueeze(1) * votes, -1)
        weights = softmax(agreement, -1 if over_capsules else 1)
        total = (weights.unsqueeze(-1) * votes).sum(1)
        scale = above = None
        if over_capsules:
            received = weights.sum(1)
            scale, above = 1.0 / received.clamp_min(floor), received >= floor
            total = total * scale.unsqueeze(-1)
        states.append(_State(outputs, weights, scale, above, total))
    return states


def _uniform_share(votes: Tensor, over_capsules: bool, floor: float) -> float:
    """Return C_hn / max(sum_h C_hn, floor) of the first iteration, the same for all."""
    heads, capsules = votes.shape[1:3]
    return 1.0 / capsules / max(heads / capsules, floor) if over_capsules else 1.0 / heads


def _squash(total: Tensor, floor: float) -> Tensor:
    """Return s |s|^2 / ((1 + |s|^2) |s|) (Eq. 11), with `floor` added to |s|^2 under the square root."""
    square = sum_axis(total * total, -1).unsqueeze(-1)
    return total * (square / (1.0 + square) * torch.rsqrt(square + floor))


def _squash_gradient(total: Tensor, grad: Tensor, floor: float) -> Tensor:
    square = sum_axis(total * total, -1).unsqueeze(-1)
    root = torch.rsqrt(square + floor)
    ratio = square / (1.0 + square)
    slope = root / (1.0 + square).square() - 0.5 * ratio * root * root * root
    along = sum_axis(grad * total, -1).unsqueeze(-1)
    return grad * (ratio * root) + total * (2.0 * slope * along)
