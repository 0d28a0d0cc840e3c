"""Settings of routing by agreement, and public functions from votes [T, H, N, c] to output capsules.

Simple routing (Li et al. 2021, Algorithm 1), EM routing (Algorithm 2) and the mean of the votes (the control: the
same votes with uniform weights).
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headwise.errors import (
    SettingError,
    ShapeError,
    require_boolean,
    require_choice,
    require_integer,
    require_range,
    require_shape,
)
from headwise.routing.em import em_forward, em_schedule
from headwise.routing.simple import simple_forward
from headwise.routing.votes import SharedTrunk, VoteSetting, full_precision


@dataclass(frozen=True)
class Chunks:
    """How an aggregator splits its tokens into chunks; affects time and memory, and values only by rounding.

    Votes are H times as large as the heads, so they are computed for a few tokens at a time and recomputed in the
    backward pass; only the input is kept between the two.

    Args:
        tokens: Number of tokens whose votes exist at once, at least 1. Default: about 2^21 votes on a CPU and 2^24
            elsewhere.
        routed: Number of tokens routed at once, at least 1. Default: about 2^17 votes on a CPU, which fit in its
            cache, and 2^24 elsewhere.
        compile: Whether the routing of a chunk is compiled with `torch.compile`: half a minute once per process, then
            several times faster. If that fails, for example without a C++ compiler, a warning is logged and the plain
            kernel is used.
        fused: Whether routing on a GPU runs as a Triton program, if Triton is installed: all iterations of a token are
            one program, and no other tensor of the size of the votes is made. The first call of each shape is compared
            with the plain kernel on a few tokens; if they differ, or Triton fails, a warning is logged and the plain
            kernel is used. Independent of `compile`.
    """

    tokens: int | None = None
    routed: int | None = None
    compile: bool = False
    # the choice of kernel is not part of the records of runs
    fused: bool = field(default=True, metadata={"recorded": False})

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("routed", self.routed)):
            if value is not None:
                require_integer(name, value, low=1)

    def sizes(self, device_type: str, votes: int) -> tuple[int, int]:
        """Return (tokens, routed) for a device type, such as "cpu", and the number H * d of votes per token."""
        held, routed = (2**21, 2**17) if device_type == "cpu" else (2**24, 2**24)
        return self.tokens or max(held // votes, 1), self.routed or max(routed // votes, 1)


@dataclass(frozen=True)
class SimpleRouting:
    """Simple routing by agreement.

    B = 0; T times: C = softmax(B), X_n = squash(sum_h C_hn V_hn / sum_h C_hn), B_hn += X_n . V_hn
    (Li et al. 2021, Algorithm 1, Eqs. 10-11).

    Args:
        iterations: T, at least 1.
        capsules: Number of output capsules N, a divisor of the width d. Default: N = d, capsules of one number, for
            which the squash is sign(s) s^2 / (1 + s^2).
        softmax_over: "capsules" as in the paper (sum_n C_hn = 1), or "heads" as in the archived release
            (sum_h C_hn = 1).
        floor: Lower bound of sum_h C_hn, also added to |s|^2 under the square root of the squash; in (0, 1e-4].
        votes: How votes are computed.
        chunks: How tokens are split into chunks.
    """

    iterations: int = 3
    capsules: int | None = None
    softmax_over: Literal["capsules", "heads"] = "capsules"
    floor: float = 1e-9
    votes: VoteSetting = field(default_factory=SharedTrunk)
    chunks: Chunks = field(default_factory=Chunks)

    def __post_init__(self) -> None:
        require_integer("iterations", self.iterations, low=1)
        _require_capsules(self.capsules)
        require_choice("softmax_over", self.softmax_over, ("capsules", "heads"))
        require_range("floor", self.floor, low=0.0, high=1e-4, low_open=True)
        _require_votes(self.votes)
        _require_chunks(self.chunks)


@dataclass(frozen=True)
class EMRouting:
    """EM routing by agreement: output capsules are Gaussians fitted to the votes.

    C = 1/N; T times an M-step, mu_n = sum_h C V / sum_h C and sigma_n^2 the variance about it (Li et al. 2021,
    Eqs. 13-14), A_n = logistic(lambda_t (beta_A - beta_mu sum_h C_hn - chi_n)) with
    chi_n = sum_h C_hn sum_i (1/2 log sigma_ni^2 + (1 + log 2 pi) / 2); between the M-steps an E-step,
    C_hn proportional to A_n N(V_hn; mu_n, sigma_n^2) over n (Eq. 15). X_n = A_n mu_n (Eq. 12). The paper uses
    sigma both as a deviation and as a variance, and writes the density as a sum over dimensions; here sigma^2 is the
    variance, and the density is a product. The E-step after the last M-step has no effect and is skipped.

    Args:
        iterations: T, at least 1.
        capsules: Number of output capsules N, a divisor of the width d. Default: N = d, capsules of one number, whose
            activations are all close to 1/2.
        activation: Whether A_n is used, with beta_A and beta_mu learned per capsule. False: X_n = mu_n, as in the
            archived release.
        inverse_temperature: lambda_1 and lambda_T; linear between them. T = 1 uses the first.
        floor: Lower bound of the variance and of sum_h C_hn, in (0, 1e-4].
        votes: How votes are computed.
        chunks: How tokens are split into chunks.
    """

    iterations: int = 3
    capsules: int | None = None
    activation: bool = True
    inverse_temperature: tuple[float, float] = (1.0, 3.0)
    floor: float = 1e-6
    votes: VoteSetting = field(default_factory=SharedTrunk)
    chunks: Chunks = field(default_factory=Chunks)

    def __post_init__(self) -> None:
        require_integer("iterations", self.iterations, low=1)
        _require_capsules(self.capsules)
        require_boolean("activation", self.activation)
        if not isinstance(self.inverse_temperature, tuple) or len(self.inverse_temperature) != 2:
            raise SettingError(f"inverse_temperature is {self.inverse_temperature!r}; expected a pair (first, last).")
        for value in self.inverse_temperature:
            require_range("inverse_temperature", value, low=0.0, low_open=True)
        require_range("floor", self.floor, low=0.0, high=1e-4, low_open=True)
        _require_votes(self.votes)
        _require_chunks(self.chunks)

    @property
    def schedule(self) -> tuple[float, ...]:
        """The inverse temperature of each iteration."""
        return em_schedule(self.iterations, *self.inverse_temperature)


@dataclass(frozen=True)
class Trunk:
    """No routing: each output capsule is the mean of the heads' votes (C uniform in Li et al. 2021, Eq. 10).

    The control for routing: the same votes and the same number of parameters, without agreement.

    Args:
        capsules: Number of output capsules N, a divisor of the width d. Default: N = d. Affects the shape only.
        votes: How votes are computed.
        chunks: How tokens are split into chunks.
    """

    capsules: int | None = None
    votes: VoteSetting = field(default_factory=SharedTrunk)
    chunks: Chunks = field(default_factory=Chunks)

    def __post_init__(self) -> None:
        _require_capsules(self.capsules)
        _require_votes(self.votes)
        _require_chunks(self.chunks)


class Routed(NamedTuple):
    """The result of routing.

    Attributes:
        capsules: X, [T, N, c].
        weights: C of the last iteration, [T, H, N].
        activations: A of the last iteration, [T, N]; None for routing without activations.
    """

    capsules: Tensor
    weights: Tensor
    activations: Tensor | None


def simple_routing(votes: Tensor, setting: SimpleRouting) -> Routed:
    """Return the capsules of simple routing (Li et al. 2021, Algorithm 1), differentiable by autograd.

    Half-precision votes are routed in float32.

    Args:
        votes: V, [T, H, N, c].
        setting: Iterations, softmax axis and floor.

    Returns:
        Capsules [T, N, c] and their weights [T, H, N].

    Raises:
        ShapeError: `votes` is not a floating-point tensor with four axes.

    Example:
        >>> routed = simple_routing(torch.randn(5, 4, 6, 2), SimpleRouting(iterations=2))
        >>> routed.capsules.shape, torch.allclose(routed.weights.sum(-1), torch.ones(5, 4))
        (torch.Size([5, 6, 2]), True)
    """
    votes = _prepare_votes(votes)
    capsules, weights = simple_forward(votes, setting.iterations, setting.softmax_over == "capsules", setting.floor)
    return Routed(capsules, weights, None)


def em_routing(
    votes: Tensor, setting: EMRouting, beta_a: Tensor | None = None, beta_mu: Tensor | None = None
) -> Routed:
    """Return the capsules of EM routing (Li et al. 2021, Algorithm 2), differentiable by autograd.

    Half-precision votes are routed in float32, where votes must not exceed about 1e18: their squares must be finite.

    Args:
        votes: V, [T, H, N, c].
        setting: Iterations, activations, inverse temperatures and floor.
        beta_a: beta_A, cost of coding an active capsule, [N]; only with `setting.activation`.
        beta_mu: beta_mu, cost of each assigned vote, [N]; only with `setting.activation`.

    Returns:
        Capsules [T, N, c], their weights [T, H, N], and activations [T, N] or None.

    Raises:
        ShapeError: `votes` is not a floating-point tensor with four axes, or a beta is not [N].
        SettingError: The betas are missing with activations, or given without.

    Example:
        >>> routed = em_routing(torch.randn(5, 4, 6, 2), EMRouting(activation=False))
        >>> routed.capsules.shape, torch.allclose(routed.weights.sum(-1), torch.ones(5, 4))
        (torch.Size([5, 6, 2]), True)
    """
    votes = _prepare_votes(votes)
    if setting.activation != (beta_a is not None) or setting.activation != (beta_mu is not None):
        raise SettingError(
            f"activation is {setting.activation} and beta_a, beta_mu are "
            f"{'missing' if beta_a is None else 'given'}, {'missing' if beta_mu is None else 'given'}; "
            "expected both with activation=True and neither with activation=False."
        )
    for name, beta in (("beta_a", beta_a), ("beta_mu", beta_mu)):
        if beta is not None:
            require_shape(name, beta, (votes.shape[2],))
    beta_a, beta_mu = (None if b is None else b.to(votes.dtype) for b in (beta_a, beta_mu))
    capsules, states = em_forward(votes, beta_a, beta_mu, setting.schedule, setting.floor)
    last = states[-1]
    uniform = votes.new_full(votes.shape[:3], 1.0 / votes.shape[2])
    return Routed(
        capsules,
        uniform if last.weights is None else last.weights,
        None if last.logit is None else torch.sigmoid(last.logit),
    )


def uniform_routing(votes: Tensor) -> Routed:
    """Return the mean of the heads' votes (Li et al. 2021, Eq. 10 with C = 1/N).

    Args:
        votes: V, [T, H, N, c].

    Returns:
        Capsules [T, N, c] and weights 1/N, [T, H, N].

    Raises:
        ShapeError: `votes` is not a floating-point tensor with four axes.

    Example:
        >>> uniform_routing(torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)).capsules
        tensor([[[2.]]])
    """
    votes = _prepare_votes(votes)
    return Routed(votes.mean(1), votes.new_full(votes.shape[:3], 1.0 / votes.shape[2]), None)


def _prepare_votes(votes: Tensor) -> Tensor:
    require_shape("votes", votes, (None, None, None, None))
    if not torch.is_floating_point(votes):
        raise ShapeError(f"votes has dtype {votes.dtype}; expected a floating-point dtype.")
    if 0 in votes.shape[1:]:
        raise ShapeError(f"votes has shape {tuple(votes.shape)}; expected at least one head, capsule and number.")
    return full_precision(votes)


def _require_capsules(capsules: int | None) -> None:
    if capsules is not None:
        require_integer("capsules", capsules, low=1)


def _require_votes(votes: VoteSetting) -> None:
    methods = (getattr(votes, name, None) for name in ("weights", "compute"))
    if isinstance(votes, type) or not all(map(callable, methods)):
        raise SettingError(
            f"votes is {votes!r:.60}; expected for example SharedTrunk(), PerHead() or DistinctCapsules()."
        )


def _require_chunks(chunks: Chunks) -> None:
    if not isinstance(chunks, Chunks):
        raise SettingError(f"chunks is {chunks!r:.60}; expected for example Chunks(tokens=64).")
