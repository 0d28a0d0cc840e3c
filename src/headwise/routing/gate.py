"""A gate over the heads of an attention, before its output projection.

Owns `Gate` and `GatedProjection`, which `aggregate` puts into a model. Must not know models or sites.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.errors import ShapeError


@dataclass(frozen=True)
class Gate:
    """A learned weight of each head before the projection a model already has: output = W_O [g_1 O_1 ... g_H O_H].

    g = H softmax(a) with a learned vector a, one number a head, 0 at first: then every g_h is 1 and the model is what
    it was. Wang et al. 2021 speak of "a weighted gate layer to aggregate the heads" (section 3) and write none down;
    their code has none. The form is ours.
    """


class GatedProjection(nn.Module):
    """A gate over the heads and the old projection; equal to the old projection while the gate is 0.

    Args:
        setting: The gate.
        projection: The module that played W_O; kept, with its weights.
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
        """Set the gate to 0; the old projection stays."""
        nn.init.zeros_(self.gate)

    def weights(self) -> Tensor:
        """Return g = H softmax(a), [H]."""
        return self.num_heads * torch.softmax(self.gate.float(), dim=0)

    def forward(self, heads: Tensor) -> Tensor:
        """Return W_O [g_1 O_1 ... g_H O_H], [..., d], of concatenated heads [..., H * e].

        Raises:
            ShapeError: The last axis of `heads` is not H * e.
        """
        if heads.shape[-1:] != (self.num_heads * self.head_size,):
            raise ShapeError(
                f"heads has shape {tuple(heads.shape)}; expected {self.num_heads} heads of {self.head_size} numbers on "
                "the last axis."
            )
        weighed = heads.unflatten(-1, (self.num_heads, self.head_size)) * self.weights().to(heads.dtype)[:, None]
        return self.projection(weighed.flatten(-2))
