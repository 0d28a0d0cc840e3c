"""Which changes of keys, made good in the queries, leave every attention score as it is; and heads shared by them."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headwise.errors import SettingError
from headwise.shrinking.alignment import Sharing, align_orthogonal, share_low_rank, share_mean

Alignment = Literal["none", "orthogonal", "low_rank"]
ALIGNMENTS: tuple[Alignment, ...] = ("none", "orthogonal", "low_rank")


@dataclass(frozen=True)
class KeyFreedom:
    """The matrices B for which keys k B and queries q B^-T have the scores of k and q, at all positions.

    Rotary positions turn pairs of features, each pair with a frequency of its own. What commutes with all rotations is
    one complex number z for each pair, k -> z k and q -> q / conj(z), and any invertible matrix among the features that
    do not turn. A norm of queries and keys after their projection leaves less.

    Attributes:
        rotary: Features r that turn, the first ones of a head; 0 without rotary positions.
        interleaved: Whether pair f is features (2f, 2f + 1), rather than (f, f + r/2).
        kind: "general" for what is above; "rigid" where lengths have no effect or must stay: phases, and orthogonal
            matrices; "signs" for one sign for each pair, and for each feature that does not turn.

    Raises:
        SettingError: `rotary` is odd.

    Example:
        >>> KeyFreedom(rotary=4, interleaved=True).pairs(6)
        (tensor([0, 2]), tensor([1, 3]), tensor([4, 5]))
    """

    rotary: int
    interleaved: bool = False
    kind: Literal["general", "rigid", "signs"] = "general"

    def __post_init__(self) -> None:
        if self.rotary < 0 or self.rotary % 2:
            raise SettingError(f"rotary is {self.rotary}; expected an even number of features, or 0.")

    def __str__(self) -> str:
        turning = {"general": "an angle and a scale", "rigid": "an angle", "signs": "a sign"}[self.kind]
        still = {"general": "any invertible matrix", "rigid": "any rotation", "signs": "a sign per feature"}[self.kind]
        if not self.rotary:
            return still
        order = "interleaved" if self.interleaved else "half-split"
        return f"{turning} for each of {self.rotary // 2} {order} pairs"

    def pairs(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first and the second feature of each pair, and the features that do not turn."""
        turning = torch.arange(self.rotary)
        half = self.rotary // 2
        first, second = (turning[::2], turning[1::2]) if self.interleaved else (turning[:half], turning[half:])
        return first, second, torch.arange(self.rotary, size)

    def draw(self, heads: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return random matrices B of this freedom, and B^-T, [heads, e, e] in float64."""
        first, _, still = self.pairs(size)
        count = len(first)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        signs = torch.where(uniform(heads, count) < 0.5, -1.0, 1.0).double()
        phases = torch.polar(torch.ones(heads, count).double(), 6.283 * uniform(heads, count))
        lengths = 0.5 + 1.5 * uniform(heads, count)
        numbers = {"signs": signs + 0j, "rigid": phases, "general": phases * lengths}[self.kind]
        rest = torch.randn(heads, len(still), len(still), generator=generator, dtype=torch.float64)
        rest = torch.linalg.qr(rest).Q
        if self.kind == "general":
            rest = rest * (0.5 + 1.5 * uniform(heads, 1, len(still)))
        elif self.kind == "signs":
            rest = torch.diag_embed(torch.where(uniform(heads, len(still)) < 0.5, -1.0, 1.0).double())
        drawn = self._join(numbers.mT[..., None, None], rest, size)
        return drawn, torch.linalg.inv(drawn).mT

    def share(self, gram: Tensor, weights: Tensor, alignment: Alignment) -> Sharing:
        """Return how m heads of keys become one: u = sum_i k_i F_i, and the queries of head i become q G_i.

        Args:
            gram: k_i^T k_j before rotary positions, [..., m, e, m, e].
            weights: Second moments q^T q of the queries of each head, [..., m, e, e].
            alignment: "none" averages keys as they are; "orthogonal" averages them after an angle for each pair (a
                rotation, a sign); "low_rank" is the best single key in closed form where the freedom is general, and
                "orthogonal" elsewhere.

        Returns:
            F and G, real, [..., m, e, e]. Every G_i is of this freedom, so that it commutes with positions.
        """
        size = gram.shape[-1]
        if alignment == "none":
            ones = torch.eye(size, dtype=gram.dtype, device=gram.device)
            return share_mean(gram, ones.expand(*gram.shape[:-3], -1, -1))
        turning, still = self._divide_gram(gram)
        turning_weights, still_weights = self._divide_weights(weights)
        normalized = self.kind != "general"
        shared = []
        for block, block_weights in ((turning, turning_weights), (still, still_weights)):
            if alignment == "low_rank" and not normalized:
                shared.append(share_low_rank(block, block_weights))
            else:
                shared.append(share_mean(block, align_orthogonal(block)))
        write, read = (self._join_blocks([getattr(one, name) for one in shared], size) for name in ("write", "read"))
        return share_mean(gram, read, normalized=True) if normalized else Sharing(write, read)

    def _divide_gram(self, gram: Tensor) -> tuple[Tensor, Tensor]:
        """Return the moments of the complex pairs, [..., F, m, 1, m, 1], and of the rest (one by one for signs)."""
        first, second, still = self.pairs(gram.shape[-1])

        def moments(left: Tensor, right: Tensor) -> Tensor:
            # advanced indices that are apart come first: [F, ..., m, m]
            found = gram[..., left, :, right]
            return found.movedim(0, -3)[..., :, None, :, None]

        real = moments(first, first) + moments(second, second)
        if self.kind == "signs":
            return real, moments(still, still)
        imaginary = moments(first, second) - moments(second, first)
        rest = gram[..., self.rotary :, :, self.rotary :]
        return torch.complex(real, imaginary), rest

    def _divide_weights(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        first, second, still = self.pairs(weights.shape[-1])
        power = weights.diagonal(dim1=-2, dim2=-1)
        turning = (power[..., first] + power[..., second]).mT[..., None, None]
        if self.kind == "signs":
            return turning, power[..., still].mT[..., None, None]
        return turning + 0j, weights[..., self.rotary :, self.rotary :]

    def _join_blocks(self, blocks: list[Tensor], size: int) -> Tensor:
        turning, still = blocks
        if self.kind == "signs":
            still = torch.diag_embed(still[..., 0, 0].mT)
        return self._join(turning, still, size)

    def _join(self, turning: Tensor, still: Tensor, size: int) -> Tensor:
        """Return real matrices [..., m, e, e] of complex numbers [..., F, m, 1, 1] and matrices of the rest."""
        first, second, rest = self.pairs(size)
        numbers = turning[..., 0, 0].mT
        joined = still.new_zeros(*numbers.shape[:-1], size, size)
        real, imaginary = (numbers.real, numbers.imag) if numbers.is_complex() else (numbers, numbers.new_zeros(()))
        joined[..., first, first] = real
        joined[..., second, second] = real
        # (a, b) times this is the complex number a + bi times z
        joined[..., first, second] = imaginary
        joined[..., second, first] = -imaginary
        joined[..., rest[:, None], rest] = still
        return joined
