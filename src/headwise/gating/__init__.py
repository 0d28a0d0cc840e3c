"""Gates on heads that depend on the token: gated attention and mixture of heads, on a model already built."""

from headwise.gating.attach import Gating, gate_heads
from headwise.gating.gates import Gates, balance, mixture_gates, sigmoid_gates
from headwise.gating.modules import MixtureGates, SigmoidGates, build_gates
from headwise.gating.settings import GateSetting, MixtureOfHeads, SigmoidGate, require_gate

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
