"""What a step did to each particle group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ForceNorms:
    """What a step did to each particle group; tensors stay on the parameters' device until they are read.

    Attributes:
        names: Names of the groups acted on.
        driving_norm: Norm of the driving term (loss and prior) handed to the optimizer, [G].
        repulsion_norm: Norm of the repulsion handed to the optimizer, [G].
        particle_norm: Mean norm of the particles before the step, [G].
        finite: False where gradient or particles were not finite, or float16 could not hold the forces, and the
            gradient was left unchanged, [G].
        equal: True where several heads are all equal, so that they do not repel, [G].
        particles: Number of particles M of each group; a single one is repelled by nothing.
        skipped: Names of groups without a gradient.
    """

    names: tuple[str, ...]
    driving_norm: Tensor
    repulsion_norm: Tensor
    particle_norm: Tensor
    finite: Tensor
    equal: Tensor
    particles: tuple[int, ...]
    skipped: tuple[str, ...] = ()

    @property
    def drive_norm(self) -> Tensor:
        """`driving_norm`, under its name in version 0.1."""
        return self.driving_norm

    @property
    def force_ratio(self) -> Tensor:
        """Norm of the repulsion over norm of the driving term, [G]: its strength, comparable across runs."""
        return self.repulsion_norm / self.driving_norm

    @staticmethod
    def join(records: Sequence[ForceNorms]) -> ForceNorms:
        """Return the records of several optimizers, or of groups of several sizes, as one."""
        if len(records) == 1:
            return records[0]
        device = records[0].driving_norm.device
        joined: dict[str, Any] = {}
        for field in fields(ForceNorms):
            parts = [getattr(record, field.name) for record in records]
            joined[field.name] = (
                tuple(chain.from_iterable(parts))
                if isinstance(parts[0], tuple)
                else torch.cat([part.to(device) for part in parts])
            )
        return ForceNorms(**joined)

    def __str__(self) -> str:
        lines = [f"{'particle group':<40} {'driving':>9} {'repulsion':>9} {'ratio':>9} {'particle':>9}"]
        columns = (self.driving_norm, self.repulsion_norm, self.force_ratio, self.particle_norm)
        for index, name in enumerate(self.names):
            notes = "  equal heads: hw.jitter separates them" if self.equal[index] else ""
            notes += "  one head: nothing repels it" if self.particles[index] == 1 else ""
            source = "forces" if (self.driving_norm[index] + self.repulsion_norm[index]).isfinite() else "gradient"
            source = source if self.particle_norm[index].isfinite() else "heads"
            notes += "" if self.finite[index] else f"  {source} not finite, gradient unchanged"
            lines.append(f"{name:<40} " + " ".join(f"{float(c[index]):9.3g}" for c in columns) + notes)
        lines += [f"{name:<40} no gradient" for name in self.skipped]
        return "\n".join(lines)
