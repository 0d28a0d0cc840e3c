"""One head in the place of several: aligned by rotations and averaged, or the best one of all in closed form.

Everything is computed from second moments. Features of m heads are y_i [N, e]; one head in their place has features
u = sum_i y_i F_i, and a reader of head i, who needs y_i, gets u G_i^H. Features may be complex: one complex number for
each frequency of rotary positions. Axes before those named are of problems that have nothing to do with one another.

Which heads are put together: equal groups of heads that are alike.

Which changes of keys, made good in the queries, leave every attention score as it is; and heads shared by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, SettingError, require_integer, require_shape

# Rounds of the alignment to the mean, which converges in 5 to 8.
ROUNDS = 8
# Below this share of the largest eigenvalue a direction is rounding error.
ROUNDING = 1e-13


@dataclass(frozen=True, eq=False)
class Sharing:
    """How m heads become one head u, and how each is read from it again.

    Attributes:
        write: F, [..., m, e, e]: u = sum_i y_i F_i.
        read: G, [..., m, e, e]: y_i is about u G_i^H.
    """

    write: Tensor
    read: Tensor


def share_low_rank(gram: Tensor, weights: Tensor) -> Sharing:
    """Return the sharing of least error, sum_i |(y_i - u G_i^H) S_i^(1/2)|_F^2, over all F and G.

    With M = [y_1 S_1^(1/2) .. y_m S_m^(1/2)] it is the projection onto the first e right singular vectors Q of M
    (Eckart and Young 1936): F_i = S_i^(1/2) Q_i and G_i = S_i^(-1/2) Q_i. They are scaled by one number, so that u has
    the root mean square of the heads.

    Args:
        gram: y_i^H y_j, [..., m, e, m, e].
        weights: What the readers of each head make of it, S_i = sum_h R_h^H R_h for y_i R_h^H, [..., m, e, e].

    Example:
        >>> head, turned = torch.randn(9, 2, dtype=torch.float64), torch.tensor([[0.0, 3.0], [-1.0, 0.0]]).double()
        >>> features = torch.stack([head, head @ turned], 1)
        >>> gram = torch.einsum("nie,njf->iejf", features, features)
        >>> weights = torch.eye(2).double().expand(2, 2, 2)
        >>> lost, total = measure_loss(gram, weights, share_low_rank(gram, weights))
        >>> bool(lost < 1e-12 * total)
        True
    """
    *_, heads, size = gram.shape
    root, inverse = _take_roots(weights)
    weighted = torch.einsum("...iab,...ibjc,...jcd->...iajd", root, gram, root)
    values, vectors = torch.linalg.eigh(weighted.flatten(-2).flatten(-3, -2))
    best = vectors[..., -size:].unflatten(-2, (heads, size))
    own = torch.einsum("...ieie->...", gram).real / heads
    shared = values[..., -size:].clamp_min(0).sum(-1)
    scale = torch.where((own > 0) & (shared > 0), shared / own.where(own > 0, 1.0), 1.0).sqrt()[..., None, None, None]
    return Sharing(root @ best / scale, inverse @ best * scale)


def align_orthogonal(gram: Tensor, rounds: int = ROUNDS) -> Tensor:
    """Return rotations R_i that bring m heads together, for which sum_ij |y_i R_i - y_j R_j|_F^2 is small.

    Generalized Procrustes analysis (Gower 1975): each head is turned to the mean, R_i = U V^H of the singular vectors
    of y_i^H sum_j y_j R_j, and again. It starts from the leading eigenvectors of all heads together. Of complex numbers
    a rotation is a phase, of real ones a sign.

    Args:
        gram: y_i^H y_j, [..., m, e, m, e].
        rounds: How often each head is turned.

    Returns:
        R, [..., m, e, e], orthogonal (unitary where complex).
    """
    *_, heads, size = gram.shape
    _, vectors = torch.linalg.eigh(gram.flatten(-2).flatten(-3, -2))
    turned = _nearest_rotation(vectors[..., -size:].unflatten(-2, (heads, size)))
    for _ in range(rounds):
        turned = _nearest_rotation(torch.einsum("...iejf,...jfg->...ieg", gram, turned))
    return turned


def share_mean(gram: Tensor, rotations: Tensor, *, normalized: bool = False) -> Sharing:
    """Return the mean of rotated heads, F_i = R_i / m and G_i = R_i.

    Args:
        gram: y_i^H y_j, [..., m, e, m, e].
        rotations: R_i, [..., m, e, e]; ones on the diagonal average the heads as they are.
        normalized: Whether a norm takes the length of each head away, whatever it is. Heads are then brought to one
            root mean square before they are averaged: F_i = c_i R_i / m.
    """
    write = rotations / gram.shape[-4]
    if normalized:
        own = torch.einsum("...ieie->...i", gram).real
        mean = own.mean(-1, keepdim=True)
        length = torch.where(own > 0, mean / own.where(own > 0, 1.0), 1.0).sqrt()
        write = write * length[..., None, None]
    return Sharing(write, rotations)


def measure_loss(gram: Tensor, weights: Tensor, sharing: Sharing) -> tuple[Tensor, Tensor]:
    """Return sum_i |(y_i - u G_i^H) S_i^(1/2)|_F^2 and sum_i |y_i S_i^(1/2)|_F^2, [...].

    Args:
        gram: y_i^H y_j, [..., m, e, m, e].
        weights: S_i, [..., m, e, e].
        sharing: F and G.
    """
    *_, heads, size = gram.shape
    first = torch.eye(heads * size, dtype=gram.dtype, device=gram.device).unflatten(0, (heads, size))
    first = first.unflatten(-1, (heads, size))
    missing = first - torch.einsum("...iab,...jcb->...iajc", sharing.write, sharing.read.conj())
    lost = torch.einsum("...iajc,...iakd,...kdje,...jec->...", missing.conj(), gram, missing, weights)
    return lost.real, torch.einsum("...iaib,...iba->...", gram, weights).real


def _take_roots(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square roots of positive semidefinite matrices, and their pseudoinverses."""
    values, vectors = torch.linalg.eigh(weights)
    sound = values > ROUNDING * values[..., -1:].clamp_min(0)
    roots = torch.where(sound, values, 0.0).sqrt()
    inverses = torch.where(sound, 1 / roots, 0.0)
    return (vectors * roots[..., None, :]) @ vectors.mH, (vectors * inverses[..., None, :]) @ vectors.mH


