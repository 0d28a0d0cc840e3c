"""Gates of heads: their equations, the balance of the heads that tokens choose, frozen settings, and modules.

The modules compute the gates of an attention from the tensor its queries are made from, [..., d].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import SettingError, ShapeError, require_integer
from headwise.functional.tokens import accumulation_dtype, require_keep
from headwise.settings import Count, Natural, NonNegative, Positive, check_fields


class Gates(NamedTuple):
    """Gates of one call of an attention.

    Attributes:
        weights: g, [..., H], or [..., H * e] where each feature has its own; without leading axes for every token.
        shares: p of the routed heads, [..., n]; None where no head is chosen.
        chosen: Which routed heads each token uses, bool [..., n].
    """

    weights: Tensor
    shares: Tensor | None = None
    chosen: Tensor | None = None


def sigmoid_gates(logits: Tensor, scale: float = 2.0) -> Gates:
    """Return g = scale sigmoid(logits), in float32 at least.

    >>> sigmoid_gates(torch.tensor([0.0, 50.0])).weights.tolist()
    [1.0, 2.0]
    """
    return Gates(scale * torch.sigmoid(logits.to(accumulation_dtype(logits))))


def mixture_gates(
    routed: Tensor, shared: Tensor | None, kinds: Tensor | None, active: int, scores: Tensor | None = None
) -> Gates:
    """Return the gates of shared and routed heads; the equations are those of `MixtureOfHeads`.

    Of equal scores the heads with the smaller index are chosen, on every device.

    Args:
        routed: Logits of the n routed heads, W_r x, [..., n].
        shared: Those of the S shared heads, W_s x, [..., S]; None where there are none.
        kinds: Those of both kinds of heads, W_a x, [..., 2]; None where there are no shared heads.
        active: Number K of routed heads that a token uses, at most n.
        scores: What heads are chosen by, [..., n]; None for `routed`.

    Returns:
        The gates, shared heads first, in float32 at least; p; and which heads are chosen.

    Raises:
        SettingError: `active` is outside [1, n].
        ShapeError: One of `shared` and `kinds` is given without the other.

    >>> gates = mixture_gates(torch.tensor([0.0, 1.0, 1.0]), torch.zeros(1), torch.zeros(2), active=2)
    >>> gates.weights.tolist(), gates.chosen.tolist()
    ([1.0, 0.0, 1.0, 1.0], [False, True, True])
    """
    require_integer("active", active, low=1, high=routed.shape[-1])
    if (shared is None) != (kinds is None):
        raise ShapeError("shared and kinds were not given together; expected the logits of both, or of neither.")
    routed = routed.to(accumulation_dtype(routed))
    order = (routed if scores is None else scores).detach().argsort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(routed, dtype=torch.bool).scatter(-1, order[..., :active], True)
    # p / sum_{chosen} p, without a division
    weights = active * torch.softmax(routed.masked_fill(~chosen, -torch.inf), dim=-1)
    shares = torch.softmax(routed, dim=-1)
    if shared is None or kinds is None:
        return Gates(weights, shares, chosen)
    alphas = 2.0 * torch.softmax(kinds.to(routed.dtype), dim=-1)
    common = shared.shape[-1] * torch.softmax(shared.to(routed.dtype), dim=-1)
    return Gates(torch.cat([alphas[..., :1] * common, alphas[..., 1:] * weights], dim=-1), shares, chosen)


def balance(shares: Tensor, chosen: Tensor, keep: Tensor | None = None) -> Tensor:
    """Return how unequally n heads are chosen: n sum_i f_i P_i over valid tokens (Jin et al. 2024, code).

    f_i is the share of tokens that chose head i, without a gradient, and P_i the mean of p_i. It is K when each head is
    chosen equally often and n at most. 0 where no token is valid.

    Args:
        shares: p, [..., n].
        chosen: bool [..., n], K of them True for each token.
        keep: bool [...], True = valid token; None keeps all. Padded tokens get no gradient.

    Raises:
        MaskError: `keep` is not bool or not of the leading shape of `shares`.

    >>> float(balance(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([[True, False], [False, True]])))
    1.0
    """
    rows, picked = shares.flatten(end_dim=-2), chosen.flatten(end_dim=-2).to(shares.dtype)
    if keep is None:
        return shares.shape[-1] * (picked.mean(0) * rows.mean(0)).sum()
    require_keep(keep, shares.shape[:-1])
    valid = keep.flatten()[:, None]
    count = valid.sum().clamp_min(1)
    # a padded token may hold anything, NaN too
    rows, picked = rows.where(valid, 0.0), picked.where(valid, 0.0)
    return shares.shape[-1] * (picked.sum(0) / count * (rows.sum(0) / count)).sum()


@dataclass(frozen=True)
class SigmoidGate:
    """A gate on each head, or on each of its features, that depends on the token: gated attention.

    Y_h = O_h * g_h(x), g(x) = scale sigmoid(W x + b), before W_O (Qiu et al. 2025, "Gated Attention for Large Language
    Models"), where x is what the queries are made from. W is [H, d] for heads and [H e, d] for elements. Theirs has
    scale = 1 and is trained from the start of a model. W = b = 0 at first, and scale = 2, are ours: every gate is then
    1 and a model that was already trained is unchanged.

    Args:
        per: "head" for one gate for each head, "element" for one for each feature of each head.
        token: Whether gates depend on the token. Without it g = scale sigmoid(b): the control.
        scale: Largest value of a gate, above 0; gates start at half of it.

    Raises:
        SettingError: A value is something else.
    """

    per: Literal["head", "element"] = "head"
    token: bool = True
    scale: Positive = 2.0

    __post_init__ = check_fields


@dataclass(frozen=True)
class MixtureOfHeads:
    """Heads chosen anew for each token: shared heads, and the K of n routed heads that a router scores highest.

    Y_h = O_h * g_h(x), before W_O (Jin et al. 2024, "MoH"), with the factors of their released code, which keep the sum
    of the gates near the number of heads that are used:

        shared heads h < S:  g_h = 2 a_1 S softmax(W_s x)_h
        routed heads:        g_h = 2 a_2 K p_h / sum_{chosen} p where h is chosen, else 0, with p = softmax(W_r x)
        (a_1, a_2) = softmax(W_a x); without shared heads 2 a_2 is 1

    W_s = W_a = 0 at first (ours). W_r is drawn as torch draws a Linear: with zeros every token would choose the same
    heads. All heads are computed, as in their code: this saves no time. With `active=None`, K = n, no head is left out.

    Balance: n sum_i f_i P_i over the n routed heads, where f_i is the share of tokens that chose i and P_i the mean of
    p_i: K when all heads are chosen equally often, up to n when few are. Valid tokens only, which is ours.

    Args:
        shared: Number S of heads that all tokens use, the first ones; at least 0.
        active: Number K of routed heads that each token uses, at least 1; None for all of them: the control.
        routing: "learned" chooses by p; "random" by a fixed random matrix in the place of W_r, while p is as it was:
            the control.
        balance: Weight of the balance term in `Gating.loss`, at least 0; theirs is 0.01. With 0 there is none.

    Raises:
        SettingError: A value is something else.
    """

    shared: Natural
    active: Count | None
    routing: Literal["learned", "random"] = "learned"
    balance: NonNegative = 0.01

    __post_init__ = check_fields


GateSetting = SigmoidGate | MixtureOfHeads


def require_gate(setting: GateSetting) -> None:
    """Raise `SettingError` unless this is the setting of a gate.

    >>> require_gate(SigmoidGate())
    """
    if not isinstance(setting, GateSetting):
        given = f"the class {setting.__name__}" if isinstance(setting, type) else f"a {type(setting).__name__}"
        raise SettingError(
            f"the setting is {given}; expected hw.gating.SigmoidGate(...) or hw.gating.MixtureOfHeads(...)."
        )


class SigmoidGates(nn.Module):
    """g = scale sigmoid(W x + b), one gate for each head or each of its features; all equal to scale / 2 at first.

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

    Raises:
        SettingError: There are fewer heads than shared + active.

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
