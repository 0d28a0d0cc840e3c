"""Modules that compute the gates of an attention from what its queries are made from, [..., d]."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import SettingError
from headwise.gating.gates import Gates, mixture_gates, sigmoid_gates
from headwise.gating.settings import GateSetting, MixtureOfHeads, SigmoidGate, require_gate


class SigmoidGates(nn.Module):
    """g = scale sigmoid(W x + b), one gate for each head or each of its features; all equal to scale / 2 at first.

    Args:
        setting: The setting.
        num_heads: Heads H.
        head_size: Width e of one head.
        width: Width d of x.

    Example:
        >>> SigmoidGates(SigmoidGate(), num_heads=2, head_size=3, width=4)(torch.randn(5, 4)).weights.shape
        torch.Size([5, 2])
    """

    def __init__(self, setting: SigmoidGate, num_heads: int, head_size: int, width: int) -> None:
        super().__init__()
        self.setting = setting
        count = num_heads if setting.per == "head" else num_heads * head_size
        self.weight = nn.Parameter(torch.empty(count, width)) if setting.token else None
        self.bias = nn.Parameter(torch.empty(count))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set W and b to 0."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Gates:
        """Return the gates of tokens [..., d]; without `token` those of every token, [H] or [H * e]."""
        logits = self.bias if self.weight is None else F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        return sigmoid_gates(logits, self.setting.scale)


class MixtureGates(nn.Module):
    """The gates of a mixture of heads; the equations are those of `MixtureOfHeads`.

    `routed` is W_r [n, d], `shared` W_s [S, d], which one shared head does not need, and `kinds` W_a [2, d].

    Args:
        setting: The setting.
        num_heads: Heads H; at least shared + active.
        head_size: Width e of one head.
        width: Width d of x.

    Raises:
        SettingError: There are fewer heads.

    Example:
        >>> gates = MixtureGates(MixtureOfHeads(shared=1, active=2), num_heads=4, head_size=3, width=8)
        >>> (gates(torch.randn(5, 8)).weights > 0).sum(-1)
        tensor([3, 3, 3, 3, 3])
    """

    def __init__(self, setting: MixtureOfHeads, num_heads: int, head_size: int, width: int) -> None:  # noqa: ARG002  gates are of whole heads
        super().__init__()
        used = setting.shared + (setting.active or 1)
        if used > num_heads:
            raise SettingError(
                f"{setting} uses {used} heads of an attention that has {num_heads}; lower shared or active."
            )
        self.setting = setting
        self.active = setting.active or num_heads - setting.shared
        self.routed = nn.Parameter(torch.empty(num_heads - setting.shared, width))
        self.shared = nn.Parameter(torch.empty(setting.shared, width)) if setting.shared > 1 else None
        self.kinds = nn.Parameter(torch.empty(2, width)) if setting.shared else None
        self.fixed: Tensor | None
        self.register_buffer("fixed", torch.empty_like(self.routed) if setting.routing == "random" else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W_r, and what chooses heads at random, uniformly in +-1 / sqrt(d); set the others to 0."""
        bound = 1.0 / math.sqrt(self.routed.shape[-1])
        for drawn in (self.routed, self.fixed):
            if drawn is not None:
                nn.init.uniform_(drawn, -bound, bound)
        for parameter in (self.shared, self.kinds):
            if parameter is not None:
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Gates:
        """Return the gates [..., H] of tokens [..., d], p and the chosen heads."""
        x = x.to(self.routed.dtype)
        kinds = None if self.kinds is None else F.linear(x, self.kinds)
        shared = None if self.shared is None else F.linear(x, self.shared)
        if kinds is not None and shared is None:
            # the softmax of one head is 1
            shared = torch.zeros_like(kinds[..., :1])
        scores = None if self.fixed is None else F.linear(x, self.fixed)
        return mixture_gates(F.linear(x, self.routed), shared, kinds, self.active, scores)


def build_gates(setting: GateSetting, num_heads: int, head_size: int, width: int) -> SigmoidGates | MixtureGates:
    """Return new gates, with parameters of dtype float32 on the default device.

    Raises:
        SettingError: `setting` is something else, or there are fewer heads than a mixture uses.
    """
    require_gate(setting)
    if isinstance(setting, SigmoidGate):
        return SigmoidGates(setting, num_heads, head_size, width)
    return MixtureGates(setting, num_heads, head_size, width)
