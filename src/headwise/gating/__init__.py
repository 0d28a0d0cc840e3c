"""Gates on heads that depend on the token: gated attention and mixture of heads, on a model already built."""

from headwise.gating.attach import Gating, gate_heads
from headwise.gating.gates import (
    Gates,
    GateSetting,
    MixtureGates,
    MixtureOfHeads,
    SigmoidGate,
    SigmoidGates,
    balance,
    build_gates,
    mixture_gates,
    require_gate,
    sigmoid_gates,
)

__all__ = [
    "GateSetting",
    "Gates",
    "Gating",
    "MixtureGates",
    "MixtureOfHeads",
    "SigmoidGate",
    "SigmoidGates",
    "balance",
    "build_gates",
    "gate_heads",
    "mixture_gates",
    "require_gate",
    "sigmoid_gates",
]
