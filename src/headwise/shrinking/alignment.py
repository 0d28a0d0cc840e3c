"""One head in the place of several: aligned by rotations and averaged, or the best one of all in closed form.

Everything is computed from second moments. Features of m heads are y_i [N, e]; one head in their place has features
u = sum_i y_i F_i, and a reader of head i, who needs y_i, gets u G_i^H. Features may be complex: one complex number for
each frequency of rotary positions. Axes before those named are of problems that have nothing to do with one another.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
