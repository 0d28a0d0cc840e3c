"""Measure the heads of a model on batches: their similarity, their attention, and the cost of removing each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import DataError, HeadwiseError, LayoutError, MaskError, NotFired, SettingError
from headwise.functional.alignment import FEWEST_TOKENS
from headwise.functional.subspaces import span_similarity
from headwise.heads.capture import Capture
from headwise.heads.heads import Heads, Site, heads_first, require_heads
from headwise.heads.record import evaluating
from headwise.heads.taps import Taps
from headwise.masks.head_mask import HeadMask
from headwise.metrics.intervals import mean_interval
from headwise.metrics.moments import OutputMoments, output_moments
from headwise.metrics.pairs import PairSums, attention_pairs, cosine_pairs, distance_pairs, parameter_pairs
from headwise.metrics.roles import role_shares
from headwise.nn.hooks import uncompiled
from headwise.report.layer import LayerReport, Matrix, SiteName
from headwise.report.removal_cost import NO_REPLAY, RemovalCosts, Score, measure_removal
from headwise.report.report import Report
from headwise.similarity.terms import position_similarity_sum


class LayerSums:
    """Sums over the calls of one attention module so far."""

    def __init__(self, site: Site) -> None:
        self.output_weights = site.find_output_weights()
        self.pairs: dict[str, PairSums] = {}
        # totals and numbers of tokens
        self.terms: dict[str, tuple[Tensor, Tensor]] = {}
        self.moments: dict[str, OutputMoments] = {}
        # the "entropy" of attention, and its "shares" on roles
        self.attention: dict[str, Any] = {}

    def add(self, capture: Capture, mask: HeadMask | None) -> None:
        """Add one call of the module."""
        outputs, keep, weights = capture.outputs, capture.query_keep, capture.weights
        for name, term, vectors, kept in (
            ("output", "output", outputs, keep),
            ("value", "subspace", capture.values, capture.key_keep),
        ):
            if vectors is not None:
                cosines = cosine_pairs(vectors, kept)
                _add(self.pairs, f"{name}_cosine", cosines)
                _add(self.pairs, f"{name}_distance", distance_pairs(vectors, kept))
                # as `output_similarity_sum` has it: the mean over all ordered pairs
                self._add_term(term, cosines.total.sum() / cosines.total.numel(), torch.tensor(cosines.count))
        if outputs is not None and outputs.shape[2] > 1:
            _add(self.moments, "outputs", output_moments(outputs, keep))
            if self.output_weights is not None:
                moments = output_moments(outputs, keep, output_weights=self.output_weights)
                _add(self.moments, "contributions", moments)
        if weights is not None:
            pairs, entropy = attention_pairs(weights, keep)
            _add(self.pairs, "attention_js", pairs)
            _add(self.attention, "entropy", entropy)
            _add(self.attention, "first", _read_first(weights, capture))
            self._add_term("position", *position_similarity_sum(weights, keep))
            if mask is not None:
                _add(self.attention, "shares", role_shares(weights, mask.roles.to(weights.device), keep))

    def _add_term(self, name: str, total: Tensor, count: Tensor) -> None:
        before = self.terms.get(name)
        self.terms[name] = (total, count) if before is None else (before[0] + total, before[1] + count)


def _read_first(weights: Tensor, capture: Capture) -> Tensor:
    """Return the attention of each head on the first real key, summed over the real queries, [H]."""
    first = weights[..., 0]
    if capture.key_keep is not None:
        places = capture.key_keep.int().argmax(-1)[:, None, None, None]
        first = weights.take_along_dim(places.to(weights.device), -1).squeeze(-1)
    if capture.query_keep is not None:
        first = first * capture.query_keep.to(weights.device)[:, None]
    return first.double().sum((0, 2)).cpu()


def _add(sums: dict[str, Any], name: str, value: Any) -> None:
    sums[name] = sums[name] + value if name in sums else value


def make_layer_report(site: Site, sums: LayerSums, costs: RemovalCosts | None, notes: list[str]) -> LayerReport:
    """Make the report of a layer; whatever is omitted is added to the notes."""
    pairs = {name: _to_rows(found.mean) for name, found in sums.pairs.items()}
    outputs, contributions = sums.moments.get("outputs"), sums.moments.get("contributions")
    of = "queries" if site.kind == "pooling" else "tokens"
    if outputs is not None:
        if outputs.count < 2:
            notes.append(f"output CKA was omitted: it needs at least two {of}.")
        else:
            pairs["output_cka"] = _to_rows(outputs.linear_cka_matrix())
            if outputs.count < 10 * site.head_size:
                notes.append(
                    f"output CKA is computed over {outputs.count} {of}; with heads of {site.head_size} dimensions, "
                    f"fewer than {10 * site.head_size} bias it upward."
                )
    if contributions is not None and contributions.count < FEWEST_TOKENS:
        notes.append(f"effective heads and CKA were omitted: they need at least {FEWEST_TOKENS} {of}.")
        contributions = None
    if contributions is not None:
        pairs["contribution_cka"] = _to_rows(contributions.debiased_cka_matrix())
    wrong = next((name for name, rows in pairs.items() if not all(isfinite(x) for row in rows for x in row)), None)
    if wrong is not None:
        raise DataError(
            f"{site.label}: {wrong.replace('_', ' ')} of its heads is not finite on these batches; "
            "check the inputs and weights for NaN or infinity."
        )
    effective = None if contributions is None else contributions.effective_heads()
    pairs |= _compare_parameters(site, notes)
    entropy, shares = sums.attention.get("entropy"), sums.attention.get("shares")
    if shares is not None and not bool((shares.queries > 0).all()):
        notes.append("a role allows no pair on these batches; roles were omitted.")
        shares = None
    return LayerReport(
        site=SiteName(site.name),
        kind=site.kind,
        stack=site.stack,
        layer=site.layer,
        heads=site.num_heads,
        pairs=pairs,
        terms={name: float(total / count.clamp_min(1)) for name, (total, count) in sums.terms.items()},
        first=() if entropy is None else tuple((sums.attention["first"] / sums.pairs["attention_js"].count).tolist()),
        entropy=() if entropy is None else tuple((entropy / sums.pairs["attention_js"].count).tolist()),
        drops=() if costs is None else tuple(mean_interval(drops) for drops in costs.drops[site.name]),
        roles=() if shares is None else _to_rows(shares.share.T),
        chance=() if shares is None else tuple(shares.expected.tolist()),
        effective_heads=None if effective is None else effective.number,
        effective_heads_weighted=None if effective is None else effective.weighted,
    )


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


WHAT = {"outputs": "outputs", "values": "values", "weights": "attention weights"}


@heads_first(None)
def measure(
    heads: Heads,
    batches: Iterable[Any],
    *,
    score: Score | None = None,
    score_name: str = "score",
    forward: Callable[[nn.Module, Any], Any] | None = None,
    roles: Callable[[Any], HeadMask] | None = None,
    replay: bool = True,
    advance: Callable[[int, int], None] | None = None,
) -> Report:
    """Measure the heads of a model, layer by layer, and the cost of removing each head.

    One forward pass per batch gives, for each pair of heads in a layer, the cosine, distance and linear CKA of their
    outputs, the cosine and distance of their values, and the Jensen-Shannon divergence of their attention; for each
    head, the entropy of its attention and its share on each role's pairs; for each layer, the similarities of Li et al.
    (2021). Averages run over valid tokens. `Report.notes` lists what could not be read in this model.

    With a score, each head is removed alone (`ablate`) on every batch. A forward pass without a head reuses what was
    computed before that head; the results are bit for bit those of full forward passes. This is checked on the first
    batch: resumed at the last module with all heads, the model must return what the full forward pass returned. If it
    does not, every forward pass is computed in full, and the notes say so. The interval of a drop is Student's 95 %
    interval over the paired differences of the items.

    The model runs in evaluation mode, without gradients; its mode is restored afterwards. A compiled model runs
    uncompiled, as it would be compiled again for each head.

    Args:
        heads: The heads of a model, or some of them.
        batches: Inputs: tensors or mappings of keyword arguments, on the model's device; anything with `forward`. They
            are kept in memory during the measurement.
        score: Maps the model's output and the batch to one number per item, [N]; larger is better, and the model's
            score is their mean. Without it no head is removed.
        score_name: Name of the score.
        forward: Runs the model on a batch and returns its output; by default model(batch) or model(**batch).
        roles: Maps a batch to its role masks (`Roles`), for self-attention.
        replay: Whether to reuse what was computed before the removed head.
        advance: Called with the number of forward passes done and in total, for a progress bar.

    Returns:
        A `Report`: print it, `save` it, `compare` it.

    Raises:
        SettingError: There is no batch, or the model cannot be called with one.
        NotFired: A forward pass does not use a module of `heads`.
        ShapeError: `score` does not return one finite number per item.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3,
        ...                               enable_nested_tensor=False)
        >>> batches = [torch.randn(4, 5, 8), torch.randn(2, 7, 8)]
        >>> report = hw.measure(hw.find_heads(model), batches, score=lambda output, _: output.std((1, 2)))
        >>> report.items, report.replayed, len(report.layers[0].drops)
        (6, True, 2)
    """
    require_heads(heads)
    model = heads.model
    kept, run = list(batches), forward or _call
    if not kept:
        raise SettingError("there are no batches; expected at least one.")
    total = len(kept) * (1 + (0 if score is None else sum(site.num_heads for site in heads)))
    done = 0

    def step(forwards: int) -> None:
        nonlocal done
        done += forwards
        if advance is not None:
            advance(done, total)

    with torch.no_grad(), evaluating(model), uncompiled(), heads.exposed():
        reading = Reading(heads, roles, lambda: run(model, kept[0]))
        costs = None
        if score is not None:
            # reading does not change this forward pass, so the passes without a head can reuse it
            costs = measure_removal(heads, kept, run, score, replay=replay, advance=step, around=reading)
        for batch in kept if score is None else ():
            with reading(batch):
                run(model, batch)
            step(1)
    notes = reading.notes
    if costs is not None and not costs.replayed:
        notes.append(f"{NO_REPLAY}: {costs.reason}.")
    layers = tuple(make_layer_report(site, reading.sums[site.name], costs, notes) for site in heads.sites)
    return Report(
        model=type(model).__name__,
        batches=len(kept),
        tokens=reading.tokens,
        layers=layers,
        score="" if costs is None else score_name,
        items=0 if costs is None else len(costs.whole),
        whole=None if costs is None else mean_interval(costs.whole),
        replayed=costs is not None and costs.replayed,
        roles=reading.names,
        notes=tuple(dict.fromkeys(notes)),
    )


def group_readable(
    heads: Heads, forward: Callable[[], object] | None = None
) -> tuple[dict[tuple[str, ...], Heads], list[str]]:
    """Group the attention modules by the subset of "outputs", "values", "weights" that can be read.

    Args:
        heads: The heads.
        forward: Runs the model, where a forward has to show that the weights of a module can be read.

    Returns:
        The modules by subset, and a note on everything that cannot be read.
    """
    groups: dict[tuple[str, ...], list[Site]] = {}
    notes: list[str] = []
    hidden = () if forward is None else _find_hidden(heads, forward)
    for site in heads.sites:
        found = []
        for what in WHAT:
            try:
                if what == "weights" and site in hidden:
                    raise LayoutError(site.name)
                Taps(replace(heads, sites=(site,)), **{what: True}).remove()
                found.append(what)
            except LayoutError:
                notes.append(f"{WHAT[what]} of {type(site.module).__name__} cannot be read and were omitted.")
        groups.setdefault(tuple(found), []).append(site)
    return {found: replace(heads, sites=tuple(sites)) for found, sites in groups.items()}, list(dict.fromkeys(notes))


def _find_hidden(heads: Heads, forward: Callable[[], object]) -> Sequence[Site]:
    """Return the attention modules that write their softmax out, and whose weights a forward does not show."""

    def hides(sites: tuple[Site, ...]) -> bool:
        try:
            with Taps(replace(heads, sites=sites), weights=True):
                forward()
        except (LayoutError, NotFired):
            return True
        return False

    sites = tuple(site for site in heads.sites if site.scores is not None and site.scores(site.module).written)
    return [site for site in sites if hides((site,))] if sites and hides(sites) else ()


class Reading:
    """Accumulates measures over batches: `with reading(batch)` reads the forward pass inside the block.

    Attributes:
        sums: Sums of each attention module, by its name.
        names: Names of the roles.
        tokens: Number of queries so far.
        notes: What could not be read, and remarks on what was.
    """

    def __init__(self, heads: Heads, roles: Callable[[Any], HeadMask] | None, forward: Callable[[], object]) -> None:
        self._groups, self.notes = group_readable(heads, forward)
        self._roles = roles
        self.sums = {site.name: LayerSums(site) for site in heads.sites}
        self.names: tuple[str, ...] = ()
        self.tokens = 0

    @contextmanager
    def __call__(self, batch: Any) -> Iterator[None]:
        """Read the one forward pass that runs inside the block.

        Raises:
            MaskError: The roles of the batch differ from those of an earlier batch.
            NotFired: The forward pass does not use an attention module.
        """
        with ExitStack() as attached:
            taps = [
                attached.enter_context(Taps(sites, **dict.fromkeys(found, True), beside=True))
                for found, sites in self._groups.items()
                if found
            ]
            yield
            captures = [capture for tap in taps for capture in tap.read()]
        mask = None if self._roles is None else self._roles(batch)
        if mask is not None:
            if self.names not in ((), mask.names):
                raise MaskError(
                    f"a batch has roles {mask.names}, an earlier one {self.names}; expected the same in all."
                )
            self.names = mask.names
        self.tokens += max((capture.queries for capture in captures), default=0)
        for site, passes in Counter(capture.site.name for capture in captures).items():
            if passes > 1:
                self.notes.append(
                    f"{site or 'the model'} runs {passes} times per forward pass; its numbers cover all {passes}."
                )
        for capture in captures:
            kind, weights, own = capture.site.kind, capture.weights, mask
            if (
                mask is not None
                and weights is not None
                and (kind == "cross" or not weights.shape[2] == weights.shape[3] == mask.tokens)
            ):
                own = None
                self.notes.append(
                    "roles apply to pairs of words and were not measured in attention with one query per text."
                    if kind == "pooling"
                    else f"roles were not measured in {kind}-attention of other lengths."
                )
            self.sums[capture.site.name].add(capture, own)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    raise SettingError(
        f"a batch is a {type(batch).__name__}; expected a tensor or a mapping of the model's arguments, or "
        "forward=... to run the model on a batch."
    )
