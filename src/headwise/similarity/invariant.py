"""Similarities of heads that tricks do not fool: to be lowered by a penalty, in place of the cosines of the papers.

Means are over pairs of different heads. Those of sets of tokens (`CKA`, `HSIC`, `CrossCorrelation`, `LogDeterminant`)
take each call of an attention as a whole, and are averaged over calls; terms on parameters need no call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headwise.errors import LayoutError
from headwise.functional.alignment import (
    EPSILON,
    FEWEST_TOKENS,
    Products,
    cross_correlation,
    form_metric,
    log_determinant,
    multiply_features,
)
from headwise.functional.cosine import squared_cosine_sum
from headwise.functional.subspaces import map_cosine, span_similarity
from headwise.heads.heads import Site
from headwise.heads.sharding import gather_mean
from headwise.settings import Natural, Positive, check_fields
from headwise.similarity.terms import PARAMETERS, Arithmetic


@dataclass(frozen=True)
class SquaredCosine(Arithmetic):
    """Squared cosine of head outputs: mean_{i<j} cos(O_i, O_j)^2; per query, in [0, 1].

    Unlike `Output` it is not lowered by heads that cancel. A rotation inside a head, which W_O undoes, hides copies
    from it: `CKA` sees them. Cost: T H^2 e multiplications.
    """

    reads = "outputs"

    def sum_and_count(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sum and number over valid queries."""
        return squared_cosine_sum(tensor, keep)


