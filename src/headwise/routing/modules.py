"""Modules that aggregate concatenated heads, [..., H * e] to [..., d], each built from a frozen setting."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from headwise.errors import SettingError, ShapeError
from headwise.routing.chunked import Kernel, compile_kernel, route_in_chunks
from headwise.routing.em import EMKernel
from headwise.routing.fused import fuse_kernel, runs_on
from headwise.routing.settings import EMRouting, SimpleRouting, Trunk
from headwise.routing.simple import SimpleKernel
from headwise.routing.votes import Votes, full_precision

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
    """Votes and simple routing: heads [..., H * e] to [..., d] (Li et al. 2021, Algorithm 1).

    Only the input is kept for the backward pass; differentiable once.

    Args:
        setting: The routing.
        num_heads: Heads H.
        head_size: Width e of one head.
        width: Width d of the output; the number of capsules must divide it.

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
    """The old projection plus gamma times an aggregator; equal to the old projection while gamma is 0.

    Args:
        projection: The module that computed W_O; kept, with its weights.
        aggregator: The module whose output is added.
    """

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
    """A gate over the heads and the old projection; equal to the old projection while the gate is 0.

    Args:
        setting: The gate.
        projection: The module that computed W_O; kept, with its weights.
        num_heads: Heads H.
        head_size: Width e of one head.
        width: Width d of the output.

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
    setting: Setting,
    num_heads: int,
    head_size: int,
    width: int,
    projection: nn.Module | None = None,
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
    if isinstance(setting, SimpleRouting):
        return SimpleAggregator(setting, num_heads, head_size, width)
    if isinstance(setting, EMRouting):
        return EMAggregator(setting, num_heads, head_size, width)
    assert isinstance(setting, Trunk)
    return TrunkAggregator(setting, num_heads, head_size, width)


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
