"""EM routing by the fused Triton programs of `em_triton`, checked against the plain kernel before it is trusted.

Triton is imported when a kernel is first used, so that the library depends on torch only.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.routing.votes import full_precision

if TYPE_CHECKING:
    from headwise.routing.em import EMKernel

_logger = logging.getLogger(__name__)

# Most votes per token that a program keeps in registers, with each axis rounded up to a power of two.
MAX_VOTES = 2**14
# Number of tokens on which each kind of call is first compared with the plain kernel, and the relative tolerance.
CHECKED_TOKENS, TOLERANCE = 8, 1e-3


def runs_on(device: torch.device) -> bool:
    """Return whether Triton is installed and runs on a device: a GPU, or any device in its interpreter."""
    return _has_triton() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


@functools.cache
def fuse_kernel(plain: EMKernel) -> FusedEMKernel:
    """Return the fused form of a kernel, one for all equal kernels."""
    return FusedEMKernel(plain)


class FusedEMKernel:
    """EM routing whose votes stay on chip through all iterations; values and gradients are those of `plain`.

    Votes in half precision are read and written in that precision and routed in float32. The first call of each shape
    is compared with `plain` on a few tokens. If they differ, or Triton fails, a warning is logged and `plain` is used
    for that shape. `plain` is also used, and logged, for votes too large to stay on chip: more than 16,384 numbers per
    token with each axis rounded up to a power of two.

    Args:
        plain: The kernel.
    """

    def __init__(self, plain: EMKernel) -> None:
        self.plain = plain
        self._trusted: dict[object, bool] = {}

    def forward(self, votes: Tensor, *betas: Tensor) -> Tensor:
        """Return the capsules [T, N, c] of votes [T, H, N, c]; `betas` are beta_A and beta_mu, or nothing."""
        if not self._trusts(votes, betas):
            return self.plain.forward(votes, *betas)
        return self._forward(votes, *betas)

    def gradient(self, votes: Tensor, grad: Tensor, into: Tensor, *betas: Tensor) -> tuple[Tensor, ...]:
        """Write the gradient of the votes into `into` and return those of the betas given."""
        if not self._trusts(votes, betas):
            return self.plain.gradient(votes, grad, into, *betas)
        return self._gradient(votes, grad, into, *betas)

    def _forward(self, votes: Tensor, *betas: Tensor) -> Tensor:
        from headwise.routing.em_triton import launch_forward

        votes = _pack_heads(votes)
        capsules = votes.new_empty(votes.shape[0], *votes.shape[2:])
        with torch.cuda.device_of(votes):
            launch_forward(votes, betas, self.plain.schedule, self.plain.floor, capsules)
        return capsules

    def _gradient(self, votes: Tensor, grad: Tensor, into: Tensor, *betas: Tensor) -> tuple[Tensor, ...]:
        from headwise.routing.em_triton import launch_backward

        votes, written = _pack_heads(votes), _pack_heads(into)
        with torch.cuda.device_of(votes):
            found = launch_backward(votes, grad.contiguous(), betas, self.plain.schedule, self.plain.floor, written)
        if written is not into:
            into.copy_(written)
        return found

    def _trusts(self, votes: Tensor, betas: tuple[Tensor, ...]) -> bool:
        kind = (votes.shape[1:], votes.dtype, votes.device, bool(betas))
        if kind not in self._trusted:
            self._trusted[kind] = self._fits(votes) and self._agrees(votes[:CHECKED_TOKENS].detach(), betas)
        return self._trusted[kind]

    def _fits(self, votes: Tensor) -> bool:
        padded = 1
        for length in votes.shape[1:]:
            padded *= 1 << (length - 1).bit_length()
        if padded > MAX_VOTES:
            _logger.warning(
                "EM routing of votes of shape %s is using the plain kernel: rounded up to powers of two they are %d "
                "numbers per token, and Triton's keeps at most %d on chip.",
                tuple(votes.shape[1:]),
                padded,
                MAX_VOTES,
            )
        return padded <= MAX_VOTES

    def _agrees(self, votes: Tensor, betas: tuple[Tensor, ...]) -> bool:
        betas = tuple(beta.detach() for beta in betas)
        try:
            capsules = self._forward(votes, *betas)
            grad = torch.ones_like(capsules)
            into = torch.empty_like(votes)
            fast = (capsules, into, *self._gradient(votes, grad, into, *betas))
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:  # compilers fail in many ways; the plain kernel computes the same
            _logger.warning(
                "Triton failed for EM routing (%s: %s); using the plain kernel.",
                type(failure).__name__,
                str(failure)[:200],
            )
            return False
        into = torch.empty_like(full_precision(votes))
        sums = self.plain.gradient(votes, grad, into, *betas)
        slow = (self.plain.forward(votes, *betas), into, *sums)
        # results in half precision are rounded once
        tolerance = max(TOLERANCE, torch.finfo(votes.dtype).eps)
        error = max(_measure_error(one, other) for one, other in zip(fast, slow, strict=True))
        if error > tolerance:
            _logger.warning(
                "Triton's EM routing differs by %.2g from the plain kernel on votes of shape %s; "
                "using the plain kernel.",
                error,
                tuple(votes.shape),
            )
        return error <= tolerance


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _pack_heads(votes: Tensor) -> Tensor:
    """Return votes with the N * c numbers of each head contiguous; copied if they are not."""
    good = votes.stride(3) == 1 and votes.stride(2) == votes.shape[3]
    return votes if good or votes.shape[3] == 1 == votes.stride(2) else votes.contiguous()


def _measure_error(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference, relative to that of `other`."""
    return float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