class _OfProducts(Arithmetic):
    """A similarity of the tokens of one call, computed from their products of features."""

    reads = "outputs"
    of: Literal["outputs", "contributions"]
    sketch: Natural = 0

    __post_init__ = check_fields

    def sum_and_count_at(self, site: Site, tensor: Tensor | None, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the value and 1, for the tokens of one call."""
        assert tensor is not None  # captured, as `reads` asks
        metric = form_metric(_read_factors(site, "output")) if self.of == "contributions" else None
        products = multiply_features(tensor, keep, metric, sketch=self.sketch)
        return _count_call(self._measure(products), products.count)

    def _measure(self, products: Products) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class CKA(_OfProducts):
    """Centered kernel alignment of heads: mean_{i<j} max(CKA_ij, 0) over the tokens of a call, in [0, 1].

    CKA_ij = HSIC(i, j) / sqrt(HSIC(i, i) HSIC(j, j)) with linear kernels (Kornblith et al. 2019). Scale, sign, offset
    and rotations of a head do not change it, so that its gradient has no part along them. A negative
    estimate means no detectable dependence and counts as 0. With fewer than four valid tokens it is 0.

    Args:
        debiased: Whether HSIC is the unbiased estimator of Song et al. 2012, under which independent heads score 0 in
            batches of any size, or the biased one, under which they score about e / T.
        of: "outputs" O_h, or "contributions" O_h W_O,h, whose gradient reaches W_O too and which no change of basis
            between W_V and W_O fools; H^2 e^3 multiplications more.
        sketch: 0 computes the products of features, T (He)^2 multiplications, those of about one linear layer; or of
            tokens, H T^2 e + H^2 T^2, where these are smaller (T^2 <= H e^2). A number s estimates them from s random
            directions at T H^2 e s, drawn anew in each call from torch's generator on the CPU, which dropout on a
            CPU uses too; unbiased, with a relative deviation of about sqrt(2 / s) where one direction dominates.
    """

    debiased: bool = True
    of: Literal["outputs", "contributions"] = "outputs"
    sketch: Natural = 0

    def _measure(self, products: Products) -> Tensor:
        kernel = products.debiased_cka() if self.debiased else products.linear_cka()
        return _average_pairs(kernel.clamp_min(0.0))


@dataclass(frozen=True)
class HSIC(_OfProducts):
    """Hilbert-Schmidt independence criterion: mean_{i<j} HSIC_1(i, j), unbiased, over the tokens of a call.

    With linear kernels (Song et al. 2012), at least 0 in the mean over batches, and 0 for uncorrelated heads. It is not
    normalized: it falls with the fourth power of the outputs' scale, so that heads can lower it by shrinking, and its
    strength depends on that scale. `CKA` is its normalized form.

    Args:
        of, sketch: As for `CKA`; the whole value stays unbiased under a sketch.
    """

    of: Literal["outputs", "contributions"] = "outputs"
    sketch: Natural = 0

    def _measure(self, products: Products) -> Tensor:
        return _average_pairs(products.unbiased_hsic())


@dataclass(frozen=True)
class CrossCorrelation(Arithmetic):
    """Cross-correlation of the features of two heads: mean_{i<j} (1/e) sum_ab (C^ij_ab)^2 over the tokens of a call.

    The redundancy term of Barlow Twins (Zbontar et al. 2021) between heads; without the division by deviations it is
    VICReg's covariance term (Bardes et al. 2022). It is biased by about e / T, changes with rotations inside a head,
    and has no fixed value for copies: `CKA` has none of these faults. With fewer than four valid tokens it is 0. Cost:
    that of `CKA`.

    Args:
        matched: Whether to compare feature a of one head with feature a of the other alone, T H^2 e multiplications; a
            permutation of features then hides copies.
    """

    matched: bool = False

    reads = "outputs"

    __post_init__ = check_fields

    def sum_and_count(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the mean over pairs and 1, for the tokens of one call."""
        value = _average_pairs(cross_correlation(tensor, keep, matched=self.matched))
        every = torch.full((), tensor.shape[:-2].numel(), device=value.device) if keep is None else keep.sum()
        return _count_call(value, every)


@dataclass(frozen=True)
class LogDeterminant(_OfProducts):
    """Volume that heads span: -(1/H) log det((K + eps I) / (1 + eps)), K the linear CKA, over the tokens of a call.

    As in determinantal point processes (Macchi 1975; Kulesza and Taskar 2012). It is 0 where no two heads are alike and
    about log(1 / eps) for copies. Unlike a mean over pairs, its gradient falls on the pair that is closest and grows as
    1 / eps, so bound its strength with `Relative`. Biased as `CKA(debiased=False)` is; the unbiased kernel has negative
    entries that a determinant would push further from 0.

    Args:
        epsilon: Added to the diagonal, above 0.
        of: "outputs" or "contributions", as for `CKA`.
    """

    epsilon: Positive = EPSILON
    of: Literal["outputs", "contributions"] = "outputs"

    def _measure(self, products: Products) -> Tensor:
        kernel = products.linear_cka()
        # a constant head has no alignment, not even with itself
        kernel = torch.where(torch.eye(len(kernel), dtype=torch.bool, device=kernel.device), 1.0, kernel)
        return log_determinant(kernel, self.epsilon)


@dataclass(frozen=True)
class SpanOverlap(Arithmetic):
    """Overlap of the subspaces of heads' parameters: mean_{i<j} tr(P_i P_j) / e, in [0, 1]; needs no forward pass.

    P_i projects on the span of the rows that compute query, key or value i, or of the columns of W_O that read it: the
    projection metric (Edelman, Arias and Smith 1998). No mixing inside a head changes it, so that its gradient only
    turns spans. With He > d, the width of the model, it cannot fall below (He/d - 1) / (H - 1).

    Args:
        projection: "query", "key", "value" or "output".
    """

    projection: Literal["query", "key", "value", "output"] = "value"

    reads = PARAMETERS

    __post_init__ = check_fields

    def count_heads(self, site: Site) -> int:
        """Return how many heads have a subspace of their own."""
        return site.key_value_heads if self.projection in ("key", "value") else site.num_heads

    def sum_and_count_at(self, site: Site, tensor: Tensor | None, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the mean over pairs and 1.

        Raises:
            LayoutError: Each head spans all of its input.
        """
        del tensor, keep
        factors = _read_factors(site, self.projection)
        inputs, width = factors.shape[1:]
        if width > inputs:
            raise LayoutError(
                f"{site.label}: its {self.projection} heads have {width} features of {inputs} inputs, so that each "
                "spans all of them and no two differ; compare another projection, or outputs: hw.similarity.CKA()."
            )
        value = _average_pairs(span_similarity(factors))
        return value, torch.ones((), device=value.device)


@dataclass(frozen=True)
class MapCosine(Arithmetic):
    """Squared cosine of the maps W_V W_O of heads: mean_{i<j} <M_i, M_j>^2 / (|M_i|^2 |M_j|^2); needs no forward pass.

    It compares what two heads do with a token they attend to. No change of basis between W_V and W_O changes it.
    """

    reads = PARAMETERS

    def sum_and_count_at(self, site: Site, tensor: Tensor | None, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the mean over pairs and 1."""
        del tensor, keep
        values = _read_factors(site, "value")
        # under grouped queries several heads read the values of one
        values = values.repeat_interleave(site.num_heads // len(values), dim=0)
        value = _average_pairs(map_cosine(values, _read_factors(site, "output").mT).square())
        return value, torch.ones((), device=value.device)


def _read_factors(site: Site, projection: str) -> Tensor:
    """Return the parameters of a projection as [M, d, e], columns that span each head's subspace, with gradients."""
    parts = [part for part in (*site.slices, site.output) if part is not None and part.projection == projection]
    if not parts:
        raise LayoutError(f"{site.label}: no {projection} weights were found, which this term compares.")
    return parts[0].turn(parts[0].compute(gather_mean))


def _average_pairs(matrix: Tensor) -> Tensor:
    heads = len(matrix)
    return matrix.triu(1).sum() / max(heads * (heads - 1) / 2, 1)


def _count_call(value: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of a call and 1, both 0 where it had too few tokens to say anything."""
    enough = tokens >= FEWEST_TOKENS
    return torch.where(enough, value, 0.0), enough.to(value.dtype)
