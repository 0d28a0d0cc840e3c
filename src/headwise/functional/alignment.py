"""Centered kernel alignment of heads, the effective number and determinant of a kernel, and cross-correlation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.functional.tokens import accumulation_dtype, autocast_off, require_floating, require_keep


def find_triangles(matrices: Tensor) -> Tensor:
    """Return L with A = L L^T of symmetric matrices [*, N, N]; NaN where A is not positive definite or not finite.

    A penalty on weights that diverged is NaN then, for which training loops look, and nothing waits for the device;
    `torch.linalg.cholesky` raises an error of its own, and waits.

    >>> find_triangles(torch.tensor([[[4.0]], [[-1.0]]])).flatten()
    tensor([2., nan])
    """
    triangles, failed = torch.linalg.cholesky_ex(matrices)
    return torch.where((failed == 0)[..., None, None], triangles, math.nan)


# The unbiased estimator is a U-statistic over distinct quadruples of tokens.
FEWEST_TOKENS = 4
# Below this share of its largest value a Hilbert-Schmidt norm is the rounding error of a constant.
ROUNDING = {torch.float32: 1e-12, torch.float64: 1e-24}
# A head whose features deviate from their mean by less than this many roundings of it is constant.
CONSTANT = 16.0


@dataclass(frozen=True, eq=False)
class Products:
    """What alignment is computed from: sums over N tokens of the centered features c(x) of H heads.

    Each head is divided by its root mean square before it is summed.

    Attributes:
        squares: [H, H], |S_ij|_F^2 with S_ij = sum_t c(x_ti) c(x_tj)^T.
        lengths: [H, H], sum_t |c(x_ti)|^2 |c(x_tj)|^2.
        traces: [H], sum_t |c(x_ti)|^2.
        count: N, a tensor of one number.
        sizes: [H], the mean of |c(x_t)|^2 by which the square of each head was divided.
    """

    squares: Tensor
    lengths: Tensor
    traces: Tensor
    count: Tensor
    sizes: Tensor

    def unbiased_hsic(self) -> Tensor:
        """Return the unbiased HSIC_1 of each pair with linear kernels (Song et al. 2012), [H, H].

        HSIC_1(K, L) = [tr K'L' + (1'K'1)(1'L'1) / ((N-1)(N-2)) - 2 (1'K'L'1) / (N-2)] / (N (N-3)), with K' the token
        Gram matrix with a zero diagonal. It does not change when the features are centered, after which
        K'1 = -(|c(x_1)|^2, ..., |c(x_N)|^2), and everything follows from sums over tokens. The matrix is positive
        semidefinite (Szekely and Rizzo 2014). With fewer than 4 tokens it is 0.
        """
        return self._unbiased() * (self.sizes[:, None] * self.sizes)

    def linear_cka(self) -> Tensor:
        """Return the linear CKA of each pair (Kornblith et al. 2019), [H, H] in [0, 1]; 0 for a constant head."""
        return self._normalize(self.squares)

    def debiased_cka(self) -> Tensor:
        """Return HSIC_1(i, j) / sqrt(HSIC_1(i, i) HSIC_1(j, j)) of each pair (Nguyen et al. 2021), [H, H] in [-1, 1].

        Independent heads score 0 at any number of tokens; `linear_cka` scores about e / N. A head that is constant
        over tokens, or too close to it for four tokens to tell, scores 0 with every other head.
        """
        return self._normalize(self._unbiased())

    def _unbiased(self) -> Tensor:
        n = self.count.clamp_min(FEWEST_TOKENS)
        traces = self.traces[:, None] * self.traces
        inside = self.squares - self.lengths * (n / (n - 2)) + traces / ((n - 1) * (n - 2))
        return torch.where(self.count >= FEWEST_TOKENS, inside / (n * (n - 3)), 0.0)

    def _normalize(self, products: Tensor) -> Tensor:
        own = products.diagonal()
        least = ROUNDING[products.dtype] * self.squares.diagonal() / self.count.clamp_min(1).square()
        sound = own > torch.maximum(least, torch.full_like(own, torch.finfo(own.dtype).tiny))
        scale = torch.where(sound, own, 1.0).rsqrt() * sound
        return products * scale[:, None] * scale


def multiply_features(
    features: Tensor, keep: Tensor | None = None, metric: Tensor | None = None, *, sketch: int = 0
) -> Products:
    """Return the sums from which alignment is computed, of features [..., H, e] and valid tokens `keep` [...].

    Features are centered first, also for the unbiased estimator: uncentered sums in float32 lose every digit to a
    common offset. Each head is divided by its root mean square, as fourth powers would overflow or vanish; one that is
    constant over tokens has sums of 0 and gets no gradient. Padded tokens may hold anything and get gradient 0.

    With a symmetric `metric` M [H, e, e], lengths and products are of features y with y . y' = x^T M x': for
    M_i = W_O,i W_O,i^T these are the contributions y = x W_O,i, [N, d], which are never formed.

    `sketch` is the number of random directions g ~ N(0, I) in which products of different heads are estimated, without
    bias, as |X_j^T X_i|_F^2 = E |X_j^T X_i g|^2: T H^2 e multiplications for each. They are drawn anew in each call,
    from torch's generator on the CPU. 0 computes the products.

    >>> head = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 5.0], [1.0, -1.0], [0.0, 3.0]])
    >>> multiply_features(torch.stack([head, -3 * head.flip(1)], dim=1)).debiased_cka()[0, 1]
    tensor(1.0000)
    """
    centered, count, least = center_features(features, keep)
    if metric is not None:
        metric = metric.to(centered.dtype)
    with autocast_off(centered):
        # x^T M x, [T, H]
        turned = centered if metric is None else torch.einsum("the,hef->thf", centered, metric)
        squares = (centered * turned).sum(-1)
        sizes = (squares.detach().sum(0) / count.clamp_min(1)).clamp_min(torch.finfo(squares.dtype).tiny)
        # features round, whatever a metric makes of them
        spread = sizes if metric is None else centered.detach().square().sum((0, 2)) / count.clamp_min(1)
        sound = spread > least
        # every result is homogeneous in each head, so that the scale needs no gradient
        scaled = centered * (sizes.rsqrt() * sound)[:, None]
        squares = squares / sizes * sound
        products = _estimate_products(scaled, metric, sketch) if sketch else square_products(scaled, metric)
        lengths = squares.mT @ squares
    return Products(products, lengths, squares.sum(0), count, sizes)


def form_metric(columns: Tensor) -> Tensor:
    """Return W^T W of the columns of W_O that read each head, [H, d, e] -> [H, e, e], in single precision at least.

    In half precision it has no digits left for heads whose directions are of unequal size.
    """
    columns = columns.to(accumulation_dtype(columns))
    with autocast_off(columns):
        return columns.mT @ columns


def square_products(vectors: Tensor, metric: Tensor | None = None) -> Tensor:
    """Return |Y_i^T Y_j|_F^2 of each pair of heads, [H, H].

    It is the sum of squares of a block of the product of features X^T X, T (He)^2 multiplications, and also tr K_i K_j
    of the products of tokens K_i = X_i M_i X_i^T, H T^2 e + H^2 T^2 of them. The smaller product is computed, of tokens
    where T^2 <= H e^2. X is [T, H, e], and M [H, e, e] as for `multiply_features`.

    >>> square_products(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    tensor([[ 25., 125.],
            [125., 625.]])
    """
    tokens, heads, width = vectors.shape
    if tokens**2 <= heads * width**2:
        turned = vectors.permute(1, 2, 0)
        gram: Tensor = _Scatter.apply(turned) if metric is None else turned.mT @ metric @ turned
        return _Scatter.apply(gram.flatten(1).mT)
    scatter: Tensor = _Scatter.apply(vectors.flatten(1))
    blocks = scatter.view(heads, width, heads, width)
    if metric is None:
        return blocks.square().sum((1, 3))
    # |Y_i^T Y_j|^2 = tr(S_ij M_j S_ij^T M_i)
    left = torch.einsum("iab,ibjc->iajc", metric, blocks)
    right = torch.einsum("iajb,jbc->iajc", blocks, metric)
    return (left * right).sum((1, 3))


def _estimate_products(vectors: Tensor, metric: Tensor | None, draws: int) -> Tensor:
    """Return an unbiased estimate of |Y_i^T Y_j|_F^2 from random directions, exact on the diagonal, [H, H]."""
    heads, width = vectors.shape[1:]
    directions = torch.randn(heads, width, draws, dtype=vectors.dtype, device="cpu").to(vectors.device)
    own = torch.einsum("the,thf->hef", vectors, vectors)
    if metric is None:
        exact = own.square().sum((1, 2))
        projected = torch.einsum("the,hes->ths", vectors, directions)
        across = vectors.flatten(1).mT @ projected.flatten(1)
        found = across.view(heads, width, heads, draws).square().sum((1, 3)) / draws
    else:
        # directions of the contributions' own space: x M^(1/2) g, whose square has the mean x^T M x
        turned = metric @ own
        exact = (turned * turned.mT).sum((1, 2))
        eye = torch.eye(width, dtype=metric.dtype, device=metric.device)
        root = find_triangles(metric + 1e-6 * (metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * eye))
        projected = torch.einsum("the,hes->ths", vectors, root @ directions)
        across = (vectors.flatten(1).mT @ projected.flatten(1)).view(heads, width, heads, draws)
        found = torch.einsum("iajs,iab,ibjs->ij", across, metric, across) / draws
    found = (found + found.mT) / 2
    return torch.where(torch.eye(heads, dtype=torch.bool, device=found.device), exact, found)


def center_features(features: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the features less their mean over valid tokens, [T, H, e], zeros at padding, and the number of tokens.

    The third is the variance, [H], up to which a head is constant: one so small is the rounding error of the mean.
    """
    require_floating("features", features, 2, "[..., H, e]")
    wide = features.to(accumulation_dtype(features)).reshape(-1, *features.shape[-2:])
    if keep is None:
        count = torch.full((), len(wide), dtype=wide.dtype, device=wide.device)
        mean = wide.mean(0)
        centered = wide - mean
    else:
        require_keep(keep, features.shape[:-2])
        padding = ~keep.reshape(-1)[:, None, None]
        count = keep.sum().to(wide.dtype)
        mean = wide.masked_fill(padding, 0.0).sum(0) / count.clamp_min(1)
        centered = (wide - mean).masked_fill(padding, 0.0)
    share = CONSTANT * torch.finfo(wide.dtype).eps
    return centered, count, (share * mean.detach()).square().sum(-1)


class _Scatter(torch.autograd.Function):
    """X^T X of [..., N, d], with one product in the backward pass in place of autograd's two."""

    generate_vmap_rule = True

    @staticmethod
    def forward(features: Tensor) -> Tensor:
        return features.mT @ features

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG004  torch's
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (features,) = ctx.saved_tensors
        return features @ (grads[0] + grads[0].mT)


EPSILON = 1e-3


def effective_number(kernel: Tensor, energies: Tensor | None = None) -> Tensor:
    """Return the effective number of heads, [*] in [1, H]: 1 where all are copies, H where no two are alike.

    E = exp(-sum_k l_k log l_k) over the eigenvalues l of K/H, of similarities K [*, H, H] (Roy and Vetterli 2007; the
    Vendi score of Friedman and Dieng 2023). k equal groups of copies give k. Entries are clipped to [0, 1], as chance
    correlations below 0 are not a likeness, the diagonal is set to 1, and eigenvalues are clipped at 0 and
    renormalized, as the clipped matrix need not be positive semidefinite. Without a gradient: its slope is infinite
    where an eigenvalue is 0.

    With `energies` p_i [*, H], of any scale, the eigenvalues are of sqrt(p_i) K_ij sqrt(p_j), so that a head that says
    nothing does not count.

    >>> effective_number(torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
    tensor(1.8899, dtype=torch.float64)
    """
    if kernel.dim() < 2 or kernel.shape[-1] != kernel.shape[-2]:
        raise ShapeError(f"the kernel has shape {tuple(kernel.shape)}; expected [*, H, H].")
    heads = kernel.shape[-1]
    clipped = kernel.detach().double().clamp(0.0, 1.0)
    clipped = clipped.masked_fill(torch.eye(heads, dtype=torch.bool, device=clipped.device), 1.0)
    shares = torch.full_like(clipped[..., 0], 1 / heads)
    if energies is not None:
        wide = energies.detach().double()
        total = wide.sum(-1, keepdim=True)
        shares = torch.where(total > 0, wide / total, shares)
    weighted = shares.sqrt().unsqueeze(-1) * clipped * shares.sqrt().unsqueeze(-2)
    # of numbers that are not finite there are no eigenvalues
    finite = weighted.isfinite().all(-1).all(-1)
    weighted = torch.where(finite[..., None, None], weighted, 1.0)
    eigenvalues = torch.linalg.eigvalsh((weighted + weighted.mT) / 2).clamp_min(0.0)
    found = torch.special.entr(eigenvalues / eigenvalues.sum(-1, keepdim=True)).sum(-1).exp()
    return torch.where(finite, found, math.nan)


def log_determinant(kernel: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Return -(1/H) log det((K + epsilon I) / (1 + epsilon)): 0 where no two heads are alike, largest for copies.

    The volume that the heads span, as in determinantal point processes (Macchi 1975; Kulesza and Taskar 2012). The
    kernel [*, H, H] is positive semidefinite with ones on the diagonal. For copies it is
    ((H - 1) log(1 / epsilon) - log H) / H up to O(epsilon). The gradient, -(K + epsilon I)^-1 / H in K, falls on the
    pair that is closest and grows as 1 / epsilon.

    >>> round(float(log_determinant(torch.tensor([[1.0, 0.5], [0.5, 1.0]]))), 3)
    0.144
    """
    heads = kernel.shape[-1]
    eye = torch.eye(heads, dtype=torch.float64, device=kernel.device)
    factor = find_triangles((kernel.double() + epsilon * eye) / (1 + epsilon))
    return -2 / heads * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


# Added to the variance of a feature, as a share of the mean variance of its head.
SMALLEST_VARIANCE = 1e-5


def cross_correlation(features: Tensor, keep: Tensor | None = None, *, matched: bool = False) -> Tensor:
    """Return how strongly the features [..., H, e] of two heads correlate over valid tokens, [H, H].

    With C^ij = Z_i^T Z_j / N of standardized features, s_ij = (1/e) sum_ab (C^ij_ab)^2 in [0, e], the redundancy term
    of Barlow Twins (Zbontar et al. 2021) between heads in place of views, or mean_a (C^ij_aa)^2 in [0, 1] with
    `matched`. VICReg's covariance term (Bardes et al. 2022) is the first without the division by the deviation.

    It does not change with the scale and offset of each feature, but does with a rotation inside a head. Its value for
    a copy is not fixed, so that layers do not compare. Independent heads score about e / N, and one that is constant
    over tokens 0.

    >>> features = torch.tensor([[[1.0], [2.0]], [[2.0], [0.0]], [[4.0], [1.0]]])
    >>> round(float(cross_correlation(features)[0, 1]), 4)
    0.1071
    """
    centered, count, least = center_features(features, keep)
    count = count.clamp_min(1)
    size = (centered.detach().square().sum(0) / count).mean(-1, keepdim=True)
    # the result does not change with a head's scale, which needs no gradient; a constant head has none at all
    smallest = torch.finfo(size.dtype).tiny / torch.finfo(size.dtype).eps
    sound = size > (least[:, None] / features.shape[-1]).clamp_min(smallest)
    scaled = centered * (torch.where(sound, size, 1.0).rsqrt() * sound)
    variance = scaled.square().sum(0) / count
    # the root of a variance of 0 would have an infinite slope
    added = torch.where(sound, SMALLEST_VARIANCE * variance.mean(-1, keepdim=True), 1.0)
    units = scaled * (variance + added).rsqrt()
    with autocast_off(units):
        if matched:
            return torch.einsum("tia,tja->ija", units, units).div(count).square().mean(-1)
        return square_products(units) / (count.square() * units.shape[-1])
