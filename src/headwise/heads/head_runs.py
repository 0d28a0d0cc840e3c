"""The heads of one projection that lie in several runs of one parameter, with other rows between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.errors import LayoutError
from headwise.heads.head_slice import HeadSlice


@dataclass(frozen=True, eq=False)
class HeadRuns(HeadSlice):
    """Heads in runs that are evenly spaced inside, as the queries of Falcon's groups and all heads of CodeGen.

    Attributes:
        runs: The slice of each run, in the order of the heads; all of one parameter and one head size.
    """

    runs: tuple[HeadSlice, ...] = ()

    @staticmethod
    def build(whole: HeadSlice, run: int, jump: int) -> HeadSlice:
        """Return the heads of a slice as runs of `run` heads that start `jump` rows apart; itself where it is one."""
        if run == whole.heads:
            return whole
        if run == 1:
            return replace(whole, stride=jump)
        starts = [whole.start + index * jump for index in range(whole.heads // run)]
        runs = [
            replace(whole, heads=run, start=start, bias_start=start, run=index) for index, start in enumerate(starts)
        ]
        fields = {name: getattr(whole, name) for name in HeadSlice.__dataclass_fields__}
        return HeadRuns(**fields, runs=tuple(runs))

    @property
    def parts(self) -> tuple[HeadSlice, ...]:
        """The slice of each run."""
        return self.runs

    @property
    def rows(self) -> list[int]:
        """The rows of its heads, head by head."""
        return [row for run in self.runs for row in run.rows]

    def view(self, tensor: Tensor) -> Tensor:
        """Refused: heads with other rows between them have no view.

        Raises:
            LayoutError: Always.
        """
        raise LayoutError(
            f"{self.name}: its {self.projection} heads lie in {len(self.runs)} runs, so a tensor of shape "
            f"{tuple(tensor.shape)} has no view of them; use gather(), or view() of each of parts."
        )

    def with_parts(self, parts: Sequence[HeadSlice]) -> HeadRuns:
        """Return the runs of another parameter of the same shape."""
        first = parts[0]
        fields = {name: getattr(first, name) for name in ("owner", "attribute", "module", "lora")}
        return replace(self, **fields, runs=tuple(parts))

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the heads of tensors shaped like the parameter, one for each run, in a copy."""
        return torch.cat([part.view(tensor) for part, tensor in zip(self.runs, tensors, strict=True)])

    def features(self, tensor: Tensor) -> Tensor:
        """Return the heads [..., M, e] among the features of a call of the module, in a copy."""
        return torch.cat([run.features(tensor) for run in self.runs], -2)
