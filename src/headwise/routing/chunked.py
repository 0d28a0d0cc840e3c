"""Votes and routing over chunks of tokens, recomputed in the backward pass.

Votes are H times as large as the heads they come from, and routing makes several tensors of that size. Here
they exist for one chunk of tokens at a time, and only the concatenated heads are kept for the backward pass.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.routing.algorithms import full_precision

_logger = logging.getLogger(__name__)

# Least number of votes that a chunk is padded to for a compiled kernel: what a CPU keeps in cache.
MIN_PADDED_VOTES = 2**17


class Kernel(Protocol):
    """Routing of one chunk of votes, and its gradient; hashable by value, so that it is compiled once.

    Votes, the gradient of the capsules and `into` may be in half precision; the computation is in float32 or higher.
    """

    def forward(self, votes: Tensor, *weights: Tensor) -> Tensor:
        """Return the capsules [t, N, c] of votes [t, H, N, c]."""
        ...

    def gradient(self, votes: Tensor, grad: Tensor, into: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """Given the gradient of the capsules, write the votes' into `into` and return the weights' gradients."""
        ...


def route_in_chunks(
    heads: Tensor,
    vote_weights: Sequence[Tensor],
    routing_weights: Sequence[Tensor],
    votes: Callable[..., Tensor],
    kernel: Kernel,
    sizes: tuple[int, int],
    *,
    pad: bool,
) -> Tensor:
    """Return the routed capsules [T, N * c] of heads [T, H * e], keeping only the heads for the backward pass.

    Inside a model that is itself compiled, all tokens are routed at once and the compiler decides what is kept.
    Differentiable once, with respect to `heads` and all weights. Routing runs in float32, or in float64 if the
    votes are float64. Under autocast, votes are computed in the autocast dtype in both passes.

    `votes` maps heads [t, H * e] and its weights to votes [t, H, N, c]; `sizes` are the numbers of tokens whose votes
    exist at once and that are routed at once; with `pad`, a compiled kernel sees few shapes.

    Raises:
        HeadwiseError: In the backward pass, when it runs with create_graph=True.
    """
    if torch.compiler.is_compiling():
        # the compiler of the user's model sees one graph and decides what is kept
        whole = votes(heads, *vote_weights)
        with _autocast(heads, None):
            routed = kernel.forward(whole, *_cast_weights(whole, routing_weights))
        return routed.flatten(1).to(whole.dtype)
    plan = _Plan(votes, kernel, sizes, pad, len(vote_weights))
    return _Chunked.apply(plan, heads, *vote_weights, *routing_weights)


@dataclass(frozen=True)
class _Plan:
    votes: Callable[..., Tensor]
    kernel: Kernel
    sizes: tuple[int, int]
    pad: bool
    vote_weights: int


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, heads: Tensor, *weights: Tensor) -> Tensor:
        kind = heads.device.type
        ctx.plan, ctx.autocast = plan, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        ctx.save_for_backward(heads, *weights)
        vote_weights, routing_weights = weights[: plan.vote_weights], weights[plan.vote_weights :]
        outputs = []
        for rows in heads.split(plan.sizes[0]):
            with _autocast(heads, ctx.autocast):
                votes = plan.votes(rows, *vote_weights)
            routing = _cast_weights(votes, routing_weights)
            output = votes.new_empty(votes.shape[0], votes.shape[2] * votes.shape[3])
            with _autocast(heads, None):
                for part in _slice(len(votes), plan.sizes[1]):
                    chunk = _pad(votes[part], _choose_length(votes[part], plan))
                    capsules = plan.kernel.forward(chunk, *routing).flatten(1)
                    output[part] = capsules[: part.stop - part.start]
            outputs.append(output)
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise HeadwiseError(
                "the backward pass of an aggregator ran with create_graph=True; aggregators are differentiable once, "
                "so compute the gradient without it."
            )
        return _backpropagate(ctx, *grad_outputs)


def _backpropagate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    plan: _Plan = ctx.plan
    heads, *weights = ctx.saved_tensors
    need_heads, *need_weights = ctx.needs_input_grad[1:]
    leaves = [weight.detach().requires_grad_(need) for weight, need in zip(weights, need_weights, strict=True)]
    vote_leaves, routing_weights = leaves[: plan.vote_weights], leaves[plan.vote_weights :]
    wanted_weights = [weight for weight in vote_leaves if weight.requires_grad]
    d_heads: list[Tensor] = []
    vote_sums: list[Tensor] = []
    routing_sums: list[Tensor] = []
    for rows, row_grad in zip(heads.split(plan.sizes[0]), grad.split(plan.sizes[0]), strict=True):
        leaf = rows.detach().requires_grad_(need_heads)
        with torch.enable_grad(), _autocast(heads, ctx.autocast):
            votes = plan.votes(leaf, *vote_leaves)
        d_votes, d_routing = _backpropagate_routing(votes.detach(), row_grad, routing_weights, plan)
        routing_sums = _accumulate(routing_sums, d_routing)
        wanted = [leaf, *wanted_weights] if need_heads else wanted_weights
        if wanted:
            gradients = list(torch.autograd.grad(votes, wanted, d_votes))
            if need_heads:
                d_heads.append(gradients.pop(0))
            vote_sums = _accumulate(vote_sums, gradients)
    votes_iterator = iter(vote_sums)
    results = [next(votes_iterator).to(w.dtype) if w.requires_grad else None for w in vote_leaves]
    results += [
        total.to(weight.dtype) if weight.requires_grad else None
        for weight, total in zip(routing_weights, routing_sums, strict=True)
    ]
    return None, torch.cat(d_heads) if need_heads else None, *results


def _backpropagate_routing(
    votes: Tensor, grad: Tensor, routing_weights: Sequence[Tensor], plan: _Plan
) -> tuple[Tensor, list[Tensor]]:
    routing = _cast_weights(votes, [weight.detach() for weight in routing_weights])
    d_votes = torch.empty_like(votes)
    sums: list[Tensor] = []
    with _autocast(votes, None):
        for part in _slice(len(votes), plan.sizes[1]):
            length = _choose_length(votes[part], plan)
            chunk = _pad(votes[part], length)
            chunk_grad = _pad(grad[part].unflatten(1, votes.shape[2:]), length)
            # the gradient of a padded chunk needs a buffer of the padded length
            fits = len(chunk) == part.stop - part.start
            into = d_votes[part] if fits else torch.empty_like(chunk)
            d_routing = plan.kernel.gradient(chunk, chunk_grad, into, *routing)
            if not fits:
                d_votes[part] = into[: part.stop - part.start]
            sums = _accumulate(sums, d_routing)
    return d_votes, sums


def _accumulate(sums: list[Tensor], terms: Sequence[Tensor]) -> list[Tensor]:
    # gradients of many chunks are summed in float32 or higher; cloned, because autograd may return one tensor twice
    if not sums:
        return [full_precision(term).clone() for term in terms]
    return [total.add_(term) for total, term in zip(sums, terms, strict=True)]


def _slice(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _choose_length(votes: Tensor, plan: _Plan) -> int:
    """Return the number of tokens a chunk of votes is padded to, so that a compiled kernel sees few shapes."""
    if not plan.pad:
        return len(votes)
    size = plan.sizes[1]
    # chunks on an accelerator are large: a short batch is padded to 1/4 or 1/16 of one, and so on
    while size // 4 >= len(votes) and size // 4 * votes.shape[1:].numel() >= MIN_PADDED_VOTES:
        size //= 4
    return size


def _pad(tensor: Tensor, length: int) -> Tensor:
    missing = length - len(tensor)
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing)) if missing > 0 else tensor


def _cast_weights(votes: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.to(torch.promote_types(votes.dtype, torch.float32)) for weight in weights]


def _autocast(tensor: Tensor, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    # no cache: a weight cast here without a graph must not be reused by a later operation that needs one
    return torch.autocast(tensor.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


@functools.cache
def compile_kernel(kernel: Kernel) -> Kernel:
    """Return `kernel` compiled by `torch.compile`; if that fails, a warning is logged and `kernel` itself runs."""
    return _CompiledKernel(kernel)


class _CompiledKernel:
    def __init__(self, plain: Kernel) -> None:
        self._plain = plain
        self._failed = False
        self._forward = torch.compile(plain.forward, dynamic=False, fullgraph=True)
        self._gradient = torch.compile(plain.gradient, dynamic=False, fullgraph=True)

    def forward(self, votes: Tensor, *weights: Tensor) -> Tensor:
        return self._call(self._forward, self._plain.forward, votes, *weights)

    def gradient(self, votes: Tensor, grad: Tensor, into: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return self._call(self._gradient, self._plain.gradient, votes, grad, into, *weights)

    def _call(self, compiled: Callable[..., Any], plain: Callable[..., Any], *tensors: Tensor) -> Any:
        if self._failed:
            return plain(*tensors)
        try:
            return compiled(*tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers fail in many ways; the plain kernel computes the same
            reason = " ".join(str(error).split("\n")[:2])
            _logger.warning(
                "torch.compile failed for routing (%s: %s); using the plain kernel.", type(error).__name__, reason
            )
            self._failed = True
            return plain(*tensors)
