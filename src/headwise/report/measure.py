"""Measure the heads of a model on batches: their similarity, their attention, and the cost of removing each."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError, MaskError, NotFired, SettingError
from headwise.heads.capture import Capture
from headwise.heads.find import unwrap_model
from headwise.heads.heads import Heads, Site, require_heads
from headwise.heads.taps import Taps
from headwise.masks.head_mask import HeadMask
from headwise.metrics.intervals import mean_interval
from headwise.nn.compiled import uncompiled
from headwise.report.layer_sums import LayerSums, make_layer_report
from headwise.report.removal_cost import NO_REPLAY, Score, measure_removal
from headwise.report.report import Report

WHAT = {"outputs": "outputs", "values": "values", "weights": "attention weights"}


def measure(
    model: nn.Module,
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
        model: The model.
        heads: Its heads, or some of them.
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
        SettingError: `heads` belong to another model, there is no batch, or the model cannot be called with a batch.
        NotFired: A forward pass does not use a module of `heads`.
        ShapeError: `score` does not return one finite number per item.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3,
        ...                               enable_nested_tensor=False)
        >>> batches = [torch.randn(4, 5, 8), torch.randn(2, 7, 8)]
        >>> report = hw.measure(model, hw.find_heads(model), batches, score=lambda output, _: output.std((1, 2)))
        >>> report.items, report.replayed, len(report.layers[0].drops)
        (6, True, 2)
    """
    require_heads(heads)
    model, _ = unwrap_model(model)
    if heads.model is not model:
        raise SettingError("heads belong to another model; expected hw.find_heads(model) of the model given.")
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
        if score is None:
            costs = None
            for batch in kept:
                with reading(batch):
                    run(model, batch)
                step(1)
        else:
            # reading does not change this forward pass, so the passes without a head can reuse it
            costs = measure_removal(heads, kept, run, score, replay=replay, advance=step, around=reading)
    sums, names, notes = reading.sums, reading.names, reading.notes
    if costs is not None and not costs.replayed:
        notes.append(f"{NO_REPLAY}: {costs.reason}.")
    layers = tuple(make_layer_report(site, sums[site.name], costs, notes) for site in heads.sites)
    return Report(
        model=type(model).__name__,
        batches=len(kept),
        tokens=reading.tokens,
        layers=layers,
        score="" if costs is None else score_name,
        items=0 if costs is None else len(costs.whole),
        whole=None if costs is None else mean_interval(costs.whole),
        replayed=costs is not None and costs.replayed,
        roles=names,
        notes=tuple(dict.fromkeys(notes)),
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of every module at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def group_readable(
    heads: Heads, forward: Callable[[], object] | None = None
) -> tuple[dict[tuple[str, ...], Heads], list[str]]:
    """Group the attention modules by what can be read of them.

    Args:
        heads: The heads.
        forward: Runs the model, where a forward has to show that the weights of a module can be read.

    Returns:
        For each subset of "outputs", "values", "weights" the modules of which exactly these can be read, and a note on
        everything that cannot be read.
    """
    groups: dict[tuple[str, ...], list[Site]] = {}
    notes: list[str] = []
    hidden = () if forward is None else _find_hidden(heads, forward)
    for site in heads.sites:
        one = replace(heads, sites=(site,))
        found = []
        for what in WHAT:
            try:
                if what == "weights" and site in hidden:
                    raise LayoutError(site.name)
                Taps(one, **{what: True}).remove()
                found.append(what)
            except LayoutError:
                notes.append(f"{WHAT[what]} of {type(site.module).__name__} cannot be read and were omitted.")
        groups.setdefault(tuple(found), []).append(site)
    return {found: replace(heads, sites=tuple(sites)) for found, sites in groups.items()}, list(dict.fromkeys(notes))


def _find_hidden(heads: Heads, forward: Callable[[], object]) -> tuple[Site, ...]:
    """Return the attention modules that write their softmax out, and whose weights a forward does not show."""
    sites = tuple(site for site in heads.sites if site.scores is not None and site.scores(site.module).written)
    with suppress(LayoutError, NotFired):
        _read_weights(heads, sites, forward)
        return ()
    hidden = []
    for site in sites:
        try:
            _read_weights(heads, (site,), forward)
        except (LayoutError, NotFired):
            hidden.append(site)
    return tuple(hidden)


def _read_weights(heads: Heads, sites: tuple[Site, ...], forward: Callable[[], object]) -> None:
    if sites:
        with Taps(replace(heads, sites=sites), weights=True):
            forward()


class Reading:
    """Accumulates measures over batches: `with reading(batch)` reads the forward pass inside the block.

    Attributes:
        sums: Sums of each attention module, by its name.
        names: Names of the roles.
        tokens: Number of queries so far.
        notes: What could not be read, and remarks on what was.
    """

    def __init__(
        self, heads: Heads, roles: Callable[[Any], HeadMask] | None, forward: Callable[[], object] | None = None
    ) -> None:
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
            fits = _mask_fits(capture, mask)
            if mask is not None and capture.weights is not None and not fits:
                self.notes.append(_explain_missing_roles(capture))
            self.sums[capture.site.name].add(capture, mask if fits else None)


def _mask_fits(capture: Capture, mask: HeadMask | None) -> bool:
    weights = capture.weights
    return (
        mask is not None
        and weights is not None
        and capture.site.kind != "cross"
        and (weights.shape[2] == weights.shape[3] == mask.tokens)
    )


def _explain_missing_roles(capture: Capture) -> str:
    if capture.site.kind == "pooling":
        return "roles apply to pairs of words and were not measured in attention with one query per text."
    return f"roles were not measured in {capture.site.kind}-attention of other lengths."


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    raise SettingError(
        f"a batch is a {type(batch).__name__}; expected a tensor or a mapping of the model's arguments, or "
        "forward=... to run the model on a batch."
    )
