"""Modules that aggregate concatenated heads, [..., H * e] to [..., d], their frozen settings, and the routing itself.

Simple routing (Li et al. 2021, Algorithm 1), EM routing (Algorithm 2) and the mean of the votes (the control: the
same votes with uniform weights).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from headwise.errors import SettingError, ShapeError, require_positive, require_range, require_shape
from headwise.routing.algorithms import (
    EMKernel,
    SharedTrunk,
    SimpleKernel,
    Votes,
    VoteSetting,
    em_forward,
    em_schedule,
    full_precision,
    simple_forward,
)
from headwise.routing.chunked import Kernel, compile_kernel, route_in_chunks
from headwise.routing.fused import fuse_kernel, runs_on
from headwise.settings import Count, check_fields


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

    tokens: Count | None = None
    routed: Count | None = None
    compile: bool = False
    # the choice of kernel is not part of the records of runs
    fused: bool = field(default=True, metadata={"recorded": False})

    __post_init__ = check_fields

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

    iterations: Count = 3
    capsules: Count | None = None
    softmax_over: Literal["capsules", "heads"] = "capsules"
    floor: Annotated[float, partial(require_range, low=0.0, high=1e-4, low_open=True)] = 1e-9
    votes: Annotated[VoteSetting, _require_votes] = field(default_factory=SharedTrunk)
    chunks: Annotated[Chunks, _require_chunks] = field(default_factory=Chunks)

    __post_init__ = check_fields


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

    iterations: Count = 3
    capsules: Count | None = None
    activation: bool = True
    inverse_temperature: Annotated[tuple[float, float], _require_temperatures] = (1.0, 3.0)
    floor: Annotated[float, partial(require_range, low=0.0, high=1e-4, low_open=True)] = 1e-6
    votes: Annotated[VoteSetting, _require_votes] = field(default_factory=SharedTrunk)
    chunks: Annotated[Chunks, _require_chunks] = field(default_factory=Chunks)

    __post_init__ = check_fields

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

    capsules: Count | None = None
    votes: Annotated[VoteSetting, _require_votes] = field(default_factory=SharedTrunk)
    chunks: Annotated[Chunks, _require_chunks] = field(default_factory=Chunks)

    __post_init__ = check_fields


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
    activations = None if last.logit is None else torch.sigmoid(last.logit)
    return Routed(capsules, uniform if last.weights is None else last.weights, activations)


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


def _require_temperatures(name: str, temperatures: tuple[float, float]) -> None:
    if not isinstance(temperatures, tuple) or len(temperatures) != 2:
        raise SettingError(f"{name} is {temperatures!r}; expected a pair (first, last).")
    for value in temperatures:
        require_positive(name, value)


def _require_votes(name: str, votes: VoteSetting) -> None:
    methods = (getattr(votes, method, None) for method in ("weights", "compute"))
    if isinstance(votes, type) or not all(map(callable, methods)):
        raise SettingError(
            f"{name} is {votes!r:.60}; expected for example SharedTrunk(), PerHead() or DistinctCapsules()."
        )


def _require_chunks(name: str, chunks: Chunks) -> None:
    if not isinstance(chunks, Chunks):
        raise SettingError(f"{name} is {chunks!r:.60}; expected for example Chunks(tokens=64).")


Routing = SimpleRouting | EMRouting | Trunk
S = TypeVar("S", bound=Routing)


@dataclass(frozen=True)
class Residual:
    """Routing added to the projection a model already has: output = W_O O + gamma routed(O), gamma = 0 at first.

    For pretrained models, which a new aggregator would disturb; ours, not in Li et al. 2021.

    Args:
        routing: What is added.
    """

    routing: Routing

    def __post_init__(self) -> None:
        if isinstance(self.routing, Residual):
            raise SettingError("routing is itself a Residual; expected SimpleRouting, EMRouting or Trunk.")
        require_setting(self.routing)


@dataclass(frozen=True)
class Gate:
    """A learned weight per head before the projection a model already has: output = W_O [g_1 O_1 ... g_H O_H].

    g = H softmax(a), where the vector a has one learned number per head and starts at 0: every g_h is then 1 and the
    model is unchanged. Wang et al. 2021 mention "a weighted gate layer to aggregate the heads" (section 3) without an
    equation, and their code has none; the form is ours.
    """


class _VoteAggregator(nn.Module, Generic[S]):
    """Votes, and the routing of a setting over them."""

    def __init__(self, setting: S, num_heads: int, head_size: int, width: int) -> None:
        super().__init__()
        self.setting = setting
        capsules = width if setting.capsules is None else setting.capsules
        self.votes = Votes(setting.votes, num_heads, head_size, width, capsules)

    def reset_parameters(self) -> None:
        """Initialize all weights again."""
        self.votes.reset_parameters()

    def forward(self, heads: Tensor) -> Tensor:
        """Return the aggregated heads [..., d] of concatenated heads [..., H * e].

        Raises:
            ShapeError: The last axis of `heads` is not H * e.
        """
        votes, betas = self.votes, self._betas()
        _require_heads(heads, votes.num_heads, votes.head_size)
        rows = heads.reshape(heads.shape[:-1].numel(), heads.shape[-1])
        if len(rows) == 0:
            # nothing to route, but every weight takes part: its gradient is 0, not None
            parts = torch.stack([tensor.flatten()[:0].sum() for tensor in (heads, *votes.weights(), *betas)])
            return heads.new_zeros(*heads.shape[:-1], votes.width) + parts.sum()
        kernel, pad = self._choose_kernel(heads)
        sizes = self.setting.chunks.sizes(heads.device.type, votes.num_heads * votes.width)
        routed = route_in_chunks(rows, votes.weights(), betas, votes.compute, kernel, sizes, pad=pad)
        return routed.reshape(*heads.shape[:-1], votes.width)

    def _betas(self) -> tuple[Tensor, ...]:
        return ()

    def _choose_kernel(self, heads: Tensor) -> tuple[Kernel, bool]:
        """Return the fastest kernel that runs here, and whether its chunks are padded to a few sizes."""
        setting: Routing = self.setting
        if isinstance(setting, Trunk):
            return MeanKernel(), False
        if isinstance(setting, SimpleRouting):
            kernel = SimpleKernel(setting.iterations, setting.softmax_over == "capsules", setting.floor)
        else:
            kernel = EMKernel(setting.schedule, setting.floor)
        if torch.compiler.is_compiling():
            return kernel, False
        if setting.chunks.fused and runs_on(heads.device):
            return fuse_kernel(kernel), False
        return (compile_kernel(kernel), True) if setting.chunks.compile else (kernel, False)


class SimpleAggregator(_VoteAggregator[SimpleRouting]):
    """Votes and simple routing: H heads of e numbers, [..., H * e], to [..., width] (Li et al. 2021, Algorithm 1).

    Only the input is kept for the backward pass; differentiable once.

    Raises:
        SettingError: The number of capsules does not divide `width`, or a size is not a positive integer.

    Example:
        >>> SimpleAggregator(SimpleRouting(), num_heads=2, head_size=4, width=8)(torch.randn(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """


class EMAggregator(_VoteAggregator[EMRouting]):
    """Votes and EM routing: heads [..., H * e] to [..., d] (Li et al. 2021, Algorithm 2).

    Arguments and errors are those of `SimpleAggregator`. Only the input is kept for the backward pass; differentiable
    once. `beta_a` and `beta_mu` [N] are learned and start as N(0, 1/d); they are None without activations.

    Example:
        >>> EMAggregator(EMRouting(capsules=4), num_heads=2, head_size=4, width=8)(torch.randn(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """

    def __init__(self, setting: EMRouting, num_heads: int, head_size: int, width: int) -> None:
        super().__init__(setting, num_heads, head_size, width)
        learned = self.votes.capsules if setting.activation else None
        self.beta_a = None if learned is None else nn.Parameter(torch.empty(learned))
        self.beta_mu = None if learned is None else nn.Parameter(torch.empty(learned))
        self._reset_betas()

    def reset_parameters(self) -> None:
        """Initialize the weights and the betas again."""
        super().reset_parameters()
        self._reset_betas()

    def _reset_betas(self) -> None:
        for beta in self._betas():
            nn.init.normal_(beta, std=self.votes.width**-0.5)

    def _betas(self) -> tuple[Tensor, ...]:
        return () if self.beta_a is None or self.beta_mu is None else (self.beta_a, self.beta_mu)


@dataclass(frozen=True)
class MeanKernel:
    """Routing with uniform weights: the mean over heads, which needs no compiler."""

    def forward(self, votes: Tensor, *_weights: Tensor) -> Tensor:
        """Return the capsules [T, N, c]."""
        return full_precision(votes).mean(1)

    def gradient(self, votes: Tensor, grad: Tensor, into: Tensor, *_weights: Tensor) -> tuple[Tensor, ...]:
        """Write the gradient of the votes into `into`; there are no weights."""
        into.copy_((grad / votes.shape[1]).unsqueeze(1))
        return ()


class TrunkAggregator(_VoteAggregator[Trunk]):
    """The votes of the routing aggregators with uniform weights: heads [..., H * e] to [..., d]; the control.

    Arguments and errors are those of `SimpleAggregator`.

    Example:
        >>> TrunkAggregator(Trunk(), num_heads=2, head_size=4, width=8)(torch.randn(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """


class ResidualAggregator(nn.Module):
    """The old projection, which is kept, plus gamma times an aggregator; equal to that while gamma is 0."""

    def __init__(self, projection: nn.Module, aggregator: nn.Module) -> None:
        super().__init__()
        self.projection, self.aggregator = projection, aggregator
        # a vector of one number: fully_shard takes no scalars
        self.gamma = nn.Parameter(torch.zeros(1))

    def reset_parameters(self) -> None:
        """Set gamma to 0 and initialize the aggregator again; the old projection is unchanged."""
        nn.init.zeros_(self.gamma)
        reset = getattr(self.aggregator, "reset_parameters", None)
        if callable(reset):
            reset()

    def forward(self, heads: Tensor) -> Tensor:
        """Return W_O O + gamma routed(O), [..., d], of concatenated heads [..., H * e]."""
        old = self.projection(heads)
        # under autocast gamma would make the sum float32
        return old + (self.gamma * self.aggregator(heads)).to(old.dtype)


class GatedProjection(nn.Module):
    """A gate over the heads and the old projection, which it keeps; equal to that while the gate is 0.

    Example:
        >>> gated = GatedProjection(Gate(), nn.Linear(6, 4), num_heads=3, head_size=2, width=4)
        >>> gated.weights().tolist(), gated(torch.randn(5, 6)).shape
        ([1.0, 1.0, 1.0], torch.Size([5, 4]))
    """

    def __init__(self, setting: Gate, projection: nn.Module, num_heads: int, head_size: int, width: int) -> None:
        super().__init__()
        self.setting, self.projection = setting, projection
        self.num_heads, self.head_size, self.width = num_heads, head_size, width
        self.gate = nn.Parameter(torch.zeros(num_heads))

    def reset_parameters(self) -> None:
        """Set the gate to 0; the old projection is unchanged."""
        nn.init.zeros_(self.gate)

    def weights(self) -> Tensor:
        """Return g = H softmax(a), [H]."""
        return self.num_heads * torch.softmax(full_precision(self.gate), dim=0)

    def forward(self, heads: Tensor) -> Tensor:
        """Return W_O [g_1 O_1 ... g_H O_H], [..., d], of concatenated heads [..., H * e].

        Raises:
            ShapeError: The last axis of `heads` is not H * e.
        """
        _require_heads(heads, self.num_heads, self.head_size)
        weighted = heads.unflatten(-1, (self.num_heads, self.head_size)) * self.weights().to(heads.dtype)[:, None]
        return self.projection(weighted.flatten(-2))


Aggregator = SimpleAggregator | EMAggregator | TrunkAggregator | ResidualAggregator | GatedProjection
Setting = Routing | Residual | Gate


def build(
    setting: Setting, num_heads: int, head_size: int, width: int, projection: nn.Module | None = None
) -> Aggregator:
    """Return a new aggregator, with parameters of dtype float32 on the default device.

    Args:
        setting: The routing, `Residual` of one, or `Gate`.
        num_heads: Heads H.
        head_size: Width e of one head.
        width: Width d of the output.
        projection: The projection that `Residual` and `Gate` keep; None for the others, which replace it.

    Raises:
        SettingError: `setting` is none of these; the number of capsules does not divide `width`; or `projection` is
            missing or not needed.

    Example:
        >>> build(Trunk(), num_heads=2, head_size=4, width=8)(torch.randn(5, 8)).shape
        torch.Size([5, 8])
    """
    if isinstance(setting, Residual | Gate) != (projection is not None):
        wanted = "the projection it keeps" if projection is None else "no projection: it is replaced"
        raise SettingError(
            f"{type(setting).__name__} was given projection={type(projection).__name__}; expected {wanted}."
        )
    if isinstance(setting, Residual) and projection is not None:
        return ResidualAggregator(projection, build(setting.routing, num_heads, head_size, width))
    if isinstance(setting, Gate) and projection is not None:
        return GatedProjection(setting, projection, num_heads, head_size, width)
    require_setting(setting)
    kinds: dict[type, Any] = {SimpleRouting: SimpleAggregator, EMRouting: EMAggregator, Trunk: TrunkAggregator}
    kind = next(kind for cls, kind in kinds.items() if isinstance(setting, cls))
    return kind(setting, num_heads, head_size, width)


def require_setting(setting: Setting) -> None:
    """Raise `SettingError` unless `setting` is one that `build` takes."""
    if not isinstance(setting, Setting):
        raise SettingError(
            f"the setting is a {type(setting).__name__}; expected SimpleRouting, EMRouting, Trunk, Residual of one "
            "of them, or Gate."
        )


def _require_heads(heads: Tensor, num_heads: int, head_size: int) -> None:
    if heads.shape[-1:] != (num_heads * head_size,):
        raise ShapeError(
            f"heads has shape {tuple(heads.shape)}; expected {num_heads} heads of {head_size} numbers, "
            f"{num_heads * head_size} on the last axis."
        )
