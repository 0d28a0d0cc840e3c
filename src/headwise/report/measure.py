"""`measure`: what the heads of a model do on a user's batches, and what each of them is worth.

Owns the walk over batches and what is read of each attention module. The equations are those of `metrics`,
`disagreement`, `head_pairs` and `role_shares`; nothing here is a loss, and no gradient flows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError, MaskError, SettingError
from headwise.heads.capture import Capture
from headwise.heads.heads import Heads, require_heads
from headwise.heads.site import Site
from headwise.heads.taps import Taps
from headwise.masks.head_mask import HeadMask
from headwise.metrics.intervals import mean_interval
from headwise.report.layer_sums import SiteSums, layer_report
from headwise.report.removal_cost import EVERY_FORWARD_WHOLE, Score, head_costs
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
    """Return what the heads of a model do, layer by layer, and what the removal of each head costs.

    Read in one forward a batch, with all heads: for each two heads of a layer the cosine, distance and linear CKA of
    their outputs, the cosine and distance of their values, the Jensen-Shannon divergence of their attention; for each
    head the entropy of its attention and its share on each role's pairs; for each layer the similarities of Li et al.
    (2021). Averages run over valid tokens. What cannot be read in a model is left out, and `Report.notes` says so.

    With a score, each head is removed alone (`ablate`) on every batch. A forward without a head gives back what was
    computed before that head, and computes the rest: the numbers are bit for bit those of whole forwards. That is tried
    on the first batch: begun at the last module, the model must put out with all heads what it put out as a whole;
    where it does not, every forward is whole and the notes say so. The interval of a drop is Student's, at 95 %, over
    the paired differences of the items.

    The model is measured in evaluation mode, without gradients, and left in the mode it was in.

    Args:
        model: The model.
        heads: Its heads, or some of them.
        batches: What it is run on: tensors, or mappings of its keyword arguments, on its device; with `forward`
            anything. They are kept in memory while they are measured.
        score: Given the model's output and the batch, one number an item, [N]; larger is better, and the model's score
            is their mean. None removes no head.
        score_name: What the score is called.
        forward: Runs the model on a batch and returns its output; model(batch) or model(**batch) when None.
        roles: Given a batch, the masks of its roles (`Roles`), for self-attention.
        replay: False computes every forward whole.
        advance: Told forwards done and forwards in all, for a progress bar.

    Returns:
        A `Report`: print it, `save` it, `compare` it.

    Raises:
        SettingError: `heads` are of another model, there is no batch, or a batch is none that the model can be called
            with.
        NotFired: A forward does not go through a module of `heads`.
        ShapeError: `score` does not return one finite number an item.

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
    if heads.model is not model:
        raise SettingError("heads are of another model than the one given; expected hw.find_heads(model) of this one.")
    kept, run = list(batches), forward or _call
    if not kept:
        raise SettingError("there is no batch; expected at least one to measure heads on.")
    total = len(kept) * (1 + (0 if score is None else sum(site.num_heads for site in heads)))
    done = 0

    def step(forwards: int) -> None:
        nonlocal done
        done += forwards
        if advance is not None:
            advance(done, total)

    with torch.no_grad(), evaluating(model):
        reading = Reading(heads, roles)
        if score is None:
            costs = None
            for batch in kept:
                with reading(batch):
                    run(model, batch)
                step(1)
        else:
            # what is read leaves the forward as it is: it is also the one that the forwards without a head go on from
            costs = head_costs(heads, kept, run, score, replay=replay, advance=step, around=reading)
    sums, names, notes = reading.sums, reading.names, reading.notes
    if costs is not None and not costs.replayed:
        notes.append(f"{EVERY_FORWARD_WHOLE}: {costs.reason}.")
    layers = tuple(layer_report(site, sums[site.name], costs, notes) for site in heads.sites)
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
    """Put a model into evaluation mode, and every module back into its own mode at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def readable(heads: Heads) -> tuple[dict[tuple[str, ...], Heads], list[str]]:
    """Return what can be read of which sites, and a note on each thing that cannot.

    Returns:
        For each set of things ("outputs", "values", "weights") the sites of which just these can be read; and notes.
    """
    groups: dict[tuple[str, ...], list[Site]] = {}
    notes: list[str] = []
    for site in heads.sites:
        one = replace(heads, sites=(site,))
        found = []
        for what in WHAT:
            try:
                Taps(one, **{what: True}).remove()
                found.append(what)
            except LayoutError:
                notes.append(f"{WHAT[what]} of {type(site.module).__name__} cannot be read, and were left out.")
        groups.setdefault(tuple(found), []).append(site)
    return {found: replace(heads, sites=tuple(sites)) for found, sites in groups.items()}, list(dict.fromkeys(notes))


class Reading:
    """What each site does, batch by batch: a forward inside `with reading(batch)` is read.

    Attributes:
        sums: What each site did, by its name.
        names: The names of the roles.
        tokens: How many queries the forwards had.
        notes: What could not be read, and what is to be known of what was.
    """

    def __init__(self, heads: Heads, roles: Callable[[Any], HeadMask] | None) -> None:
        self._groups, self.notes = readable(heads)
        self._roles = roles
        self.sums = {site.name: SiteSums() for site in heads.sites}
        self.names: tuple[str, ...] = ()
        self.tokens = 0

    @contextmanager
    def __call__(self, batch: Any) -> Iterator[None]:
        """Read the one forward that runs inside the block.

        Raises:
            MaskError: The roles of the batch are others than those of one before.
            NotFired: The forward does not go through a site.
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
                raise MaskError(f"a batch has roles {mask.names}, one before {self.names}; expected the same in all.")
            self.names = mask.names
        self.tokens += max((capture.queries for capture in captures), default=0)
        for site, passes in Counter(capture.site.name for capture in captures).items():
            if passes > 1:
                self.notes.append(
                    f"{site or 'the model'} runs {passes} times in a forward; its numbers are over all {passes}."
                )
        for capture in captures:
            fits = _fits(capture, mask)
            if mask is not None and capture.weights is not None and not fits:
                self.notes.append(_without_roles(capture))
            self.sums[capture.site.name].add(capture, mask if fits else None)


def _fits(capture: Capture, mask: HeadMask | None) -> bool:
    weights = capture.weights
    return (
        mask is not None
        and weights is not None
        and capture.site.kind != "cross"
        and (weights.shape[2] == weights.shape[3] == mask.tokens)
    )


def _without_roles(capture: Capture) -> str:
    if capture.site.kind == "pooling":
        return "roles are of pairs of words, and were not looked for in attention with one query a text."
    return f"roles were not looked for in {capture.site.kind}-attention of other lengths."


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    raise SettingError(
        f"a batch is a {type(batch).__name__}; expected a tensor or a mapping of the model's arguments, or "
        "forward=... that runs the model on a batch."
    )
