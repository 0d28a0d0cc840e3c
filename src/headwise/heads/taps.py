"""Reading the values, attention weights and outputs of each head during a forward pass.

Outputs are read at the module that plays W_O, values where they are projected, weights where the scores are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError, NotFired, SettingError, require_integer
from headwise.functional.alignment import FEWEST_TOKENS, effective_number, form_metric, multiply_features
from headwise.functional.tokens import select_tokens
from headwise.heads.capture import (
    Capture,
    ForwardScope,
    OpenCapture,
    Padding,
    ValueParts,
    find_askers,
    list_parameters,
    name_arguments,
    note_padding,
    read_padding,
    split_heads,
)
from headwise.heads.heads import Heads, Site, Undo, require_heads
from headwise.heads.layouts.functional import is_handing
from headwise.heads.method import Method
from headwise.nn.checkpointing import is_recomputing
from headwise.nn.hooks import Handle, PerThread, read_first_argument, unwrap_compiled
from headwise.nn.multihead import walk_once
from headwise.nn.scores import Attended, Observer
from headwise.strength import Target

# A loop that trains for this many calls without reading its taps holds every graph it has built.
UNREAD_CALLS = 64

READS = ("outputs", "values", "weights", "mean_weights")


@dataclass
class _Here:
    """What a thread knows of a site: its calls since the last read, and the padding of the next call's queries."""

    calls: list[OpenCapture] = field(default_factory=list)
    asked: Padding = field(default_factory=Padding)


