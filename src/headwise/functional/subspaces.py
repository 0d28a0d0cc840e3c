"""Similarity of the subspaces that heads read from and write to, and of the maps between them."""

import torch
from torch import Tensor

from headwise.functional.alignment import find_triangles
from headwise.functional.tokens import accumulation_dtype, autocast_off, require_floating

# Added to the Gram matrix of a head's columns, as a share of its mean diagonal, so that nearly dependent columns have
# finite gradients.
RIDGE = {torch.float32: 1e-6, torch.float64: 1e-12}


def span_similarity(factors: Tensor) -> Tensor:
    """Return how much the column spaces of two heads overlap, [H, H] in [0, 1], from their weights [H, d, e].

    s_ij = tr(P_i P_j) / min(d, e) with P_i the projector on the columns of W_i, which is the mean squared cosine of the
    principal angles; for e <= d the projection metric is e (1 - s_ij) (Edelman, Arias and Smith 1998). It is 1 for
    equal spans, as all are where e >= d, 0 where all angles are 90 degrees, about e/d for random spans, and does not
    change when the columns of a head are mixed by an invertible matrix. So W_i^T times the gradient in W_i is 0: the
    gradient only turns the span.

    A ridge on the Gram matrix (1e-6 of the mean squared column, 1e-12 in float64) keeps the gradient of nearly
    dependent columns finite; it lowers s_ii by as much for orthogonal columns, and by more for dependent ones.

    >>> factors = torch.tensor([[[1.0], [0.0]], [[1.0], [1.0]]])
    >>> span_similarity(factors)[0, 1]
    tensor(0.5000)
    """
    require_floating("factors", factors, 3, "[H, d, e]")
    wide = factors.to(accumulation_dtype(factors))
    heads, inputs, width = wide.shape
    with autocast_off(wide):
        rows = orthonormal_basis(wide)[0].mT.flatten(0, 1)
        overlaps = (rows @ rows.mT).view(heads, width, heads, width)
    return overlaps.square().sum((1, 3)) / min(inputs, width)


def orthonormal_basis(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q [H, d, e] and L [H, e, e] with W = Q L^T, from the Cholesky factor L of W^T W and a ridge.

    >>> basis, triangle = orthonormal_basis(torch.tensor([[[3.0], [4.0]]]))
    >>> basis.flatten(), triangle.flatten()
    (tensor([0.6000, 0.8000]), tensor([5.0000]))
    """
    # the rounding of a Gram matrix in float32 is larger than the ridge, and dependent columns would have no factor
    wide = factors.double()
    gram = wide.mT @ wide
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    # a head of zeros spans nothing
    mean = torch.where(mean > 0, mean, 1.0)
    ridge = RIDGE[factors.dtype] * mean * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    triangle = find_triangles(gram + ridge)
    basis = torch.linalg.solve_triangular(triangle, wide.mT, upper=False).mT
    return basis.to(factors.dtype), triangle.to(factors.dtype)


def map_cosine(first: Tensor, second: Tensor) -> Tensor:
    """Return the cosine of the maps M_i = A_i B_i of two heads, [H, H] in [-1, 1], without forming any map.

    <M_i, M_j> = tr((A_i^T A_j)(B_j B_i^T)), over |M_i| |M_j|, of A [H, d, e] and B [H, e, d']. With A = W_V and B = W_O
    it compares what two heads do with a token they attend to, whatever basis each works in; its square is also
    indifferent to sign. Under rotary embedding W_Q W_K^T is not the map of scores: positions turn what lies between.

    >>> first = torch.tensor([[[1.0], [0.0]], [[2.0], [2.0]]])
    >>> map_cosine(first, first.mT)[0, 1]
    tensor(0.5000)
    """
    require_floating("first", first, 3, "[H, d, e]")
    require_floating("second", second, 3, "[H, e, d']")
    a, b = first.to(accumulation_dtype(first)), second.to(accumulation_dtype(second))
    heads, _, width = a.shape
    left, right = a.movedim(1, 2).flatten(0, 1), b.flatten(0, 1)
    with autocast_off(a):
        inner = ((left @ left.mT) * (right @ right.mT)).view(heads, width, heads, width).sum((1, 3))
    own = inner.diagonal().clamp_min(torch.finfo(inner.dtype).tiny)
    return inner * own.rsqrt()[:, None] * own.rsqrt()