def _nearest_rotation(matrices: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrices)
    return left @ right


# A share of the largest similarity; exchanges that gain less are left out.
NO_GAIN = 1e-12

Groups = tuple[tuple[int, ...], ...]


def group_in_order(heads: int, groups: int) -> Groups:
    """Return equal groups of neighbors.

    Raises:
        SettingError: `groups` does not divide the number of heads.

    Example:
        >>> group_in_order(6, 3)
        ((0, 1), (2, 3), (4, 5))
    """
    require_integer("groups", groups, low=1, high=heads)
    if heads % groups:
        divisors = [number for number in range(1, heads) if heads % number == 0]
        raise SettingError(
            f"groups is {groups}, and {heads} heads do not make that many equal groups; expected one of "
            f"{', '.join(map(str, divisors))}."
        )
    size = heads // groups
    return tuple(tuple(range(start, start + size)) for start in range(0, heads, size))


def group_by_similarity(similarity: Tensor, groups: int) -> Groups:
    """Return equal groups of heads with a large sum of similarities inside groups.

    From groups of neighbors on, the two heads are exchanged that raise the sum most, as long as there are such. This is
    not always the best of all groupings; its sum is never below that of neighbors.

    Args:
        similarity: Of each pair of heads, [G, G]; the mean of both orders counts, and the diagonal is not read.
        groups: Their number, a divisor of G.

    Raises:
        SettingError: `groups` does not divide the number of heads.
        ShapeError: `similarity` is not square.
        HeadwiseError: `similarity` is not finite.

    Example:
        >>> alike = torch.tensor([[0.0, 0.1, 0.9, 0.2], [0.1, 0.0, 0.3, 0.8], [0.9, 0.3, 0.0, 0.1], [0.2, 0.8, 0.1, 0]])
        >>> group_by_similarity(alike, 2)
        ((0, 2), (1, 3))
    """
    require_shape("similarity", similarity, (None, len(similarity)))
    alike = similarity.double().cpu()
    alike = ((alike + alike.T) / 2).fill_diagonal_(0)
    if not alike.isfinite().all():
        raise HeadwiseError("similarity holds NaN or infinity; expected finite numbers.")
    return tuple(sorted(_exchange(alike, group_in_order(len(alike), groups))))


