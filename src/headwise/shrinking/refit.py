"""The least-squares refit of W_O to what an attention gave before its heads were merged."""

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, require_positive, require_shape

# Of the mean square of the features: what they hardly determine stays as it was.
RIDGE = 1e-4


def refit_output(moments: Tensor, products: Tensor, weight: Tensor, ridge: float = RIDGE) -> Tensor:
    """Return W that gives the wanted outputs y from new features x: sum |x W^T - y|^2 + lambda |W - W_0|_F^2 is least.

    W = W_0 + (y^T x - W_0 x^T x) (x^T x + lambda 1)^-1, with lambda = ridge tr(x^T x) / F. Ridge regression (Hoerl and
    Kennard 1970) toward the given weight and not toward 0: where few tokens say nothing, W stays as it was.

    Args:
        moments: x^T x, summed over tokens, [F, F].
        products: x^T y, [F, d]; y without the bias of W_O.
        weight: W_0, [d, F].
        ridge: At least 0, exclusive.

    Returns:
        W, [d, F], in the precision of `moments`.

    Raises:
        HeadwiseError: The features are 0 or not finite.

    Example:
        >>> x, wanted = torch.randn(50, 3).double(), torch.randn(2, 3).double()
        >>> found = refit_output(x.T @ x, x.T @ x @ wanted.T, torch.zeros(2, 3), 1e-12)
        >>> bool((found - wanted).abs().max() < 1e-8)
        True
    """
    require_positive("ridge", ridge)
    features = weight.shape[-1]
    require_shape("moments", moments, (features, features))
    require_shape("products", products, (features, weight.shape[0]))
    size = float(moments.diagonal().mean())
    if not 0 < size < float("inf"):
        raise HeadwiseError(
            f"W_O cannot be refitted: the mean square of its inputs is {size:g}; expected finite features that are not "
            "all 0. Look at what the calibration runs the model on."
        )
    start = weight.to(moments)
    wanted = products - moments @ start.mT
    damped = moments + ridge * size * torch.eye(features, dtype=moments.dtype, device=moments.device)
    return start + torch.cholesky_solve(wanted, torch.linalg.cholesky(damped)).mT