class _SiteTap:
    """The hooks of one site, and its calls since the last read.

    Its own object, without look-ups by name, so that layers that torch.compile compiles one by one share a graph.
    """

    def __init__(self, taps: Taps, site: Site) -> None:
        self.taps, self.site, self.crosses = taps, site, site.kind == "cross"
        self.here, self.reached = PerThread(_Here), False
        self.names, self.parts = list_parameters(site.module), ValueParts(site)
        called = bool(site.value_modules) and not is_handing(site)
        apart = {
            "values": called or all(part.projection != "value" for part in site.parts),
            "outputs": site.output_projection is not None,
        }
        # read where the scores are computed, as no module call returns or takes it, or may not
        self.within = [what for what in apart if getattr(taps, what) and not apart[what] and site.gives(what)]
        read = {id(module) for module in site.value_modules} if taps.values else ()
        # where the modules that project values are held, each with its name there
        self.places = [
            (owner, name, part)
            for owner in site.module.modules()
            for name, part in owner._modules.items()
            if part is not None and id(part) in read
        ]

    def attach(self, undo: Undo) -> None:
        """Put the hooks in place; `undo` is given what removes them."""
        taps, site, within = self.taps, self.site, self.within
        needed = taps.outputs and "outputs" not in within
        projection = site.expose(undo) if needed or site.prepare is not None else None
        taps.hook_before(site.module, self.begin)
        if taps.outputs and projection is not None:
            taps.hook_before(projection.module, self.take_outputs)
        if taps.mean_weights and site.divided:
            raise LayoutError(
                f"{site.label}: under tensor parallel no process computes the weights of all heads, "
                "so their mean is not available; read weights=True, or use Position() without recompute."
            )
        if taps.weights or taps.mean_weights or within:
            # values that a module may return are read here where it did not, and need no call here
            needs = taps.weights or taps.mean_weights or {*within} - {"values"} or not site.value_modules
            active = taps._is_active if needs else bool
            listener = Observer(self.see, taps.weights, taps.mean_weights, taps.beside, active)
            undo(site.reach_scores(undo).listen(listener))
        if taps.values:
            if not site.value_modules and "values" not in within:
                raise LayoutError(
                    f"{site.label} ({type(site.module).__name__}): no module computes values of its "
                    "heads; read their outputs or weights."
                )
            for index, module in enumerate(site.value_modules):
                taps.hook_after(module, partial(self.take_values, index))

    def note_asked(self, padding: Padding) -> None:
        """Note the padding that the self-attention on the same queries received."""
        if not self.taps._is_silent():
            self.here.own.asked = padding

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Open a capture; the hook before the site."""
        taps = self.taps
        if taps._is_silent():
            return
        self._require_values()
        accumulates, running, scope, here = taps._accumulates(), taps._running.own, taps._forward, self.here.own
        if accumulates and running.transient:
            # what an evaluation left unread must not enter the next penalty
            taps._forget()
        if not accumulates:
            here.calls = [call for call in here.calls if scope.inside and call.forward is not None]
        running.transient, self.reached = not accumulates, True
        own = read_padding(module, name_arguments(self.names, args, kwargs))
        # the decoder's own self-attention ran just before, on the queries of this call
        asked = here.asked if self.crosses else own
        capture = Capture(self.site, key_keep=own.keep)
        here.calls.append(OpenCapture(capture, own, asked, scope.token if scope.inside else None))
        if taps.newest is not None:
            del here.calls[: -taps.newest]
        elif len(here.calls) > UNREAD_CALLS:
            raise NotFired(
                f"{len(here.calls)} captures of {self.site.label} were kept and never read; call the penalty "
                "(or read the taps) after each forward, or remove() it."
            )

    def take_outputs(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Take the outputs of the heads; the hook before W_O."""
        projection = self.site.output_projection
        if projection is None or module is not projection.module:
            return
        capture = self._find_newest()
        # once a call: another attention may call the same module later
        if capture is not None and capture.outputs is None:
            capture.outputs = split_heads(read_first_argument(module, args, kwargs), self.site)

    def take_values(self, index: int, _module: nn.Module, _args: tuple, output: Tensor) -> None:
        """Take values; the hook after one of the modules that project them."""
        capture = self._find_newest()
        if capture is not None and capture.values is None:
            capture.values = self.parts.take(index, output)

    def see(self, attended: Attended) -> None:
        """Take what is read where the scores are computed."""
        capture = self._find_newest()
        if capture is None:
            return
        if attended.key_keep is not None:
            capture.key_keep = attended.key_keep
        if "values" in self.within and capture.values is None:
            capture.values = attended.values
        if "outputs" in self.within:
            capture.outputs = attended.outputs
        if self.taps.weights and attended.weights is not None:
            capture.weights = self.site.gather_heads(attended.weights, 1, self.site.num_heads)
        if self.taps.mean_weights:
            capture.mean_weights = attended.mean_weights

    def _find_newest(self) -> Capture | None:
        calls = self.here.own.calls
        return calls[-1].capture if calls and not self.taps._is_silent() else None

    def _require_values(self) -> None:
        """Raise `NotFired` where another module has taken the place of one that projects values."""
        for owner, name, part in self.places:
            held = getattr(owner, name, None)
            if held is not part and (held is None or unwrap_compiled(held) is not part):
                raise NotFired(
                    f"{self.site.label}: what projects its values is now a {type(held).__name__}, set after this was "
                    "attached, and the values of another module would be read; call remove(), find heads again, and "
                    "attach again."
                )


@dataclass
class _Running:
    """Whether a thread's captures are kept only until the next forward, and whether it makes no captures."""

    transient: bool = False
    paused: bool = False


