"""Remove each head in turn and measure the cost per item, reusing what was computed before the head.

Record a forward pass and replay the part before an attention module.

Removing a head changes nothing that ran before its output projection. In a replay, every layer that had finished by
then, and the query, key and value projections of the module itself, return their recorded outputs; the rest runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, NotFired, ShapeError
from headwise.heads.ablation import ablate
from headwise.heads.capture import partial_forwards
from headwise.heads.heads import Heads, Site
from headwise.nn.hooks import Hook


@dataclass(eq=False)
class _Call:
    """One call of a module: when it began and ended, and what it returned."""

    module: nn.Module = field(repr=False)
    start: int
    end: int = -1
    output: Any = field(default=None, repr=False)
    versions: tuple[tuple[Tensor, int], ...] = field(default=(), repr=False)


@dataclass(eq=False)
class Recording:
    """One forward pass: the calls of some modules, and when each output projection was first called.

    Attributes:
        changed: Names of modules whose output was later modified in place; these are never replayed.
    """

    heads: Heads
    changed: tuple[str, ...] = ()
    _calls: list[_Call] = field(default_factory=list)
    _reached: dict[str, int] = field(default_factory=dict)
    _clock: int = 0

    @contextmanager
    def before(self, site: Site) -> Iterator[int]:
        """Replay what ran before `site` in every forward pass inside the block; yields the number of calls saved.

        Up to the site, the forward pass must equal the recorded one: the same inputs, in evaluation mode.

        Raises:
            NotFired: The recorded forward pass did not reach the site.
        """
        if site.name not in self._reached:
            raise NotFired(
                f"the forward pass did not use {site.label}; select other heads, or give batches that use it."
            )
        done = [call for call in self._calls if 0 <= call.end < self._reached[site.name] and not _is_stale(call)]
        outermost = [call for call in done if not any(_is_inside(call, other) for other in done)]
        by_module: dict[nn.Module, list[_Call]] = {}
        for call in outermost:
            by_module.setdefault(call.module, []).append(call)
        replayed = {module: calls for module, calls in by_module.items() if self._in_order(module, calls, outermost)}
        restore: list[Callable[[], None]] = []
        begin: Counter[nn.Module] = Counter()
        reset = self.heads.model.register_forward_pre_hook(lambda *_: begin.clear())
        try:
            for module, calls in replayed.items():
                restore.append(_patch(module, calls, begin))
            with partial_forwards():
                yield sum(map(len, replayed.values()))
        finally:
            reset.remove()
            for undo in restore:
                undo()

    def reached(self, site: Site) -> int:
        """Return when the output projection of a site was first called, as an increasing number; -1 for never."""
        return self._reached.get(site.name, -1)

    def _in_order(self, module: nn.Module, calls: list[_Call], outermost: list[_Call]) -> bool:
        """Return whether the replayed calls are the first calls that the module will get."""
        own = [call for call in self._calls if call.module is module]
        left = [call for call in own if not any(_is_inside(call, other) for other in outermost)]
        return left[: len(calls)] == calls

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


@contextmanager
def record(heads: Heads) -> Iterator[Recording]:
    """Record a forward pass of the model: exactly one must run inside the block.

    Args:
        heads: Heads of the modules before which `Recording.before` can replay.
    """
    recording = Recording(heads)
    handles = []
    open_calls: dict[nn.Module, list[_Call]] = {}

    def begun(module: nn.Module, _args: tuple) -> None:
        call = _Call(module, recording._tick())
        recording._calls.append(call)
        open_calls.setdefault(module, []).append(call)

    def ended(module: nn.Module, _args: tuple, output: object) -> None:
        call = open_calls[module].pop()
        call.end, call.output = recording._tick(), output
        call.versions = tuple(
            (tensor, tensor._version) for tensor in iterate_tensors(output) if not tensor.is_inference()
        )

    def reached(site: Site) -> Callable[[nn.Module, tuple], None]:
        def at(_module: nn.Module, _args: tuple) -> None:
            recording._reached.setdefault(site.name, recording._tick())

        return at

    exposed = ExitStack()
    try:
        for site in heads.sites:
            output_projection = site.expose(exposed.callback).module
            handles.append(output_projection.register_forward_pre_hook(Hook(output_projection, reached(site))))
        for module in find_replayable(heads):
            handles.append(module.register_forward_pre_hook(Hook(module, begun)))
            handles.append(module.register_forward_hook(Hook(module, ended)))
        yield recording
    finally:
        for handle in handles:
            handle.remove()
        exposed.close()
    names = {module: name for name, module in heads.model.named_modules()}
    recording.changed = tuple(dict.fromkeys(names[call.module] for call in recording._calls if _is_stale(call)))


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


def _patch(module: nn.Module, calls: list[_Call], begin: Counter[nn.Module]) -> Callable[[], None]:
    """Replay the first calls of a module in each forward pass; returns a function that undoes the patch."""
    own = module.__dict__.get("forward")
    forward = module.forward

    def replay(*args: Any, **kwargs: Any) -> Any:
        number = begin[module]
        begin[module] += 1
        return calls[number].output if number < len(calls) else forward(*args, **kwargs)

    def undo() -> None:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own

    module.__dict__["forward"] = replay
    return undo


def _is_inside(call: _Call, other: _Call) -> bool:
    return other.start < call.start and call.end < other.end


def _is_stale(call: _Call) -> bool:
    return any(tensor._version != version for tensor, version in call.versions)


def iterate_tensors(output: object) -> Iterator[Tensor]:
    """Yield the tensors in the output of a module, also inside tuples, lists and mappings.

    >>> [len(one) for one in iterate_tensors({"a": torch.zeros(2), "b": [torch.zeros(3), None]})]
    [2, 3]
    """
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from iterate_tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from iterate_tensors(value)


Score = Callable[[Any, Any], Tensor]
NO_REPLAY = "every forward pass without a head was computed in full"


@dataclass(frozen=True, eq=False)
class RemovalCosts:
    """Score of every item with all heads, and its drop without each head.

    Attributes:
        whole: [N] float64, scores of the items with all heads.
        drops: For each attention module [H, N] float64: score with all heads minus score without the head.
        replayed: Whether forward passes were resumed at the removed head.
        reason: Why they were not.
    """

    whole: Tensor
    drops: dict[str, Tensor]
    replayed: bool
    reason: str = ""


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
    drops: dict[str, list[list[Tensor]]] = {site.name: [[] for _ in range(site.num_heads)] for site in heads.sites}
    reason = "" if replay else "requested"
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
                for kept, one in zip(drops[name], costs, strict=True):
                    kept.append(one)
            whole.append(values)
    if not whole:
        raise ShapeError("there are no batches; expected at least one.")
    joined = {name: torch.stack([torch.cat(parts) for parts in found]) for name, found in drops.items()}
    return RemovalCosts(torch.cat(whole), joined, not reason, reason)


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

    def measure(self, *, replay: bool) -> dict[str, list[Tensor]]:
        """Return the drop of the scores without each head of each module, [N] each."""
        found = {}
        for site in self.heads.sites:
            one = replace(self.heads, sites=(site,))
            with self.recording.before(site) if replay else nullcontext():
                found[site.name] = [
                    self.values
                    - _require_same_items(_score_without(one, head, self.batch, self.run, self.score), self.values)
                    for head in range(site.num_heads)
                ]
            self.tell(site.num_heads)
        return found

    def try_replay(self, output: Any) -> tuple[dict[str, list[Tensor]] | None, str]:
        """Return the costs with replay and "", or None and the reason why forward passes cannot be replayed.

        A layer may pass state to later layers in addition to its output. The state left by a forward pass without a
        head would then affect later replays. So replays are compared with the full forward pass before and after,
        starting with the last module: replaying an earlier one would restore the state.
        """
        order = sorted(self.heads.sites, key=self.recording.reached, reverse=True)
        with self.recording.before(order[0]) as spared:
            if not spared:
                return None, "no layer ends before another begins"
        reason = self._difference(order[0], output)
        if reason:
            return None, reason
        try:
            found = self.measure(replay=True)
        except Exception as error:
            # an error in the score occurs in full forward passes as well
            return None, f"the model failed when resumed at a head ({_describe(error)})"
        for site in order:
            reason = self._difference(site, output)
            if reason:
                return None, reason
        return found, ""

    def _difference(self, site: Site, whole: Any) -> str:
        """Return why resuming at a module does not give the full result on this batch; "" if it does."""
        name = site.label
        try:
            with self.recording.before(site):
                again = self.run(self.heads.model, self.batch)
        except Exception as error:
            return f"the model failed when resumed at {name} ({_describe(error)})"
        before, after = list(iterate_tensors(whole)), list(iterate_tensors(again))
        if not before:
            return f"the model returns a {type(whole).__name__}, which holds no tensor to compare"
        if [one.shape for one in before] != [other.shape for other in after]:
            return f"resumed at {name}, the model returned something else"
        apart = [
            float((one.double() - other.double()).abs().max())
            for one, other in zip(before, after, strict=True)
            if _differ(one, other)
        ]
        return f"resumed at {name}, the model returned other numbers, by up to {max(apart):.2g}" if apart else ""


def _score_without(one: Heads, head: int, batch: Any, run: Callable[[nn.Module, Any], Any], score: Score) -> Tensor:
    with ablate(one, head):
        return _compute_score(score, run(one.model, batch), batch)


def _describe(error: Exception) -> str:
    """Return the message of an error, with its type if it is not headwise's."""
    return str(error) if isinstance(error, HeadwiseError) else f"{type(error).__name__}: {error}"


def _differ(one: Tensor, other: Tensor) -> bool:
    # padding may be NaN in both
    return bool(((one != other) & ~((one != one) & (other != other))).any())


def _compute_score(score: Score, output: Any, batch: Any) -> Tensor:
    values = score(output, batch)
    if not isinstance(values, Tensor) or values.dim() != 1 or not len(values):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ShapeError(f"score returned {shape}; expected a tensor with one number per item of the batch, [N].")
    values = values.detach().cpu().double()
    if not values.isfinite().all():
        raise ShapeError(f"score returned {float(values[~values.isfinite()][0])} for an item; expected finite numbers.")
    return values


def _require_same_items(values: Tensor, whole: Tensor) -> Tensor:
    if values.shape != whole.shape:
        raise ShapeError(
            f"score returned {len(values)} numbers without a head and {len(whole)} with all; expected one number "
            "per item in both."
        )
    return values
