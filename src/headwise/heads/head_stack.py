"""The heads of one projection where each head is a parameter of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError
from headwise.heads.head_slice import HeadSlice


@dataclass(frozen=True, eq=False)
class HeadStack(HeadSlice):
    """The heads of one projection of one site where each head is a parameter of its own, as in a list of heads.

    Attributes:
        members: The slice of each head, in the order of the heads; all of one shape.
    """

    members: tuple[HeadSlice, ...] = ()

    @staticmethod
    def build(projection: str, name: str, owner: nn.Module, members: Sequence[HeadSlice]) -> HeadStack:
        """Return the stack of some slices, which `name` stands for; `owner` is the module that holds them all."""
        first = members[0]
        return HeadStack(
            projection,
            name,
            owner,
            first.attribute,
            len(members),
            first.head_size,
            axis=first.axis,
            feature_axis=first.feature_axis,
            input_axis=first.input_axis,
            start_axis=first.start_axis,
            along=len(members) * first.head_size,
            across=first.across,
            obstacle=next((member.obstacle for member in members if member.obstacle is not None), None),
            called=False,
            members=tuple(members),
        )

    @property
    def parts(self) -> tuple[HeadSlice, ...]:
        """The slice of each head."""
        return self.members

    @property
    def parameter(self) -> nn.Parameter:
        """Refused: there are several.

        Raises:
            LayoutError: Always.
        """
        raise LayoutError(
            f"{self.name} are {len(self.parts)} parameters, one for each head; read them with read(), or one by one "
            "in parts."
        )

    def with_parts(self, parts: Sequence[HeadSlice]) -> HeadStack:
        """Return the stack of other slices of the same shapes."""
        return replace(self, members=tuple(parts))

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the heads of tensors shaped like the parameters of `parts`, in a copy."""
        return torch.cat([part.view(tensor) for part, tensor in zip(self.parts, tensors, strict=True)])
