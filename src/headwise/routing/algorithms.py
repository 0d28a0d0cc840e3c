"""Routing by agreement (Li et al. 2021): votes, EM and simple routing of them, and their hand-derived gradients.

Votes are what each head proposes for each output capsule, in three parameterizations (Eqs. 8-9), each a frozen setting;
`Votes` is the module that holds the weights. They are a function of concatenated heads [T, H * e] and of plain weight
tensors, so that a backward pass can recompute them.

EM routing (Algorithm 2, Eqs. 12-15) is computed in log space. In simple routing (Algorithm 1, Eqs. 10-11) the agreement
B_hn is a sum of X . V over iterations, so it is (sum of X) . V: of earlier iterations only that sum is kept. Capsule
dimensions come before capsules, [T, H, c, N], so that the long axis is contiguous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import SettingError, require_integer


def sum_axis(tensor: Tensor, axis: int) -> Tensor:
    """Return the sum over an axis; an axis of length 1 is not summed, which would copy the whole tensor."""
    return tensor.squeeze(axis) if tensor.shape[axis] == 1 else tensor.sum(axis)


def materialize(tensor: Tensor) -> Tensor:
    """Return `tensor`, and make a compiler write it out here instead of recomputing it for every head."""
    if not torch.compiler.is_compiling() or torch.is_grad_enabled():
        return tensor
    tensor = tensor.contiguous()
    return tensor.as_strided(tensor.shape, tensor.stride())


def softmax(logits: Tensor, axis: int) -> Tensor:
    """Return the softmax over an axis; a compiler divides once for each sum, not for each weight."""
    weights = (logits - logits.amax(axis, keepdim=True)).exp()
    return weights * materialize(1.0 / weights.sum(axis, keepdim=True))


@dataclass(frozen=True)
class VoteWeight:
    """One weight of a parameterization, initialized uniformly in center +- bound.

    Attributes:
        shape: Shape of the parameter.
        center: Center of the interval.
        bound: Half the length of the interval; 0 for a constant.
    """

    shape: tuple[int, ...]
    center: float = 0.0
    bound: float = 0.0


class VoteSetting(Protocol):
    """A parameterization of the votes: any frozen dataclass with these two methods."""

    def weights(self, num_heads: int, head_size: int, width: int) -> dict[str, VoteWeight]:
        """Return the weights by name, in the order `compute` takes them."""
        ...

    def compute(self, heads: Tensor, num_heads: int, *weights: Tensor) -> Tensor:
        """Return the votes [T, H, d] of concatenated heads [T, H * e]."""
        ...


@dataclass(frozen=True)
class SharedTrunk:
    """Votes from one network shared by all heads: the form that matches the paper's parameter counts.

    V = W2 f(W1 LayerNorm(O) + b1) + b2 with O the concatenated heads, W1 [d, H e] and W2 [H d, d]. Each vote
    sees every head; a head is distinct only through its rows of W2 (Li et al. 2021 write a distinct f_h).

    Args:
        relu: Whether f is ReLU; False for the linear form, as in simple routing of the archived release.
    """

    relu: bool = True

    def weights(self, num_heads: int, head_size: int, width: int) -> dict[str, VoteWeight]:
        """Return the weights by name, in the order `compute` takes them."""
        joined = num_heads * head_size
        return {
            "norm_weight": VoteWeight((joined,), center=1.0),
            "norm_bias": VoteWeight((joined,)),
            "trunk_weight": _uniform_weight(joined, width, joined),
            "trunk_bias": _uniform_weight(joined, width),
            "vote_weight": _uniform_weight(width, num_heads * width, width),
            "vote_bias": _uniform_weight(width, num_heads * width),
        }

    def compute(self, heads: Tensor, num_heads: int, *weights: Tensor) -> Tensor:
        """Return the votes [T, H, d] of concatenated heads [T, H * e]."""
        norm_weight, norm_bias, trunk_weight, trunk_bias, vote_weight, vote_bias = weights
        hidden = F.layer_norm(heads, heads.shape[-1:], norm_weight, norm_bias)
        hidden = F.linear(hidden, trunk_weight, trunk_bias)
        hidden = F.relu(hidden) if self.relu else hidden
        return F.linear(hidden, vote_weight, vote_bias).unflatten(-1, (num_heads, -1))


@dataclass(frozen=True)
class PerHead:
    """Votes of each head from its own output only, through two layers: V_h = W2_h ReLU(W1_h O_h + b1_h) + b2_h.

    W1_h is [d, e] and W2_h is [d, d] (Li et al. 2021, Eqs. 8-9, with f_h applied to head h only).
    """

    def weights(self, num_heads: int, head_size: int, width: int) -> dict[str, VoteWeight]:
        """Return the weights by name, in the order `compute` takes them."""
        return {
            "hidden_weight": _uniform_weight(head_size, num_heads, width, head_size),
            "hidden_bias": _uniform_weight(head_size, num_heads, width),
            "vote_weight": _uniform_weight(width, num_heads, width, width),
            "vote_bias": _uniform_weight(width, num_heads, width),
        }

    def compute(self, heads: Tensor, num_heads: int, *weights: Tensor) -> Tensor:
        """Return the votes [T, H, d] of concatenated heads [T, H * e]."""
        hidden_weight, hidden_bias, vote_weight, vote_bias = weights
        by_head = heads.unflatten(-1, (num_heads, -1)).transpose(0, 1)
        # product and bias in one call: under autocast their sum would be float32
        hidden = F.relu(torch.baddbmm(hidden_bias.unsqueeze(1), by_head, hidden_weight.mT))
        return torch.baddbmm(vote_bias.unsqueeze(1), hidden, vote_weight.mT).transpose(0, 1)


@dataclass(frozen=True)
class DistinctCapsules:
    """Votes exactly as in Li et al. 2021, Eqs. 8-9: X_h = ReLU(F_h O + b_h) in R^e, V_h = W_h X_h.

    F_h is [e, H e] and acts on the concatenated heads O; W_h is [d, e], without a bias.
    """

    def weights(self, num_heads: int, head_size: int, width: int) -> dict[str, VoteWeight]:
        """Return the weights by name, in the order `compute` takes them."""
        joined = num_heads * head_size
        return {
            "capsule_weight": _uniform_weight(joined, joined, joined),
            "capsule_bias": _uniform_weight(joined, joined),
            "vote_weight": _uniform_weight(head_size, num_heads, width, head_size),
        }

    def compute(self, heads: Tensor, num_heads: int, *weights: Tensor) -> Tensor:
        """Return the votes [T, H, d] of concatenated heads [T, H * e]."""
        capsule_weight, capsule_bias, vote_weight = weights
        inputs = F.relu(F.linear(heads, capsule_weight, capsule_bias))
        by_head = inputs.unflatten(-1, (num_heads, -1)).transpose(0, 1)
        return (by_head @ vote_weight.mT).transpose(0, 1)


class Votes(nn.Module):
    """A module that computes votes [T, H, N, c] from concatenated heads [T, H * e].

    The weights are direct parameters, not `nn.Linear` children: an aggregator recomputes votes from the tensors
    alone, and a hook on a child would never be called.

    Args:
        setting: The parameterization.
        num_heads: Heads H.
        head_size: Width e of one head.
        width: Width d = N * c of the aggregated output.
        capsules: Output capsules N; must divide d.

    Raises:
        SettingError: A size is not a positive integer, or N does not divide d.

    Example:
        >>> votes = Votes(SharedTrunk(), num_heads=2, head_size=4, width=8, capsules=4)
        >>> votes(torch.randn(3, 8)).shape
        torch.Size([3, 2, 4, 2])
    """

    def __init__(self, setting: VoteSetting, num_heads: int, head_size: int, width: int, capsules: int) -> None:
        super().__init__()
        sizes = {"num_heads": num_heads, "head_size": head_size, "width": width, "capsules": capsules}
        for name, value in sizes.items():
            require_integer(name, value, low=1)
        if width % capsules != 0:
            raise SettingError(f"capsules is {capsules} and the output width {width}; expected a divisor of the width.")
        self.setting, self.num_heads, self.head_size = setting, num_heads, head_size
        self.width, self.capsules = width, capsules
        self._drawn = setting.weights(num_heads, head_size, width)
        for name, weight in self._drawn.items():
            self.register_parameter(name, nn.Parameter(torch.empty(weight.shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weights again, as `nn.Linear` and `nn.LayerNorm` do."""
        for name, weight in self._drawn.items():
            low, high = weight.center - weight.bound, weight.center + weight.bound
            nn.init.uniform_(self.get_parameter(name), low, high)

    def weights(self) -> tuple[Tensor, ...]:
        """Return the weights in the order `compute` takes them."""
        return tuple(getattr(self, name) for name in self._drawn)

    def compute(self, heads: Tensor, *weights: Tensor) -> Tensor:
        """Return the votes [T, H, N, c] of concatenated heads [T, H * e] under the given weights."""
        votes = self.setting.compute(heads, self.num_heads, *weights)
        return votes.unflatten(-1, (self.capsules, -1))

    def forward(self, heads: Tensor) -> Tensor:
        """Return the votes [T, H, N, c] of concatenated heads [T, H * e]."""
        return self.compute(heads, *self.weights())

    def extra_repr(self) -> str:
        """Return the setting and the sizes, for printing."""
        return (
            f"{self.setting}, num_heads={self.num_heads}, head_size={self.head_size}, "
            f"capsules={self.capsules}, capsule_size={self.width // self.capsules}"
        )


def _uniform_weight(fan_in: int, *shape: int) -> VoteWeight:
    return VoteWeight(shape, bound=1.0 / math.sqrt(fan_in))


def full_precision(tensor: Tensor) -> Tensor:
    """Return a tensor in the precision of routing: float64 unchanged, any other dtype as float32.

    >>> full_precision(torch.zeros(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return tensor if tensor.dtype == torch.float64 else tensor.float()


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
        """Write the gradient of the votes into `into`; return the gradients of the betas that are given."""
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
