"""Repulsion between what heads compute instead of between their parameters; ours, not in the papers.

Owns the rule `FunctionSVGD`, the product a head's function is read from, and the way back from a force on products to
one on parameters. Which parameters these are is `function_space`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.errors import SettingError, ShapeError, require_positive
from headwise.repulsion.gram import Geometry
from headwise.repulsion.kernels import RBF, Kernel
from headwise.repulsion.mixing import Mixing, Relative, require_alpha


@dataclass(frozen=True)
class FunctionSVGD:
    """SVGD whose kernel compares what heads compute; ours, not in the papers.

    With x W_Q,h^T W_K,h y^T the score that head h gives y for query x, and W_O,h W_V,h y what it then adds, a head's
    functions are the products F_h = W_Q,h^T W_K,h and W_O,h W_V,h, each a space of its own, and the rule is

    g'_i = (eps / M) [ g_i - alpha R_i ],  R_i = -sum_j grad_{theta_i} k(F_i, F_j) = J_i^T sum_j grad_{F_j} k(F_j, F_i)

    with J_i the derivative of F_i in the head's parameters and the bandwidth a constant of the step. In additive
    attention F_h = w_h W_1, the scores of head h where tanh is linear; W_1, which the heads share, gets no force.

    Two heads that compute the same may look different: W_Q -> A W_Q, W_K -> A^-T W_K changes the parameters of a head
    and no output. k and its gradient in F do not see such a change, where kernels on parameters push apart heads that
    are one; R, that gradient in the parameters, turns with the basis. The drive is not smoothed: gradients of two heads
    in bases of their own cannot be added. W_O is moved too, biases are not. Where the model turns queries and keys by
    their positions (rotary embeddings) or norms them, W_Q^T W_K is not all a head computes, and its basis matters.

    Args:
        alpha: weight of the repulsion, in units of the loss, at least 0, or a `Relative`.
        step_size: eps, above 0.
        kernel: k, on the products.
    """

    alpha: float | Relative = 0.01
    step_size: float = 0.1
    kernel: Kernel = field(default_factory=RBF)

    def __post_init__(self) -> None:
        require_alpha("FunctionSVGD", self.alpha)
        require_positive("FunctionSVGD.step_size", self.step_size)
        if isinstance(self.kernel, type) or not isinstance(self.kernel, Kernel):
            raise SettingError(f"FunctionSVGD.kernel is {self.kernel!r}; expected a kernel such as RBF(), an instance.")

    @property
    def needs_inner(self) -> bool:
        """Whether the kernel reads inner products besides distances."""
        return self.kernel.needs_inner

    def noise_scale(self) -> float:
        """0.0: no noise."""
        return 0.0

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step; those of the repulsion multiply the heads' products."""
        repulsion = self.kernel.matrices(geometry).repulsion
        share = self.step_size / repulsion.shape[-1]
        own = share * torch.eye(repulsion.shape[-1], dtype=repulsion.dtype, device=repulsion.device)
        if isinstance(self.alpha, Relative):
            return Mixing(own.expand_as(repulsion), None, share * repulsion, self.alpha.ratio)
        return Mixing(own.expand_as(repulsion), None, share * self.alpha * repulsion, None)


def products(first: Tensor, second: Tensor) -> Tensor:
    """Return F_h = A_h^T B_h of each head: [M, e, a] and [M, e, b] -> [M, a, b].

    Raises:
        ShapeError: The shapes do not fit.

    >>> products(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]])).tolist()
    [[[3.0, 4.0], [6.0, 8.0]]]
    """
    if first.dim() != 3 or first.shape[:2] != second.shape[:2]:
        raise ShapeError(
            f"products of {tuple(first.shape)} and {tuple(second.shape)}; expected [M, e, a] and [M, e, b]."
        )
    return first.mT @ second


def pulled_back(force: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return J^T applied to a force on the products [M, a, b]: on A [M, e, a] and on B [M, e, b].

    The derivative of <G, A^T B> is B G^T in A and A G in B.
    """
    return second @ force.mT, first @ force