def _exchange(alike: Tensor, groups: Groups) -> Groups:
    """Return groups in which no exchange of two heads raises the sum."""
    member = torch.zeros(len(alike), len(groups), dtype=alike.dtype)
    for number, group in enumerate(groups):
        member[list(group), number] = 1
    while True:
        inside = alike @ member
        own = (inside * member).sum(1)
        to_other = inside @ member.T  # [i, j]: of i with the group that j is in
        gain = to_other + to_other.T - own[:, None] - own - 2 * alike
        gain[(member @ member.T) > 0] = 0
        place = int(gain.argmax())
        first, second = divmod(place, len(alike))
        if float(gain[first, second]) <= NO_GAIN * float(alike.abs().max()):
            return tuple(tuple(column.nonzero().flatten().tolist()) for column in member.T)
        member[[first, second]] = member[[second, first]]


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

    def refine(self, start: Sharing, gram: Tensor, weights: Tensor, turns: Tensor) -> Sharing:
        """Return a sharing of smaller error of scores at the distances there are, from one within the freedom on.

        The error is sum_i E |q_i^T (T k_i - G_i T u)|^2 with u = sum_j F_j^T k_j, over queries, keys and the turns T
        between their positions, taken for independent. Pairs that hardly turn at these distances may then be mixed. By
        turns the best G for F and the best F for G are solved for, so that the error never rises.

        Args:
            start: Of `share`.
            gram: k_i^T k_j before rotary positions, [..., m, e, m, e].
            weights: Second moments of the queries of each head, [..., m, e, e].
            turns: E t_j conj(t_k) for the turns t of all pairs, of these conjugate, and 1 for each feature that does
                not turn, [e, e].
        """
        basis = self._to_complex(gram.shape[-1]).to(turns)
        gram = torch.einsum("ab,...ibjc,dc->...iajd", basis, gram + 0j, basis.conj())
        weights = basis @ (weights + 0j) @ basis.mH
        own = turns * torch.einsum("...iaib->...iab", gram)
        write, read = basis @ (start.write.mT + 0j) @ basis.mH, basis @ (start.read + 0j) @ basis.mH

        def turn(write: Tensor) -> tuple[Tensor, Tensor]:
            """Return moments of heads with the shared one, and of the shared one, as they are turned."""
            both = torch.einsum("...iajb,...jcb->...iac", gram, write.conj())
            return turns * both, turns * torch.einsum("...jca,...jad->...cd", write, both)[..., None, :, :]

        def measure(write: Tensor, read: Tensor) -> Tensor:
            both, shared = turn(write)
            lost = own - read @ both.mH - both @ read.mH + read @ shared @ read.mH
            return torch.einsum("...iab,...iba->...", weights, lost).real

        first = measure(write, read)
        for _ in range(ROUNDS):
            both, shared = turn(write)
            read = both @ torch.linalg.pinv(shared, rtol=ROUNDING, hermitian=True)
            asked = read.mH @ weights
            inverse = torch.linalg.pinv((turns.conj() * (asked @ read)).sum(-3), rtol=ROUNDING, hermitian=True)
            write = inverse[..., None, :, :] @ (turns.conj() * asked)
        total = torch.einsum("...iab,...iba->...", weights, own).real
        # what is exact stays so
        better = (measure(write, read) < first - NO_GAIN * total)[..., None, None, None]
        write, read = (basis.mH @ one @ basis for one in (write, read))
        return Sharing(write.real.mT.where(better, start.write), read.real.where(better, start.read))

    def _to_complex(self, size: int) -> Tensor:
        """Return the unitary matrix that makes of features pairs as complex numbers, their conjugates, and the rest."""
        first, second, still = self.pairs(size)
        basis = torch.zeros(size, size, dtype=torch.complex128)
        places = torch.arange(len(first))
        for offset, sign in ((0, 1j), (len(first), -1j)):
            basis[offset + places, first], basis[offset + places, second] = 0.5**0.5, sign * 0.5**0.5
        basis[torch.arange(self.rotary, size), still] = 1.0
        return basis

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