class Taps(Handle):
    """Reads chosen attentions during forward passes and keeps the captures until they are read.

    While the model trains (training mode, gradients on) every call since the last `read` is kept; captures of a forward
    that raised are dropped. Otherwise each forward of the model drops the captures of the previous one, and a part
    called without the model (the encoder, while generating) keeps its newest call. A module shared between layers gives
    one capture per call, in order. Recomputation by activation checkpointing is not captured again. Copies and pickles
    of the model are not tapped. Each thread that runs the model reads its own calls.

    Args:
        heads: The sites to read.
        outputs: Whether to read O_h.
        values: Whether to read V_g.
        weights: Whether to read attention weights; they are computed explicitly, as torch does with need_weights, and
            only while this is attached. A model of transformers may run sdpa or eager then.
        beside: Whether weights are computed separately, so that the output of the attention stays bitwise identical,
            at the cost of one more attention. Otherwise the module attends with the weights that are read.
        mean_weights: Whether to read the mean of the attention weights over heads. In `nn.MultiheadAttention` and
            over the sdpa of transformers it is computed some heads at a time, in addition to fused attention, and the
            weights of the heads are not kept.
        training_only: Whether forwards in evaluation mode or without gradients are left as they are without taps.
        newest: Number of calls of a site that are kept, older ones being dropped; None keeps all, up to 64.

    Raises:
        SettingError: Nothing was requested.
        LayoutError: A site cannot be read that way.

    Example:
        >>> import headwise as hw
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> with Taps(hw.find_heads(model), outputs=True) as taps:
        ...     _ = model(torch.randn(3, 5, 8))
        ...     (capture,) = taps.read()
        >>> capture.outputs.shape
        torch.Size([3, 5, 2, 4])
    """

    def __init__(
        self,
        heads: Heads,
        *,
        outputs: bool = False,
        values: bool = False,
        weights: bool = False,
        mean_weights: bool = False,
        beside: bool = False,
        training_only: bool = False,
        newest: int | None = None,
    ) -> None:
        require_heads(heads)
        if newest is not None:
            require_integer("newest", newest, low=1)
        if not (outputs or values or weights or mean_weights):
            raise SettingError(
                "Taps was given nothing to read; expected at least one of outputs, values, weights, mean_weights."
            )
        super().__init__()
        self.heads = heads
        self.outputs, self.values, self.weights, self.mean_weights = outputs, values, weights, mean_weights
        self.beside, self.training_only, self.newest = beside, training_only, newest
        self._records: list[_SiteTap] = []
        self._running = PerThread(_Running)
        self._forward = ForwardScope(heads.model, self._begin_forward, self._end_forward)
        self._removers.append(self._forward.remove)
        with self._attaching(), walk_once(heads.model):
            self._records = [_SiteTap(self, site) for site in heads.sites]
            taps = {record.site: record for record in self._records}
            for asking, asked in find_askers(heads):
                self.hook_before(asked.module, note_padding(asked.module, taps[asking].note_asked))
            for record in self._records:
                record.attach(self._removers.append)

    def read(self) -> list[Capture]:
        """Return the captures since the last read, and forget them.

        They are in the order of the calls where sites are called in the order of `heads`, as layers are: the first call
        of each site, then the second of each that was called again, and so on.

        Raises:
            NotFired: A site was not called since the last read, or a call of it did not compute all that is read (a
                cache holds values of earlier calls). Or the taps are attached to no model.
        """
        if not self.attached:
            raise NotFired(
                "these taps are attached to no model: remove() was called on them, or they are a copy or were "
                "unpickled. Make new ones for the heads of the model that runs."
            )
        taken = self._take()
        silent = [site.label for site, calls in zip(self.heads.sites, taken, strict=True) if not calls]
        if silent:
            raise NotFired(
                f"{len(silent)} of {len(self.heads)} tapped sites were not called since the last read: "
                f"{', '.join(silent[:6])}. Run a forward pass of the model first. If you did: a copy of the model is "
                "not tapped (find_heads in the copy); calls without gradients, as of a checkpoint with "
                "use_reentrant=True, are dropped when training continues; and each thread reads its own calls."
            )
        return [self._finish(call) for call in _interleave(taken)]

    def read_called(self) -> list[Capture]:
        """Like `read`, but skip calls that did not compute everything requested."""
        found = []
        for call in _interleave(self._take()):
            with suppress(NotFired):
                found.append(self._finish(call))
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Capture nothing of this thread inside the block; the model computes what it would without taps."""
        before, self._running.own.paused = self._running.own.paused, True
        try:
            yield
        finally:
            self._running.own.paused = before

    def check(self) -> None:
        """Raise `NotFired` unless a tapped site was called."""
        if not any(record.reached for record in self._records):
            raise NotFired(
                f"none of the {len(self._records)} tapped sites was called; run a forward pass of the model that the "
                "heads were found in (a copy of it is not tapped)."
            )

    def remove(self) -> None:
        """Detach from the model."""
        super().remove()
        for record in self._records:
            record.here = PerThread(_Here)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_records": [], "_forward": None}

    def _describe(self) -> str:
        read = [name for name in READS if getattr(self, name)]
        unread = sum(len(record.here.own.calls) for record in self._records)
        return f"{', '.join(read)} of {len(self.heads)} sites, {unread} calls to read"

    def _take(self) -> list[list[OpenCapture]]:
        taken = [record.here.own.calls for record in self._records]
        for record in self._records:
            record.here.own.calls = []
        return taken

    def _finish(self, call: OpenCapture) -> Capture:
        return call.finish(**{name: getattr(self, name) for name in READS})

    def _is_active(self) -> bool:
        return not self._running.own.paused and (not self.training_only or self._accumulates())

    def _is_silent(self) -> bool:
        # the first run of a checkpoint was captured
        return not self._is_active() or is_recomputing()

    def _accumulates(self) -> bool:
        return self.heads.model.training and torch.is_grad_enabled()

    def _forget(self) -> None:
        for record in self._records:
            record.here.own.calls, record.here.own.asked = [], Padding()

    def _begin_forward(self) -> None:
        if not self._is_active() or self._accumulates():
            return
        for record in self._records:
            here = record.here.own
            here.calls, here.asked = [call for call in here.calls if call.forward is None], Padding()

    def _end_forward(self, failed: bool) -> None:
        # what a forward that failed captured must not enter the next penalty
        for record in self._records if failed else ():
            here = record.here.own
            here.calls = [call for call in here.calls if call.forward is not self._forward.token]


@dataclass(frozen=True)
class Tap(Method):
    """What heads compute, read: `Taps`, as a value.

    Attributes:
        outputs, values, weights, mean_weights, beside, training_only, newest: As for `Taps`.

    Example:
        >>> Tap(outputs=True, layers=(0,)).layers
        (0,)
    """

    outputs: bool = False
    values: bool = False
    weights: bool = False
    mean_weights: bool = False
    beside: bool = False
    training_only: bool = False
    newest: int | None = None

    def attach(self, heads: Heads) -> Taps:
        """Read the selected heads; errors as of `Taps`."""
        own = {entry.name: getattr(self, entry.name) for entry in fields(self) if not entry.kw_only}
        return Taps(self.select(heads), **own)


def _interleave(taken: list[list[OpenCapture]]) -> list[OpenCapture]:
    """Return the first call of each site, then the second of each that was called again, and so on."""
    return [call for turn in zip_longest(*taken) for call in turn if call is not None]


@torch.no_grad()
def count_effective_heads(captures: Sequence[Capture], keep: Tensor | None = None) -> Tensor:
    """Return the effective number of heads of one attention over the tokens of some calls, a float64 scalar.

    `effective_number` of the debiased alignment of the contributions O_h W_O,h, or of O_h where no linear output
    projection follows. NaN with fewer than four valid tokens. `keep` [B, L] overrides the padding of each call.
    """
    tokens = []
    for capture in captures:
        assert capture.outputs is not None  # captured for this
        tokens.append(select_tokens(capture.outputs, capture.query_keep if keep is None else keep))
    outputs = torch.cat(tokens)
    if len(outputs) < FEWEST_TOKENS:
        return torch.full((), math.nan, dtype=torch.float64, device=outputs.device)
    weights = captures[0].site.find_output_weights()
    metric = None if weights is None else form_metric(weights.to(outputs.device))
    return effective_number(multiply_features(outputs, metric=metric).debiased_cka())


def require_reachable(target: Target, heads: Heads) -> None:
    """Raise `SettingError` if an attention with several heads has fewer than a target asks for."""
    for site in heads:
        if 1 < site.num_heads < target.effective_heads:
            raise SettingError(
                f"{target} asks for {target.effective_heads:g} effective heads, and {site.label} has "
                f"{site.num_heads}; give at most that, or select other attentions."
            )
