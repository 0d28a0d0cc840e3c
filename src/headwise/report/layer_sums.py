"""Sums over the calls of one attention module, from which its layer report is made."""

from collections.abc import Mapping
from math import isfinite

import torch
from torch import Tensor

from headwise.disagreement.terms import position_similarity_sum
from headwise.errors import DataError, HeadwiseError
from headwise.heads.capture import Capture
from headwise.heads.heads import Site
from headwise.masks.head_mask import HeadMask
from headwise.metrics.intervals import mean_interval
from headwise.metrics.moments import OutputMoments, output_moments
from headwise.metrics.pairs import PairSums, attention_pairs, cosine_pairs, distance_pairs, parameter_pairs
from headwise.metrics.roles import RoleShares, role_shares
from headwise.report.layer import LayerReport, Matrix, SiteName
from headwise.report.removal_cost import RemovalCosts
from headwise.similarity.alignment import FEWEST_TOKENS
from headwise.similarity.subspaces import span_similarity


class LayerSums:
    """Sums over the calls of one attention module so far."""

    def __init__(self, site: Site) -> None:
        self.output_weights = site.find_output_weights()
        self.contributions: OutputMoments | None = None
        self.pairs: dict[str, PairSums] = {}
        self.terms: dict[str, tuple[Tensor, Tensor]] = {}
        self.moments: OutputMoments | None = None
        self.entropy: Tensor | None = None
        self.shares: RoleShares | None = None

    def add(self, capture: Capture, mask: HeadMask | None) -> None:
        """Add one call of the module."""
        if capture.outputs is not None:
            outputs, keep = capture.outputs, capture.query_keep
            cosines = cosine_pairs(outputs, keep)
            self._pair("output_cosine", cosines)
            self._pair("output_distance", distance_pairs(outputs, keep))
            self._term("output", _average_all_pairs(cosines))
            if outputs.shape[2] > 1:
                moments = output_moments(outputs, keep)
                self.moments = moments if self.moments is None else self.moments + moments
                if self.output_weights is not None:
                    moments = output_moments(outputs, keep, output_weights=self.output_weights)
                    self.contributions = moments if self.contributions is None else self.contributions + moments
        if capture.values is not None:
            cosines = cosine_pairs(capture.values, capture.key_keep)
            self._pair("value_cosine", cosines)
            self._pair("value_distance", distance_pairs(capture.values, capture.key_keep))
            self._term("subspace", _average_all_pairs(cosines))
        if capture.weights is not None:
            pairs, entropy = attention_pairs(capture.weights, capture.query_keep)
            self._pair("attention_js", pairs)
            self.entropy = entropy if self.entropy is None else self.entropy + entropy
            self._term("position", position_similarity_sum(capture.weights, capture.query_keep))
            if mask is not None:
                shares = role_shares(capture.weights, mask.roles.to(capture.weights.device), capture.query_keep)
                self.shares = shares if self.shares is None else self.shares + shares

    def _pair(self, name: str, pairs: PairSums) -> None:
        self.pairs[name] = self.pairs[name] + pairs if name in self.pairs else pairs

    def _term(self, name: str, found: tuple[Tensor, Tensor]) -> None:
        before = self.terms.get(name)
        self.terms[name] = found if before is None else (before[0] + found[0], before[1] + found[1])


def make_layer_report(site: Site, sums: LayerSums, costs: RemovalCosts | None, notes: list[str]) -> LayerReport:
    """Make the report of a layer; whatever is omitted is added to the notes."""
    pairs = {name: _to_rows(found.mean) for name, found in sums.pairs.items()}
    if sums.moments is not None:
        of = "queries" if site.kind == "pooling" else "tokens"
        if sums.moments.count < 2:
            notes.append(f"output CKA was omitted: it needs at least two {of}.")
        else:
            pairs["output_cka"] = _to_rows(sums.moments.linear_cka_matrix())
        if 1 < sums.moments.count < 10 * site.head_size:
            notes.append(
                f"output CKA is computed over {sums.moments.count} {of}; with heads of {site.head_size} dimensions, "
                f"fewer than {10 * site.head_size} bias it upward."
            )
        if sums.contributions is not None and sums.contributions.count < FEWEST_TOKENS:
            notes.append(f"effective heads and CKA were omitted: they need at least {FEWEST_TOKENS} {of}.")
    effective = None
    if sums.contributions is not None and sums.contributions.count >= FEWEST_TOKENS:
        pairs["contribution_cka"] = _to_rows(sums.contributions.debiased_cka_matrix())
    _require_finite(site, pairs)
    if sums.contributions is not None and "contribution_cka" in pairs:
        effective = sums.contributions.effective_heads()
    pairs |= _compare_parameters(site, notes)
    shares = sums.shares
    complete = shares is not None and bool((shares.queries > 0).all())
    if shares is not None and not complete:
        notes.append("a role allows no pair on these batches; roles were omitted.")
    return LayerReport(
        site=SiteName(site.name),
        kind=site.kind,
        stack=site.stack,
        layer=site.layer,
        heads=site.num_heads,
        pairs=pairs,
        terms={name: float(total / count.clamp_min(1)) for name, (total, count) in sums.terms.items()},
        entropy=() if sums.entropy is None else tuple((sums.entropy / sums.pairs["attention_js"].count).tolist()),
        drops=() if costs is None else tuple(mean_interval(drops) for drops in costs.drops[site.name]),
        roles=_to_rows(shares.share.T) if shares is not None and complete else (),
        chance=tuple(shares.expected.tolist()) if shares is not None and complete else (),
        effective_heads=None if effective is None else effective.number,
        effective_heads_weighted=None if effective is None else effective.weighted,
    )


def _require_finite(site: Site, pairs: Mapping[str, Matrix]) -> None:
    wrong = next((name for name, rows in pairs.items() if not all(isfinite(x) for row in rows for x in row)), None)
    if wrong is not None:
        raise DataError(
            f"{site.label}: {wrong.replace('_', ' ')} of its heads is not finite on these batches; "
            "check the inputs and weights for NaN or infinity."
        )


def _average_all_pairs(cosines: PairSums) -> tuple[Tensor, Tensor]:
    """Return `output_similarity_sum` of the same vectors: the mean over all ordered pairs, and the number of tokens."""
    return cosines.total.sum() / cosines.total.numel(), torch.tensor(cosines.count)


def _compare_parameters(site: Site, notes: list[str]) -> dict[str, Matrix]:
    found: dict[str, Matrix] = {}
    for head_slice in site.slices:
        name = "value_parameter" if head_slice.projection == "value" else head_slice.projection
        try:
            heads = head_slice.read()
            cosine, distance = parameter_pairs(heads.flatten(1))
        except HeadwiseError as error:
            notes.append(f"parameters were omitted: {error}")
            continue
        found |= {f"{name}_cosine": _to_rows(cosine), f"{name}_distance": _to_rows(distance)}
        found[f"{head_slice.projection}_span"] = _to_rows(span_similarity(head_slice.turn(heads)))
    if (columns := site.find_output_weights()) is not None:
        found["output_span"] = _to_rows(span_similarity(columns))
    return found


def _to_rows(matrix: Tensor) -> Matrix:
    return tuple(tuple(row) for row in matrix.detach().cpu().double().tolist())
