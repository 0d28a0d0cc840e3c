"""EM routing on chip, where a GPU has Triton: when it is taken, and how far it is trusted.

Owns `FusedEMKernel`, which computes what `em_routing.EMKernel` does by the programs of `em_triton`. Must not know
modules. Triton is imported when a kernel is first used, so that the library needs torch alone.
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

# Numbers of one token's votes, each axis rounded up to a power of two, that a program keeps in registers.
MOST_VOTES = 2**14
# Tokens on which the first call of each kind is held against the plain form, and how far it may be from it.
CHECKED, RELATIVE = 8, 1e-3


def runs_on(device: torch.device) -> bool:
    """Return whether Triton is installed and takes tensors of a device: a GPU's, or any in its interpreter."""
    return _has_triton() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


@functools.cache
def fused_kernel(plain: EMKernel) -> FusedEMKernel:
    """Return the fused form of a kernel, one for all equal kernels."""
    return FusedEMKernel(plain)


class FusedEMKernel:
    """EM routing whose votes stay on chip through all iterations; values and gradients are those of `plain`.

    Votes in half precision are read and written as they are and routed in float32. The first call of each shape is held
    against `plain` on a few tokens. Where that fails, or Triton does, a log line says so and `plain` is taken from then
    on, as it is for votes too large to stay on chip: more than 16,384 numbers a token with each axis rounded up to a
    power of two.

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

        votes = _side_by_side(votes)
        capsules = votes.new_empty(votes.shape[0], *votes.shape[2:])
        with torch.cuda.device_of(votes):
            launch_forward(votes, betas, self.plain.schedule, self.plain.floor, capsules)
        return capsules

    def _gradient(self, votes: Tensor, grad: Tensor, into: Tensor, *betas: Tensor) -> tuple[Tensor, ...]:
        from headwise.routing.em_triton import launch_backward

        votes, written = _side_by_side(votes), _side_by_side(into)
        with torch.cuda.device_of(votes):
            found = launch_backward(votes, grad.contiguous(), betas, self.plain.schedule, self.plain.floor, written)
        if written is not into:
            into.copy_(written)
        return found

    def _trusts(self, votes: Tensor, betas: tuple[Tensor, ...]) -> bool:
        kind = (votes.shape[1:], votes.dtype, votes.device, bool(betas))
        if kind not in self._trusted:
            self._trusted[kind] = _fits(votes) and self._agrees(votes[:CHECKED].detach(), betas)
        return self._trusted[kind]

    def _agrees(self, votes: Tensor, betas: tuple[Tensor, ...]) -> bool:
        betas = tuple(beta.detach() for beta in betas)
        try:
            capsules = self._forward(votes, *betas)
            grad = torch.ones_like(capsules)
            into = torch.empty_like(votes)
            fast = (capsules, into, *self._gradient(votes, grad, into, *betas))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers fail in many ways; the plain kernel computes the same
            _logger.warning(
                "Triton failed for EM routing (%s: %s); going on without it.", type(error).__name__, str(error)[:200]
            )
            return False
        into = torch.empty_like(full_precision(votes))
        sums = self.plain.gradient(votes, grad, into, *betas)
        slow = (self.plain.forward(votes, *betas), into, *sums)
        # what is written in half precision is rounded once
        tolerance = max(RELATIVE, torch.finfo(votes.dtype).eps)
        apart = max(_apart(one, other) for one, other in zip(fast, slow, strict=True))
        if apart > tolerance:
            _logger.warning(
                "Triton's EM routing is %.2g away from the plain form on votes of shape %s; going on without it.",
                apart,
                tuple(votes.shape),
            )
        return apart <= tolerance


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _fits(votes: Tensor) -> bool:
    padded = 1
    for length in votes.shape[1:]:
        padded *= 1 << (length - 1).bit_length()
    return padded <= MOST_VOTES


def _side_by_side(votes: Tensor) -> Tensor:
    """Return votes whose heads hold their N * c numbers side by side; a copy where they do not."""
    good = votes.stride(3) == 1 and votes.stride(2) == votes.shape[3]
    return votes if good or votes.shape[3] == 1 == votes.stride(2) else votes.contiguous()


def _apart(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference over that of `other`."""
    return float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
