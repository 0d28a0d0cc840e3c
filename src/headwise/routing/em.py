"""EM routing of votes (Li et al. 2021, Algorithm 2, Eqs. 12-15) in log space, and its hand-derived gradient.

Internally, capsule dimensions come before capsules, [T, H, c, N], so that the long axis is contiguous.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.routing.passes import materialize, softmax, sum_axis
from headwise.routing.votes import full_precision

_NATS_PER_DIMENSION = 0.5 * (1.0 + math.log(2.0 * math.pi))


class EMState(NamedTuple):
    """One M-step, with what its gradient needs.

    Attributes:
        weights: C, [T, H, N]; None where it is uniform, 1/N.
        total: R_n = sum_h C_hn, [T, N]; a scalar where C is uniform.
        scale: 1 / max(R, floor), of the shape of `total`.
        mean: mu, [T, c, N].
        spread: The variance before the floor is applied, [T, c, N].
        precision_root: 1 / sigma, [T, c, N].
        cost: L_n = sum_i log sigma_ni, [T, N].
        logit: Argument of the logistic function in A, [T, N]; None without activations.
    """

    weights: Tensor | None
    total: Tensor
    scale: Tensor
    mean: Tensor
    spread: Tensor
    precision_root: Tensor
    cost: Tensor
    logit: Tensor | None


class EMGradient(NamedTuple):
    """Gradients with respect to the votes [T, H, N, c] and the two betas [N] (None without activations)."""

    votes: Tensor
    beta_a: Tensor | None
    beta_mu: Tensor | None


@dataclass(frozen=True)
class EMKernel:
    """EM routing of one chunk of votes, with its inverse temperatures and floor.

    Attributes:
        schedule: lambda_1..lambda_T.
        floor: Lower bound of the variance and of sum_h C_hn.
    """

    schedule: tuple[float, ...]
    floor: float

    def forward(self, votes: Tensor, *betas: Tensor) -> Tensor:
        """Return the capsules [T, N, c]; `betas` are beta_A and beta_mu, or nothing."""
        beta_a, beta_mu = betas or (None, None)
        return em_forward(full_precision(votes), beta_a, beta_mu, self.schedule, self.floor)[0]

    def gradient(self, votes: Tensor, grad: Tensor, into: Tensor, *betas: Tensor) -> tuple[Tensor, ...]:
        """Write the gradient of the votes into `into` and return those of the betas given."""
        beta_a, beta_mu = betas or (None, None)
        votes, grad = full_precision(votes), full_precision(grad)
        parts = em_gradient(votes, beta_a, beta_mu, grad, self.schedule, self.floor)
        into.copy_(parts.votes)
        return tuple(part for part in parts[1:] if part is not None)


def em_schedule(iterations: int, first: float, last: float) -> tuple[float, ...]:
    """Return the inverse temperatures lambda_1..lambda_T, linear from `first` to `last`; (first,) for T = 1.

    >>> em_schedule(3, 1.0, 3.0)
    (1.0, 2.0, 3.0)
    """
    if iterations == 1:
        return (first,)
    return tuple(first + (last - first) * t / (iterations - 1) for t in range(iterations))


def em_forward(
    votes: Tensor,
    beta_a: Tensor | None,
    beta_mu: Tensor | None,
    schedule: tuple[float, ...],
    floor: float,
) -> tuple[Tensor, list[EMState]]:
    """Return the output capsules [T, N, c] and the state after each M-step; see `headwise.routing.em_routing`."""
    inner = votes.transpose(2, 3)
    states: list[EMState] = []
    for temperature in schedule:
        weights = _expectation(inner, states[-1]) if states else None
        states.append(_maximization(inner, weights, beta_a, beta_mu, temperature, floor))
    last = states[-1]
    capsules = last.mean if last.logit is None else last.mean * torch.sigmoid(last.logit).unsqueeze(1)
    return capsules.transpose(1, 2), states


def em_gradient(
    votes: Tensor,
    beta_a: Tensor | None,
    beta_mu: Tensor | None,
    grad: Tensor,
    schedule: tuple[float, ...],
    floor: float,
) -> EMGradient:
    """Return the gradient of `em_forward` through all iterations, given the gradient of its capsules [T, N, c].

    M-step, with q = C / max(R, floor): V receives q (d mu + 2 (V - mu) d sigma^2), C receives
    sum_i (d mu (V - mu) + d sigma^2 (V - mu)^2) / R less its mean under q. E-step, with z = (V - mu) / sigma and
    d ell the softmax's gradient: V receives -d ell z / sigma, mu its negative summed over heads, sigma^2
    sum_h d ell z^2 / (2 sigma^2). Values below the floor pass no gradient, as in clamp_min.
    """
    inner = votes.transpose(2, 3)
    size = inner.shape[2]
    _, states = em_forward(votes, beta_a, beta_mu, schedule, floor)
    last = states[-1]
    d_mean = grad.transpose(1, 2)
    d_logit = None
    if last.logit is not None:
        activation = torch.sigmoid(last.logit)
        d_logit = sum_axis(d_mean * last.mean, 1) * activation * (1.0 - activation)
        d_mean = d_mean * activation.unsqueeze(1)
    d_variance, d_cost = torch.zeros_like(d_mean), torch.zeros_like(last.cost)
    d_beta_a = d_beta_mu = None
    d_votes = torch.zeros_like(inner)

    for t in range(len(schedule) - 1, -1, -1):
        state = states[t]
        d_total = torch.zeros_like(state.cost)
        if d_logit is not None and beta_mu is not None:
            scaled = schedule[t] * d_logit
            received = scaled * state.total
            d_total = -scaled * (beta_mu + state.cost + size * _NATS_PER_DIMENSION)
            d_cost = d_cost - received
            d_beta_a = _add(d_beta_a, scaled.sum(0))
            d_beta_mu = _add(d_beta_mu, -received.sum(0))
        root = state.precision_root
        d_variance = d_variance + 0.5 * d_cost.unsqueeze(1) * root * root
        d_variance = torch.where(state.spread >= floor, d_variance, 0.0)
        # sum_h q (V - mu) is mu (1 - sum_h q), zero unless R is below the floor
        missing = 1.0 - state.total * state.scale
        d_mean = d_mean - 2.0 * d_variance * state.mean * _align_with_mean(missing)
        scale = _align_with_mean(state.scale)
        toward, along = materialize(d_mean * scale), materialize(d_variance * scale)
        centered = inner - state.mean.unsqueeze(1)
        pulled = torch.addcmul(toward.unsqueeze(1), centered, along.unsqueeze(1), value=2.0)
        if t == 0 or state.weights is None:
            d_votes = d_votes + pulled / inner.shape[3]
            break
        weights = state.weights
        d_votes = torch.addcmul(d_votes, pulled, weights.unsqueeze(2))
        above = _align_with_mean(state.total >= floor)
        held = torch.where(above, d_variance * scale * state.spread + toward * state.mean, 0.0)
        # d C without the part that is the same for all heads of a capsule; V is written (V - mu) + mu
        offset = materialize(d_total + sum_axis(toward * state.mean - held, 1))
        drawn = torch.addcmul(toward.unsqueeze(1), centered, along.unsqueeze(1)) * centered
        d_weights = sum_axis(drawn, 2) + offset.unsqueeze(1)

        drawn = weights * d_weights
        d_log = materialize(torch.addcmul(drawn, weights, drawn.sum(-1, keepdim=True), value=-1.0))
        previous = states[t - 1]
        root = previous.precision_root
        z = (inner - previous.mean.unsqueeze(1)) * root.unsqueeze(1)
        drawn = d_log.unsqueeze(2) * z
        d_votes = torch.addcmul(d_votes, drawn, root.unsqueeze(1), value=-1.0)
        d_mean = drawn.sum(1) * root
        d_variance = 0.5 * (drawn * z).sum(1) * root * root
        summed = d_log.sum(1)
        d_cost = -summed
        d_logit = None if previous.logit is None else summed * torch.sigmoid(-previous.logit)
    return EMGradient(d_votes.transpose(2, 3), d_beta_a, d_beta_mu)


def _expectation(inner: Tensor, state: EMState) -> Tensor:
    """Return C [T, H, N]: the softmax over capsules of log A + log-density of each vote (Eq. 15)."""
    root = state.precision_root
    z = (inner - state.mean.unsqueeze(1)) * root.unsqueeze(1)
    offset = -state.cost if state.logit is None else F.logsigmoid(state.logit) - state.cost
    return softmax(materialize(offset).unsqueeze(1) - 0.5 * sum_axis(z * z, 2), -1)


def _maximization(
    inner: Tensor,
    weights: Tensor | None,
    beta_a: Tensor | None,
    beta_mu: Tensor | None,
    temperature: float,
    floor: float,
) -> EMState:
    """Return mu, sigma^2 and A for fixed C (Eqs. 13-14; sigma^2 is the variance)."""
    heads, size, capsules = inner.shape[1:]
    if weights is None:
        total = inner.new_full((), heads / capsules)
        scale = 1.0 / total.clamp_min(floor)
        mean = materialize(inner.sum(1) * (scale / capsules))
        spread = (inner - mean.unsqueeze(1)).square().sum(1) * (scale / capsules)
    else:
        total = weights.sum(1)
        scale = 1.0 / total.clamp_min(floor)
        weighed = weights.unsqueeze(2)
        mean = materialize((weighed * inner).sum(1) * scale.unsqueeze(1))
        spread = (weighed * (inner - mean.unsqueeze(1)).square()).sum(1) * scale.unsqueeze(1)
    variance = spread.clamp_min(floor)
    cost = sum_axis(0.5 * variance.log(), 1)
    logit = None
    if beta_a is not None and beta_mu is not None:
        logit = temperature * (beta_a - total * (beta_mu + cost + size * _NATS_PER_DIMENSION))
    return EMState(weights, total, scale, mean, spread, materialize(variance.rsqrt()), cost, logit)


def _align_with_mean(per_capsule: Tensor) -> Tensor:
    """Return [T, N] as [T, 1, N], and a scalar unchanged."""
    return per_capsule if per_capsule.dim() == 0 else per_capsule.unsqueeze(1)


def _add(sum_so_far: Tensor | None, term: Tensor) -> Tensor:
    return term if sum_so_far is None else sum_so_far + term
