"""What the removal of each head costs, item by item, without computing again what comes before the head.

Owns the walk over batches and heads. A forward without a head starts again where the head is removed; that it gives
the very numbers of a whole forward is tried on the first batch, and where it does not every forward is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, ShapeError
from headwise.heads.ablation import ablate
from headwise.heads.heads import Heads
from headwise.heads.site import Site
from headwise.report.prefix_cache import Recording, record, tensors_of

Score = Callable[[Any, Any], Tensor]
EVERY_FORWARD_WHOLE = "every forward without a head was computed whole"


@dataclass(frozen=True, eq=False)
class HeadCosts:
    """Scores of every item with all heads, and what the removal of each head takes from them.

    Attributes:
        whole: [N] float64, the scores of the items under the whole model.
        drops: For each site [H, N] float64: score of the whole model minus the score without the head.
        replayed: Whether forwards began where the head was removed.
        reason: Why not, where they did not.
    """

    whole: Tensor
    drops: dict[str, Tensor]
    replayed: bool
    reason: str = ""


def head_costs(
    heads: Heads,
    batches: Iterable[Any],
    run: Callable[[nn.Module, Any], Any],
    score: Score,
    *,
    replay: bool = True,
    advance: Callable[[int], None] | None = None,
    around: Callable[[Any], AbstractContextManager[object]] = nullcontext,
) -> HeadCosts:
    """Remove each head alone, on every batch, and return what that costs each item.

    Args:
        heads: The sites whose heads are removed; the model must be in evaluation mode.
        batches: What the model is run on.
        run: Runs the model on a batch and returns its output.
        score: Given output and batch, one number an item, [N]; larger is better.
        replay: Whether what runs before a head may be given back instead of computed again.
        advance: Told how many forwards are done, for a progress bar.
        around: Given a batch, what its forward with all heads runs inside of; it must leave that forward as it is.

    Raises:
        NotFired: A forward does not go through a site.
        ShapeError: `score` does not return one finite number an item.
    """
    whole: list[Tensor] = []
    drops: dict[str, list[list[Tensor]]] = {site.name: [[] for _ in range(site.num_heads)] for site in heads.sites}
    reason = "" if replay else "asked for"
    done = 0

    def tell(forwards: int) -> None:
        nonlocal done
        done += forwards
        if advance is not None:
            advance(forwards)

    with torch.no_grad():
        for batch in batches:
            with record(heads) as recording, around(batch):
                output = run(heads.model, batch)
            values = _values(score, output, batch)
            tell(1)
            removal = _Removal(heads, recording, batch, run, score, values, tell)
            found, before = None, done
            if not whole and not reason:
                found, reason = removal.tried(output)
            if found is None:
                tell(before - done)
            del output
            for name, costs in (found or removal.costs(replay=not reason)).items():
                for kept, one in zip(drops[name], costs, strict=True):
                    kept.append(one)
            whole.append(values)
    if not whole:
        raise ShapeError("there is no batch; expected at least one to measure heads on.")
    joined = {name: torch.stack([torch.cat(parts) for parts in found]) for name, found in drops.items()}
    return HeadCosts(torch.cat(whole), joined, not reason, reason)


@dataclass(frozen=True, eq=False)
class _Removal:
    """The removal of each head alone on one batch whose whole forward was recorded."""

    heads: Heads
    recording: Recording
    batch: Any
    run: Callable[[nn.Module, Any], Any]
    score: Score
    values: Tensor
    tell: Callable[[int], None]

    def costs(self, *, replay: bool) -> dict[str, list[Tensor]]:
        """Return for each site what each of its heads takes from the scores, [N] each."""
        found = {}
        for site in self.heads.sites:
            one = replace(self.heads, sites=(site,))
            with self.recording.before(site) if replay else nullcontext():
                found[site.name] = [
                    self.values - _same(_without(one, head, self.batch, self.run, self.score), self.values)
                    for head in range(site.num_heads)
                ]
            self.tell(site.num_heads)
        return found

    def tried(self, output: Any) -> tuple[dict[str, list[Tensor]] | None, str]:
        """Return the costs with replay and "", or None and why forwards cannot be replayed.

        A layer may tell later ones something beside what it returns. What a forward without a head has told then
        stands in the replays that follow, so these are compared with the whole forward before and after, the last site
        first: a replay of an earlier one would tell the truth again.
        """
        order = sorted(self.heads.sites, key=self.recording.reached, reverse=True)
        with self.recording.before(order[0]) as spared:
            if not spared:
                return None, "no layer is done before another begins"
        reason = self._difference(order[0], output)
        if reason:
            return None, reason
        try:
            found = self.costs(replay=True)
        except Exception as error:
            # a score at fault is at fault in whole forwards too
            return None, f"with what ran before a head given back, the model refused ({_said(error)})"
        for site in order:
            reason = self._difference(site, output)
            if reason:
                return None, reason
        return found, ""

    def _difference(self, site: Site, whole: Any) -> str:
        """Return why a forward that begins at a site is not the whole one on this batch; "" where it is."""
        name = site.name or "the model"
        try:
            with self.recording.before(site):
                again = self.run(self.heads.model, self.batch)
        except Exception as error:
            return f"started again at {name} the model refused ({_said(error)})"
        before, after = list(tensors_of(whole)), list(tensors_of(again))
        if not before:
            return f"the model puts out a {type(whole).__name__}, in which no tensor was found to compare"
        if [one.shape for one in before] != [other.shape for other in after]:
            return f"started again at {name} the model put out something else"
        apart = [
            float((one.double() - other.double()).abs().max())
            for one, other in zip(before, after, strict=True)
            if _differ(one, other)
        ]
        return f"started again at {name} the model put out other numbers, by up to {max(apart):.2g}" if apart else ""


def _without(one: Heads, head: int, batch: Any, run: Callable[[nn.Module, Any], Any], score: Score) -> Tensor:
    with ablate(one, head):
        return _values(score, run(one.model, batch), batch)


def _said(error: Exception) -> str:
    """Return an error in words: ours as they are, another's with its kind."""
    return str(error) if isinstance(error, HeadwiseError) else f"{type(error).__name__}: {error}"


def _differ(one: Tensor, other: Tensor) -> bool:
    # what stands at padding may be no number in both
    return bool(((one != other) & ~((one != one) & (other != other))).any())


def _values(score: Score, output: Any, batch: Any) -> Tensor:
    values = score(output, batch)
    if not isinstance(values, Tensor) or values.dim() != 1 or not len(values):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ShapeError(f"score returned {shape}; expected a tensor with one number an item of the batch, [N].")
    values = values.detach().cpu().double()
    if not values.isfinite().all():
        raise ShapeError(f"score returned {float(values[~values.isfinite()][0])} for an item; expected finite numbers.")
    return values


def _same(values: Tensor, whole: Tensor) -> Tensor:
    if values.shape != whole.shape:
        raise ShapeError(
            f"score returned {len(values)} numbers without a head and {len(whole)} with all; expected as many, one an "
            "item."
        )
    return values
