"""Where a force on heads goes: to the gradient of their weight, or through LoRA to those of A and B."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.heads.adapters import Adapter
from headwise.heads.head_slice import HeadSlice
from headwise.repulsion.mixing import stays_finite

# Forces on what is divided by heads, [M, ...], and on what the heads share; the latter None without LoRA.
Forces = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class Carrier:
    """What one head slice is trained through: its parameter W, or one adapter of the LoRA layer that adds s B A to W.

    A force F on the effective weight theta = W + s B A, [d_out, d_in], is J^T F on A and B, J the derivative of theta:

    on B: s F A^T, [d_out, r], of which row c depends on row c of F alone, so that it is divided by heads as F is;
    on A: s B^T F, [r, d_in], a sum over heads, which share A.

    In W_O, whose heads are columns, A is divided by heads and B is shared. Without LoRA, J is the identity.

    Attributes:
        head_slice: The heads.
        adapter: The adapter; None where they are trained through W.
    """

    head_slice: HeadSlice
    adapter: Adapter | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the adapter, if there is one."""
        return () if self.adapter is None else (self.adapter.name,)

    @property
    def columns(self) -> bool:
        """Whether the heads are columns of the effective weight, those of W_O."""
        return self.head_slice.projection == "output"

    @property
    def trained(self) -> tuple[Tensor, Tensor]:
        """The parameter that is divided by heads, and the one that all heads share; twice the same without LoRA."""
        if self.adapter is None:
            return self.head_slice.parameter, self.head_slice.parameter
        first, second = self.adapter.first, self.adapter.second
        return (first, second) if self.columns else (second, first)

    @property
    def own(self) -> Tensor:
        """The part of the gradient that is divided by heads, [M, ...]: a view where there is one."""
        return _join(self._targets)

    @property
    def shared(self) -> Tensor | None:
        """The gradient of the factor that all heads share; None without LoRA."""
        if self.adapter is None:
            return None
        return _get_gradient(self.trained[1])

    @property
    def _targets(self) -> list[Tensor]:
        """The gradients that are divided by heads, as views of each part."""
        if self.adapter is None:
            return [part.view(_get_gradient(part.parameter)) for part in self.head_slice.parts]
        first, second = _get_gradient(self.adapter.first), _get_gradient(self.adapter.second)
        return self.list_own(first, second)

    def list_own(self, first: Tensor, second: Tensor) -> list[Tensor]:
        """Return what belongs to one head in tensors of the shapes of A and B, as views, one for each part."""
        return [part.divide(first, second)[1 if self.columns else 0] for part in self.head_slice.parts]

    def pull(self, force: Tensor) -> Forces:
        """Return J^T of a force on the heads, [M, a, b] as they are read: on `own` and on `shared`."""
        if self.adapter is None:
            return force, None
        force = self.adapter.scaling * self.head_slice.orient(force)
        first, second = self.adapter.first.detach(), self.adapter.second.detach()
        heads, shared = _join(self.list_own(first, second)), second if self.columns else first
        heads, shared = heads.to(force.dtype), shared.to(force.dtype)
        if self.columns:
            return shared.mT @ force, torch.einsum("hoe,hre->or", force, heads)
        return force @ shared.mT, heads.flatten(0, 1).mT @ force.flatten(0, 1)

    def list_targets(self, own: Tensor, shared: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Return the gradients, as views, each with its part of a force on `own` and on `shared`."""
        targets = self._targets
        pairs = list(zip(own.split([len(target) for target in targets]), targets, strict=True))
        gradient = self.shared
        return pairs if shared is None or gradient is None else [*pairs, (shared, gradient)]


def list_carriers(head_slice: HeadSlice) -> list[Carrier]:
    """Return what a head slice is trained through; frozen adapters are left out."""
    if head_slice.lora is None:
        return [Carrier(head_slice)]
    return [Carrier(head_slice, adapter) for adapter in head_slice.adapters if adapter.trained]


def write_forces(
    carriers: Sequence[Carrier], driving: Sequence[Forces], pushes: Sequence[Forces], factor: Tensor, finite: Tensor
) -> Tensor:
    """Replace the gradients of carriers in place by driving - factor * push; return whether all of these are finite.

    Where they are not, or their norms are not, as `finite` says, the gradients stay, for the loop or a GradScaler to
    notice.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for carrier, drive, push in zip(carriers, driving, pushes, strict=True):
        shared = None if drive[1] is None or push[1] is None else drive[1] - factor * push[1]
        pairs += carrier.list_targets(drive[0] - factor * push[0], shared)
    for force, target in pairs:
        finite = stays_finite(finite, force, target.dtype)
    for force, target in pairs:
        torch.where(finite, force.to(target.dtype), target, out=target)
    return finite


def norm_of(forces: Sequence[Forces]) -> Tensor:
    """The norm of all these forces on what is divided by heads."""
    return torch.stack([torch.linalg.vector_norm(own) for own, _ in forces]).norm()


def _join(views: list[Tensor]) -> Tensor:
    return views[0] if len(views) == 1 else torch.cat(views)


def _get_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None  # groups without a gradient are skipped
    return gradient
