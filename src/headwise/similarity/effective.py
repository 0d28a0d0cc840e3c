"""What a kernel [H, H] of heads says of all of them: how many there are in effect, and its determinant."""

import math

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.similarity.triangles import find_triangles

EPSILON = 1e-3


def effective_number(kernel: Tensor, energies: Tensor | None = None) -> Tensor:
    """Return the effective number of heads, in [1, H]: 1 where all are copies, H where no two are alike.

    E = exp(-sum_k l_k log l_k) over the eigenvalues l of K/H (Roy and Vetterli 2007; the Vendi score of Friedman and
    Dieng 2023). k equal groups of copies give k. Entries are clipped to [0, 1], as chance correlations below 0 are no
    likeness, the diagonal is set to 1, and eigenvalues are clipped at 0 and renormalized, as the clipped matrix need
    not be positive semidefinite.

    With `energies` p_i (shares of the variance that each head contributes) the eigenvalues are those of
    sqrt(p_i) K_ij sqrt(p_j), so that a head that says nothing does not count.

    Args:
        kernel: [*, H, H], symmetric similarities, for example `debiased_cka` of the heads' contributions.
        energies: [*, H], at least 0, of any scale.

    Returns:
        [*], float64, without a gradient: its slope is infinite where an eigenvalue is 0.

    Raises:
        ShapeError: The kernel is no square matrix.

    >>> effective_number(torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
    tensor(1.8899, dtype=torch.float64)
    """
    if kernel.dim() < 2 or kernel.shape[-1] != kernel.shape[-2]:
        raise ShapeError(f"the kernel has shape {tuple(kernel.shape)}; expected [*, H, H].")
    heads = kernel.shape[-1]
    clipped = kernel.detach().double().clamp(0.0, 1.0)
    clipped = clipped.masked_fill(torch.eye(heads, dtype=torch.bool, device=clipped.device), 1.0)
    shares = torch.full_like(clipped[..., 0], 1 / heads) if energies is None else _to_shares(energies)
    weighted = shares.sqrt().unsqueeze(-1) * clipped * shares.sqrt().unsqueeze(-2)
    # of numbers that are not finite there are no eigenvalues
    finite = weighted.isfinite().all(-1).all(-1)
    weighted = torch.where(finite[..., None, None], weighted, 1.0)
    eigenvalues = torch.linalg.eigvalsh((weighted + weighted.mT) / 2).clamp_min(0.0)
    found = torch.special.entr(eigenvalues / eigenvalues.sum(-1, keepdim=True)).sum(-1).exp()
    return torch.where(finite, found, math.nan)


def log_determinant(kernel: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Return -(1/H) log det((K + epsilon I) / (1 + epsilon)): 0 where no two heads are alike, largest for copies.

    The volume that the heads span, as in determinantal point processes (Macchi 1975; Kulesza and Taskar 2012). For
    copies it is ((H - 1) log(1 / epsilon) - log H) / H up to O(epsilon). The gradient, -(K + epsilon I)^-1 / H in K,
    falls on the pair that is closest and grows as 1 / epsilon.

    Args:
        kernel: [*, H, H], positive semidefinite with ones on the diagonal.
        epsilon: Added to the diagonal, above 0.

    >>> round(float(log_determinant(torch.tensor([[1.0, 0.5], [0.5, 1.0]]))), 3)
    0.144
    """
    heads = kernel.shape[-1]
    eye = torch.eye(heads, dtype=torch.float64, device=kernel.device)
    factor = find_triangles((kernel.double() + epsilon * eye) / (1 + epsilon))
    return -2 / heads * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _to_shares(energies: Tensor) -> Tensor:
    wide = energies.detach().double()
    total = wide.sum(-1, keepdim=True)
    return torch.where(total > 0, wide / total, 1 / wide.shape[-1])
