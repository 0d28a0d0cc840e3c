"""Settings of gates on heads: frozen dataclasses whose text is the record of an experiment."""

from dataclasses import dataclass
from typing import Literal

from headwise.errors import (
    SettingError,
    require_boolean,
    require_choice,
    require_integer,
    require_positive,
    require_range,
)

PER = ("head", "element")
ROUTINGS = ("learned", "random")


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
    scale: float = 2.0

    def __post_init__(self) -> None:
        require_choice("per", self.per, PER)
        require_boolean("token", self.token)
        require_positive("scale", self.scale)


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
        balance: Weight of the balance term in `Gating.add_to`, at least 0; theirs is 0.01. With 0 there is none.

    Raises:
        SettingError: A value is something else.
    """

    shared: int
    active: int | None
    routing: Literal["learned", "random"] = "learned"
    balance: float = 0.01

    def __post_init__(self) -> None:
        require_integer("shared", self.shared)
        if self.active is not None:
            require_integer("active", self.active, low=1)
        require_choice("routing", self.routing, ROUTINGS)
        require_range("balance", self.balance, low=0.0)


GateSetting = SigmoidGate | MixtureOfHeads


def require_gate(setting: GateSetting) -> None:
    """Raise `SettingError` unless this is the setting of a gate.

    >>> require_gate(SigmoidGate())
    """
    if not isinstance(setting, GateSetting):
        given = f"the class {setting.__name__}" if isinstance(setting, type) else f"a {type(setting).__name__}"
        raise SettingError(f"the setting is {given}; expected hw.SigmoidGate(...) or hw.MixtureOfHeads(...).")
