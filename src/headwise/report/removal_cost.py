"""Remove each head in turn and measure the cost per item, reusing what was computed before the head.

Record a forward pass and replay the part before an attention module.

Removing a head changes nothing that ran before its output projection. In a replay, every layer that had finished by
then, and the query, key and value projections of the module itself, return their recorded outputs; the rest runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, NotFired, ShapeError
from headwise.heads.ablation import ablate, differentiate_heads
from headwise.heads.capture import partial_forwards
from headwise.heads.heads import Heads, Site
from headwise.heads.record import Call, list_tensors, record, returning


class Returned(NamedTuple):
    """An output, and the versions that its tensors had then."""

    output: Any
    versions: tuple[tuple[Tensor, int], ...]

    @property
    def stale(self) -> bool:
        """Whether it was modified in place since: it is never replayed then."""
        return any(tensor._version != version for tensor, version in self.versions)


def _note_versions(output: Any) -> Returned:
    tensors = (tensor for tensor in list_tensors(output) if not tensor.is_inference())
    return Returned(output, tuple((tensor, tensor._version) for tensor in tensors))


@dataclass(frozen=True, eq=False, repr=False)
class Recording:
    """One forward pass: the calls of output projections, and of modules to replay, whose outputs are `Returned`."""

    heads: Heads
    projections: dict[str, nn.Module]
    projected: list[Call]
    calls: list[Call]

    @contextmanager
    def before(self, site: Site) -> Iterator[int]:
        """Replay what ran before `site` in every forward pass inside the block; yields the number of calls saved.

        Up to the site, the forward pass must equal the recorded one: the same inputs, in evaluation mode.

        Raises:
            NotFired: The recorded forward pass did not reach the site.
        """
        reached = self.reached(site)
        if reached < 0:
            raise NotFired(
                f"the forward pass did not use {site.label}; select other heads, or give batches that use it."
            )
        done = [call for call in self.calls if 0 <= call.end < reached and not call.output.stale]
        outermost = [call for call in done if not any(_is_inside(call, other) for other in done)]
        # a module is replayed where the calls saved are the first that it will get
        left = [call for call in self.calls if not any(_is_inside(call, other) for other in outermost)]
        saved: dict[nn.Module, list[Any]] = {}
        for module in dict.fromkeys(call.module for call in outermost):
            calls = [call for call in outermost if call.module is module]
            if [call for call in left if call.module is module][: len(calls)] == calls:
                saved[module] = [call.output.output for call in calls]
        with returning(self.heads.model, saved), partial_forwards():
            yield sum(map(len, saved.values()))

    def reached(self, site: Site) -> int:
        """Return when the output projection of a site was first called, as an increasing number; -1 for never."""
        own = self.projections.get(site.name)
        return next((call.start for call in self.projected if call.module is own), -1)


@contextmanager
def record_forward(heads: Heads) -> Iterator[Recording]:
    """Record the one forward pass of the model that runs inside the block."""
    with ExitStack() as exposed:
        projections = {site.name: site.expose(exposed.callback).module for site in heads.sites}
        with (
            record(projections.values()) as projected,
            record(find_replayable(heads), outputs=_note_versions) as calls,
        ):
            yield Recording(heads, projections, projected, calls)


def find_replayable(heads: Heads) -> list[nn.Module]:
    """Return the modules to replay: layers of every stack, its sibling modules, attention modules, projections.

    >>> import headwise as hw
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3,
    ...                               enable_nested_tensor=False)
    >>> len(find_replayable(hw.find_heads(model)))
    7
    """
    found: dict[nn.Module, None] = {}
    for stack in dict.fromkeys(site.stack for site in heads.found if site.stack):
        parts = stack.split(".")
        for depth in range(len(parts) + 1):
            found |= dict.fromkeys(heads.model.get_submodule(".".join(parts[:depth])).children())
    for site in heads.found:
        found[site.module] = None
        found |= dict.fromkeys(part.module for part in site.parts if part.module is not None)
    return [module for module in found if module is not heads.model]


def _is_inside(call: Call, other: Call) -> bool:
    return other.start < call.start and call.end < other.end


Score = Callable[[Any, Any], Tensor]
NO_REPLAY = "every forward pass without a head was computed in full"


@dataclass(frozen=True, eq=False)
class RemovalCosts:
    """Score of every item with all heads, and its drop without each head.

    Attributes:
        whole: [N] float64, scores of the items with all heads.
        drops: For each attention module [H, N] float64: score with all heads minus score without the head.
        reason: Why forward passes were not resumed at the removed head; "" where they were.
    """

    whole: Tensor
    drops: dict[str, Tensor]
    reason: str = ""

    @property
    def replayed(self) -> bool:
        """Whether forward passes were resumed at the removed head."""
        return not self.reason


def measure_removal(
    heads: Heads,
    batches: Iterable[Any],
    run: Callable[[nn.Module, Any], Any],
    score: Score,
    *,
    replay: bool = True,
    advance: Callable[[int], None] | None = None,
    around: Callable[[Any], AbstractContextManager[object]] = nullcontext,
) -> RemovalCosts:
    """Remove each head alone, on every batch, and return the cost for each item.

    A forward pass without a head is resumed where the head is removed. Whether that gives exactly the result of a full
    forward pass is checked on the first batch; if it does not, every forward pass is computed in full.

    Args:
        heads: The heads to remove; the model must be in evaluation mode.
        batches: Inputs of the model.
        run: Runs the model on a batch and returns its output.
        score: Maps output and batch to one number per item, [N]; larger is better.
        replay: Whether to reuse what was computed before a head.
        advance: Called with the number of forward passes done, for a progress bar.
        around: Maps a batch to a context for its forward pass with all heads; it must not change that pass.

    Raises:
        NotFired: A forward pass does not use an attention module.
        ShapeError: `score` does not return one finite number per item.
    """
    whole: list[Tensor] = []
    drops: dict[str, list[Tensor]] = {site.name: [] for site in heads.sites}
    reason = "" if replay else "requested"
    done = 0

    def tell(forwards: int) -> None:
        nonlocal done
        done += forwards
        if advance is not None:
            advance(forwards)

    with torch.no_grad():
        for batch in batches:
            with record_forward(heads) as recording, around(batch):
                output = run(heads.model, batch)
            values = _compute_score(score, output, batch)
            tell(1)
            removal = _Removal(heads, recording, batch, run, score, values, tell)
            found, before = None, done
            if not whole and not reason:
                found, reason = removal.try_replay(output)
            if found is None:
                tell(before - done)
            del output
            for name, costs in (found or removal.measure(replay=not reason)).items():
                drops[name].append(costs)
            whole.append(values)
    return RemovalCosts(torch.cat(whole), {name: torch.cat(parts, 1) for name, parts in drops.items()}, reason)


def estimate_removal(
    heads: Heads, batches: Iterable[Any], run: Callable[[Any], Tensor], advance: Callable[[], None]
) -> RemovalCosts:
    """Estimate the drop of the fidelity of each text without each head, by one backward pass for all heads.

    1 - cos(y, y') is |P d|^2 / 2 |y|^2 to second order, where the output y of a token moves by d and P projects
    orthogonally to y. d is taken to first order in the head, and |P d|^2 is the mean square of its product with random
    directions: one draw for each text, so that costs are of many texts. Batches have the mask `keep` of their tokens.
    """
    generator, counts = torch.Generator().manual_seed(0), list[Tensor]()

    def move() -> Iterator[Tensor]:
        for batch in batches:
            output = run(batch)
            whole = output.detach()
            length = whole.norm(dim=-1, keepdim=True).clamp_min(1e-12)
            directions = torch.randn(output.shape, generator=generator).to(output)
            directions -= (directions * whole).sum(-1, keepdim=True) / length.square() * whole
            moved = (output * directions / length).sum(-1)
            counts.append(batch.keep.sum(1) if moved.dim() == 2 else torch.ones(len(moved)))
            yield (moved * batch.keep).sum(1) if moved.dim() == 2 else moved
            advance()

    found = differentiate_heads(heads, move())
    tokens = torch.cat(counts).double().cpu()
    drops = {site.name: (found[site.shown].square() / (2 * tokens[:, None])).T for site in heads}
    return RemovalCosts(torch.ones_like(tokens), drops)


@dataclass(frozen=True, eq=False)
class _Removal:
    """Removes each head in turn on one batch whose full forward pass was recorded."""

    heads: Heads
    recording: Recording
    batch: Any
    run: Callable[[nn.Module, Any], Any]
    score: Score
    values: Tensor
    tell: Callable[[int], None]

    def measure(self, *, replay: bool) -> dict[str, Tensor]:
        """Return the drops of the scores without each head of each module, [H, N]."""
        found = {}
        for site in self.heads.sites:
            with self.recording.before(site) if replay else nullcontext():
                found[site.name] = torch.stack([self._drop(site, head) for head in range(site.num_heads)])
            self.tell(site.num_heads)
        return found

    def _drop(self, site: Site, head: int) -> Tensor:
        with ablate(replace(self.heads, sites=(site,)), head):
            values = _compute_score(self.score, self.run(self.heads.model, self.batch), self.batch)
        if values.shape != self.values.shape:
            raise ShapeError(
                f"score returned {len(values)} numbers without a head and {len(self.values)} with all; expected one "
                "number per item in both."
            )
        return self.values - values

    def try_replay(self, output: Any) -> tuple[dict[str, Tensor] | None, str]:
        """Return the costs with replay and "", or None and the reason why forward passes cannot be replayed.

        A layer may pass state to later layers in addition to its output. The state left by a forward pass without a
        head would then affect later replays. So replays are compared with the full forward pass before and after,
        starting with the last module: replaying an earlier one would restore the state.
        """
        order = sorted(self.heads.sites, key=self.recording.reached, reverse=True)
        with self.recording.before(order[0]) as spared:
            if not spared:
                return None, "no layer ends before another begins"
        if reason := self._compare(order[0], output):
            return None, reason
        try:
            found = self.measure(replay=True)
        except Exception as error:
            # an error in the score occurs in full forward passes as well
            return None, f"the model failed when resumed at a head ({_describe(error)})"
        reason = next(filter(None, (self._compare(site, output) for site in order)), "")
        return None if reason else found, reason

    def _compare(self, site: Site, whole: Any) -> str:
        """Return why resuming at a module does not give the full result on this batch; "" if it does."""
        name = site.label
        try:
            with self.recording.before(site):
                again = self.run(self.heads.model, self.batch)
        except Exception as error:
            return f"the model failed when resumed at {name} ({_describe(error)})"
        before, after = list(list_tensors(whole)), list(list_tensors(again))
        if not before:
            return f"the model returns a {type(whole).__name__}, which holds no tensor to compare"
        if [one.shape for one in before] != [other.shape for other in after]:
            return f"resumed at {name}, the model returned something else"
        # padding may be NaN in both
        apart = [
            float((one.double() - other.double()).abs().max())
            for one, other in zip(before, after, strict=True)
            if ((one != other) & ~((one != one) & (other != other))).any()
        ]
        return f"resumed at {name}, the model returned other numbers, by up to {max(apart):.2g}" if apart else ""


def _describe(error: Exception) -> str:
    """Return the message of an error, with its type if it is not headwise's."""
    return str(error) if isinstance(error, HeadwiseError) else f"{type(error).__name__}: {error}"


def _compute_score(score: Score, output: Any, batch: Any) -> Tensor:
    values = score(output, batch)
    if not isinstance(values, Tensor) or values.dim() != 1 or not len(values):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ShapeError(f"score returned {shape}; expected a tensor with one number per item of the batch, [N].")
    values = values.detach().cpu().double()
    if not values.isfinite().all():
        raise ShapeError(f"score returned {float(values[~values.isfinite()][0])} for an item; expected finite numbers.")
    return values
