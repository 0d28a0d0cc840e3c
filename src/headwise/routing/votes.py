"""Votes: what each head proposes for each output capsule, in three parameterizations (Li et al. 2021, Eqs. 8-9).

A parameterization is a frozen setting, and `Votes` is the module that holds its weights. Votes are a function of
concatenated heads [T, H * e] and of plain weight tensors, so that a backward pass can recompute them.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import SettingError, require_integer


@dataclass(frozen=True)
class VoteWeight:
    """One weight of a parameterization, initialized uniformly in center +- bound.

    Attributes:
        shape: Shape of the parameter.
        center: Center of the interval.
        bound: Half the length of the interval; 0 for a constant.
    """

    shape: tuple[int, ...]
    center: float = 0.0
    bound: float = 0.0


class VoteSetting(Protocol):
    """A parameterization of the votes: any frozen dataclass with these two methods."""

    def weights(self, num_heads: int, head_size: int, width: int) -> dict[str, VoteWeight]:
        """Return the weights by name, in the order `compute` takes them."""
        ...

    def compute(self, heads: Tensor, num_heads: int, *weights: Tensor) -> Tensor:
        """Return the votes [T, H, d] of concatenated heads [T, H * e]."""
        ...


@dataclass(frozen=True)
class SharedTrunk:
    """Votes from one network shared by all heads: the form that matches the paper's parameter counts.

    V = W2 f(W1 LayerNorm(O) + b1) + b2 with O the concatenated heads, W1 [d, H e] and W2 [H d, d]. Each vote
    sees every head; a head is distinct only through its rows of W2 (Li et al. 2021 write a distinct f_h).

    Args:
        relu: Whether f is ReLU; False for the linear form, as in simple routing of the archived release.
    """

    relu: bool = True

    def weights(self, num_heads: int, head_size: int, width: int) -> dict[str, VoteWeight]:
        """Return the weights by name, in the order `compute` takes them."""
        joined = num_heads * head_size
        return {
            "norm_weight": VoteWeight((joined,), center=1.0),
            "norm_bias": VoteWeight((joined,)),
            "trunk_weight": _uniform_weight(joined, width, joined),
            "trunk_bias": _uniform_weight(joined, width),
            "vote_weight": _uniform_weight(width, num_heads * width, width),
            "vote_bias": _uniform_weight(width, num_heads * width),
        }

    def compute(self, heads: Tensor, num_heads: int, *weights: Tensor) -> Tensor:
        """Return the votes [T, H, d] of concatenated heads [T, H * e]."""
        norm_weight, norm_bias, trunk_weight, trunk_bias, vote_weight, vote_bias = weights
        hidden = F.layer_norm(heads, heads.shape[-1:], norm_weight, norm_bias)
        hidden = F.linear(hidden, trunk_weight, trunk_bias)
        hidden = F.relu(hidden) if self.relu else hidden
        return F.linear(hidden, vote_weight, vote_bias).unflatten(-1, (num_heads, -1))


@dataclass(frozen=True)
class PerHead:
    """Votes of each head from its own output only, through two layers: V_h = W2_h ReLU(W1_h O_h + b1_h) + b2_h.

    W1_h is [d, e] and W2_h is [d, d] (Li et al. 2021, Eqs. 8-9, with f_h applied to head h only).
    """

    def weights(self, num_heads: int, head_size: int, width: int) -> dict[str, VoteWeight]:
        """Return the weights by name, in the order `compute` takes them."""
        return {
            "hidden_weight": _uniform_weight(head_size, num_heads, width, head_size),
            "hidden_bias": _uniform_weight(head_size, num_heads, width),
            "vote_weight": _uniform_weight(width, num_heads, width, width),
            "vote_bias": _uniform_weight(width, num_heads, width),
        }

    def compute(self, heads: Tensor, num_heads: int, *weights: Tensor) -> Tensor:
        """Return the votes [T, H, d] of concatenated heads [T, H * e]."""
        hidden_weight, hidden_bias, vote_weight, vote_bias = weights
        by_head = heads.unflatten(-1, (num_heads, -1)).transpose(0, 1)
        # product and bias in one call: under autocast their sum would be float32
        hidden = F.relu(torch.baddbmm(hidden_bias.unsqueeze(1), by_head, hidden_weight.mT))
        return torch.baddbmm(vote_bias.unsqueeze(1), hidden, vote_weight.mT).transpose(0, 1)


@dataclass(frozen=True)
class DistinctCapsules:
    """Votes exactly as in Li et al. 2021, Eqs. 8-9: X_h = ReLU(F_h O + b_h) in R^e, V_h = W_h X_h.

    F_h is [e, H e] and acts on the concatenated heads O; W_h is [d, e], without a bias.
    """

    def weights(self, num_heads: int, head_size: int, width: int) -> dict[str, VoteWeight]:
        """Return the weights by name, in the order `compute` takes them."""
        joined = num_heads * head_size
        return {
            "capsule_weight": _uniform_weight(joined, joined, joined),
            "capsule_bias": _uniform_weight(joined, joined),
            "vote_weight": _uniform_weight(head_size, num_heads, width, head_size),
        }

    def compute(self, heads: Tensor, num_heads: int, *weights: Tensor) -> Tensor:
        """Return the votes [T, H, d] of concatenated heads [T, H * e]."""
        capsule_weight, capsule_bias, vote_weight = weights
        inputs = F.relu(F.linear(heads, capsule_weight, capsule_bias))
        by_head = inputs.unflatten(-1, (num_heads, -1)).transpose(0, 1)
        return (by_head @ vote_weight.mT).transpose(0, 1)


class Votes(nn.Module):
    """A module that computes votes [T, H, N, c] from concatenated heads [T, H * e].

    The weights are direct parameters, not `nn.Linear` children: an aggregator recomputes votes from the tensors
    alone, and a hook on a child would never be called.

    Args:
        setting: The parameterization.
        num_heads: Heads H.
        head_size: Width e of one head.
        width: Width d = N * c of the aggregated output.
        capsules: Output capsules N; must divide d.

    Raises:
        SettingError: A size is not a positive integer, or N does not divide d.

    Example:
        >>> votes = Votes(SharedTrunk(), num_heads=2, head_size=4, width=8, capsules=4)
        >>> votes(torch.randn(3, 8)).shape
        torch.Size([3, 2, 4, 2])
    """

    def __init__(self, setting: VoteSetting, num_heads: int, head_size: int, width: int, capsules: int) -> None:
        super().__init__()
        sizes = {"num_heads": num_heads, "head_size": head_size, "width": width, "capsules": capsules}
        for name, value in sizes.items():
            require_integer(name, value, low=1)
        if width % capsules != 0:
            raise SettingError(f"capsules is {capsules} and the output width {width}; expected a divisor of the width.")
        self.setting, self.num_heads, self.head_size = setting, num_heads, head_size
        self.width, self.capsules = width, capsules
        self._drawn = setting.weights(num_heads, head_size, width)
        for name, weight in self._drawn.items():
            self.register_parameter(name, nn.Parameter(torch.empty(weight.shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weights again, as `nn.Linear` and `nn.LayerNorm` do."""
        for name, weight in self._drawn.items():
            low, high = weight.center - weight.bound, weight.center + weight.bound
            nn.init.uniform_(self.get_parameter(name), low, high)

    def weights(self) -> tuple[Tensor, ...]:
        """Return the weights in the order `compute` takes them."""
        return tuple(getattr(self, name) for name in self._drawn)

    def compute(self, heads: Tensor, *weights: Tensor) -> Tensor:
        """Return the votes [T, H, N, c] of concatenated heads [T, H * e] under the given weights."""
        votes = self.setting.compute(heads, self.num_heads, *weights)
        return votes.unflatten(-1, (self.capsules, -1))

    def forward(self, heads: Tensor) -> Tensor:
        """Return the votes [T, H, N, c] of concatenated heads [T, H * e]."""
        return self.compute(heads, *self.weights())

    def extra_repr(self) -> str:
        """Return the setting and the sizes, for printing."""
        return (
            f"{self.setting}, num_heads={self.num_heads}, head_size={self.head_size}, "
            f"capsules={self.capsules}, capsule_size={self.width // self.capsules}"
        )


def _uniform_weight(fan_in: int, *shape: int) -> VoteWeight:
    return VoteWeight(shape, bound=1.0 / math.sqrt(fan_in))


def full_precision(tensor: Tensor) -> Tensor:
    """Return a tensor in the precision of routing: float64 unchanged, any other dtype as float32.

    >>> full_precision(torch.zeros(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return tensor if tensor.dtype == torch.float64 else tensor.float()
