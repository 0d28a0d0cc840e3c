"""Routing by Triton programs, checked against the plain kernel before they are trusted.

Triton is imported when a kernel is first used, so that the library depends on torch only.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from types import ModuleType

import torch
from torch import Tensor

from headwise.routing.algorithms import EMKernel, SimpleKernel, full_precision

_logger = logging.getLogger(__name__)

# Number of tokens on which each kind of call is first compared with the plain kernel, and the relative tolerance.
CHECKED_TOKENS, TOLERANCE = 8, 1e-3


def runs_on(device: torch.device) -> bool:
    """Return whether Triton is installed and runs on a device: a GPU, or any device in its interpreter."""
    return _has_triton() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


@functools.cache
def fuse_kernel(plain: EMKernel | SimpleKernel) -> FusedKernel:
    """Return the fused form of a kernel, one for all equal kernels."""
    return FusedKernel(plain)


class FusedKernel:
    """Routing whose votes stay close to the processor through all iterations; values and gradients are `plain`'s.

    Votes in half precision are read and written in that precision and routed in float32; votes in float64 are routed in
    float64, with the floor and the temperatures rounded to float32. The first call of each shape is compared with
    `plain` on a few tokens. If they differ, or Triton fails, a warning is logged and `plain` is used for that shape, as
    it is for votes of which a program cannot hold one capsule of all heads. If those tokens are not finite, `plain` is
    used and the next call is compared.

    Args:
        plain: The kernel.
    """

    def __init__(self, plain: EMKernel | SimpleKernel) -> None:
        self.plain = plain
        self._trusted: dict[object, bool] = {}

    def forward(self, votes: Tensor, *betas: Tensor) -> Tensor:
        """Return the capsules [T, N, c] of votes [T, H, N, c]; `betas` are beta_A and beta_mu, or nothing."""
        return (self._forward if self._trusts(votes, betas) else self.plain.forward)(votes, *betas)

    def gradient(self, votes: Tensor, grad: Tensor, into: Tensor, *betas: Tensor) -> tuple[Tensor, ...]:
        """Write the gradient of the votes into `into` and return the gradients of the betas given."""
        return (self._gradient if self._trusts(votes, betas) else self.plain.gradient)(votes, grad, into, *betas)

    def _forward(self, votes: Tensor, *betas: Tensor) -> Tensor:
        votes = _pack_heads(votes)
        capsules = votes.new_empty(votes.shape[0], *votes.shape[2:])
        with torch.cuda.device_of(votes):
            self._programs.launch_forward(votes, betas, self.plain, capsules)
        return capsules

    def _gradient(self, votes: Tensor, grad: Tensor, into: Tensor, *betas: Tensor) -> tuple[Tensor, ...]:
        votes, written = _pack_heads(votes), _pack_heads(into)
        with torch.cuda.device_of(votes):
            found = self._programs.launch_backward(votes, grad.contiguous(), betas, self.plain, written)
        if written is not into:
            into.copy_(written)
        return found

    def _trusts(self, votes: Tensor, betas: tuple[Tensor, ...]) -> bool:
        kind = (votes.shape[1:], votes.dtype, votes.device, bool(betas))
        if kind not in self._trusted:
            first = votes[:CHECKED_TOKENS].detach()
            # NaN equals nothing: such votes say nothing about the program
            if not all(bool(tensor.isfinite().all()) for tensor in (first, *betas)):
                return False
            self._trusted[kind] = self._agrees(first, betas)
        return self._trusted[kind]

    @property
    def _programs(self) -> ModuleType:
        if isinstance(self.plain, EMKernel):
            from headwise.routing import em_triton as programs
        else:
            from headwise.routing import simple_triton as programs
        return programs

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
            named = type(self.plain).__name__, tuple(votes.shape[1:]), type(failure).__name__, str(failure)[:200]
            _logger.warning("Triton failed for %s on votes of shape %s (%s: %s); using the plain kernel.", *named)
            return False
        into = torch.empty_like(full_precision(votes))
        sums = self.plain.gradient(votes, grad, into, *betas)
        slow = (self.plain.forward(votes, *betas), into, *sums)
        # results in half precision are rounded once
        tolerance = max(TOLERANCE, torch.finfo(votes.dtype).eps)
        for one, other in zip(fast, slow, strict=True):
            error = float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
            # NaN exceeds nothing
            if not error <= tolerance:
                _logger.warning(
                    "Triton's %s differs by %.2g from the plain kernel on votes of shape %s; using the plain kernel.",
                    *(type(self.plain).__name__, error, tuple(votes.shape)),
                )
                return False
        return True


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _pack_heads(votes: Tensor) -> Tensor:
    """Return votes with the N * c numbers of each head contiguous; copied if they are not."""
    good = votes.stride(3) == 1 and votes.stride(2) == votes.shape[3]
    return votes if good or votes.shape[3] == 1 == votes.stride(2) else votes.contiguous()
