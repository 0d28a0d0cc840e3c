"""Attentions of a model in the order of their calls, each measured when those before it have their new weights.

A forward is stopped at each attention and taken up there again, so that all layers together take as long as a few
forwards; only what the rest of the model still reads is kept of what was computed before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import zip_longest
from typing import Any, NamedTuple, Self

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from headwise.heads.capture import find_askers
from headwise.heads.heads import Heads, Site
from headwise.heads.record import record
from headwise.shrinking.merge_heads import Batch, Wanted, read_outputs, record_wanted
from headwise.shrinking.proof import TOLERANCE, run


class OutOfStep(Exception):
    """A model that does not go on from where it was stopped as it would have."""


class _Stop(BaseException):
    """The end of a forward that has come as far as it should."""


class _Unread(NamedTuple):
    """A tensor of one number in memory, in the place of one of its shape and kind that nothing reads any more."""

    tensor: Tensor


@dataclass
class _Returned:
    """What a module returned.

    Attributes:
        module: The module.
        leaves: Copies of the tensors, as the forward may write into its own; and whatever else it returned.
        structure: How it returned them.
        own: The memory that the forward itself has of each.
    """

    module: nn.Module = field(repr=False)
    leaves: list[Any]
    structure: TreeSpec
    own: list[StorageWeakRef | None]

    @classmethod
    def of(cls, module: nn.Module, output: Any) -> _Returned:
        leaves, structure = tree_flatten(output)
        return cls(module, [_copy(leaf) for leaf in leaves], structure, [_refer(leaf) for leaf in leaves])

    def forget_read(self, passed: AbstractSet[StorageWeakRef | None]) -> _Returned:
        """Let go of the tensors that went into modules that have returned, and that nothing holds any more."""
        kept = [
            _Unread(_stand_in(leaf)) if own is not None and own in passed and own.expired() else leaf
            for leaf, own in zip(self.leaves, self.own, strict=True)
        ]
        return replace(self, leaves=kept, own=[])

    def again(self) -> tuple[Any, _Returned]:
        """Return the same output once more, and what is to be known of it."""
        given = [leaf.tensor if isinstance(leaf, _Unread) else _copy(leaf) for leaf in self.leaves]
        own = [None if isinstance(leaf, _Unread) else _refer(new) for leaf, new in zip(self.leaves, given, strict=True)]
        return tree_unflatten(given, self.structure), replace(self, own=own)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _refer(leaf: Any) -> StorageWeakRef | None:
    """Return what tells whether the memory of a tensor is held by anything."""
    return StorageWeakRef(leaf.untyped_storage()) if isinstance(leaf, Tensor) else None


def _stand_in(leaf: Tensor) -> Tensor:
    # should something read it nevertheless, it shows
    return leaf.new_full((), float("nan") if leaf.is_floating_point() else 0).expand(leaf.shape)


@dataclass
class Progress:
    """How far the forward on one batch has come: what modules returned outside of one another, in order."""

    batch: Batch
    returned: list[_Returned] = field(default_factory=list)


class Resumable(AbstractContextManager):
    """Inside the block, forwards of a model can be stopped, and gone on with from where they were stopped."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._before: deque[_Returned] = deque()
        self._returned: list[_Returned] = []
        self._passed: set[StorageWeakRef | None] = set()
        self._depth = 0
        self._around: set[nn.Module] = set()
        self._on_call: dict[nn.Module, Callable[[], None]] = {}

    def __enter__(self) -> Self:
        # the model itself is called, and returns last
        self._own = {part: vars(part).get("forward") for part in self.model.modules() if part is not self.model}
        for part in self._own:
            part.__dict__["forward"] = self._wrap(part, part.forward)
        return self

    def __exit__(self, *_: object) -> None:
        for part, own in self._own.items():
            part.__dict__.pop("forward", None)
            if own is not None:
                part.__dict__["forward"] = own

    def advance(
        self,
        progress: Progress,
        mark: nn.Module | None,
        end: nn.Module,
        read: Callable[[], None] = lambda: None,
        called: Sequence[nn.Module] = (),
    ) -> None:
        """Go on until a module is called, at most to another one.

        Args:
            progress: Where the forward is; afterwards at `mark`.
            mark: A module; what modules returned before its call is kept for the next time.
            end: The module before whose call the forward ends.
            read: Called before it ends.
            called: Modules that are called the next time too, with their hooks, though they return the same.

        Raises:
            OutOfStep: `end` was not called, or the model raised.
        """

        def keep() -> None:
            returned, self._returned = self._returned, []
            progress.returned = [one.forget_read(self._passed) for one in returned]
            if mark is end:
                stop()

        def stop() -> None:
            read()
            raise _Stop

        self._before, self._returned = deque(progress.returned), []
        self._passed, self._depth = set(), 0
        inner = {*called} if mark is None else {mark, *called}
        self._around = {part for part in self.model.modules() if inner & {*part.modules()} - {part}}
        self._on_call = {end: stop} | ({} if mark is None else {mark: keep})
        progress.returned = []
        try:
            run(self.model, progress.batch)
        except _Stop:
            return
        except Exception as error:
            raise OutOfStep from error
        finally:
            self._before, self._returned, self._passed, self._on_call = deque(), [], set(), {}
        raise OutOfStep

    def _wrap(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def resume(*args: Any, **kwargs: Any) -> Any:
            within = module not in self._around
            if within and not self._depth:
                self._passed.update(map(_refer, tree_leaves((args, kwargs))))
            if self._before and self._before[0].module is module:
                output, known = self._before.popleft().again()
                if not self._depth:
                    self._returned.append(known)
                return output
            if module in self._on_call:
                self._on_call[module]()
            self._depth += within
            output = forward(*args, **kwargs)
            self._depth -= within
            if within and not self._depth:
                self._returned.append(_Returned.of(module, output))
            return output

        return resume


class Passes:
    """Whole forwards for each statistic: where an attention is called several times, or the model cannot be stopped."""

    def __init__(self, heads: Heads, batches: Sequence[Batch]) -> None:
        self.heads, self.batches = heads, batches
        self.wanted = record_wanted(heads, self.walk)

    def __iter__(self) -> Iterator[tuple[Site, Wanted]]:
        for site in self.heads:
            yield site, self.wanted[site]

    def walk(self, _: Site, read: Callable[[], None]) -> None:
        """Run the model on each batch, and call a function after each."""
        for batch in self.batches:
            run(self.heads.model, batch)
            read()


class Steps:
    """Forwards that are stopped at each attention: those of the model as it was, one attention ahead of those as it is.

    Raises:
        OutOfStep: A forward does not call each attention once, or does not go on as it would have.
    """

    def __init__(self, heads: Heads, batches: Sequence[Batch], forwards: Resumable) -> None:
        self.heads, self.forwards = heads, forwards
        self.asked: dict[nn.Module | None, list[nn.Module]] = {}
        for asking, asked in find_askers(heads):
            self.asked.setdefault(asking.module, []).append(asked.module)
        self.before, self.now = ([Progress(batch) for batch in batches] for _ in range(2))
        self.order: list[Site] = []
        sites = {site.module: site for site in heads}

        def walk(_: Site, read: Callable[[], None]) -> None:
            with record(sites) as calls:
                run(heads.model, batches[0])
            self.order += [sites[call.module] for call in calls]
            read()

        last: dict[bool, Tensor] = {}
        read_outputs(heads, walk, lambda site, rows: last.update({site is self.order[-1]: rows}))
        if len(self.order) != len(sites) or {*self.order} != {*heads} or True not in last:
            raise OutOfStep
        self.last = last[True]

    def __iter__(self) -> Iterator[tuple[Site, Wanted]]:
        self._advance(self.before, self.order[0].module, self.order[0].module)
        for site, following in zip_longest(self.order, self.order[1:]):

            def walk(_: Site, read: Callable[[], None], site: Site = site, following: Site | None = following) -> None:
                mark, end = (None, _find_end(site)) if following is None else (following.module,) * 2
                self._advance(self.before, mark, end, read)

            wanted = record_wanted(replace(self.heads, sites=(site,)), walk)[site]
            if following is None:
                self._require_alike(wanted)
            yield site, wanted

    def walk(self, site: Site, read: Callable[[], None]) -> None:
        """Go on with each batch up to the output projection of an attention, and call a function there."""
        self._advance(self.now, site.module, _find_end(site), read)

    def _advance(
        self,
        forwards: Sequence[Progress],
        mark: nn.Module | None,
        end: nn.Module,
        read: Callable[[], None] = lambda: None,
    ) -> None:
        for one in forwards:
            # the padding of its queries is read where the attention on the same queries is called
            self.forwards.advance(one, mark, end, read, self.asked.get(mark, []))

    def _require_alike(self, wanted: Wanted) -> None:
        """Raise `OutOfStep` unless the last attention gave in steps what it gives in one forward."""
        found, expected = wanted.calls[0], self.last
        limit = TOLERANCE.get(found.dtype, 2e-1) * float(expected.abs().max())
        # written so that NaN is refused too
        if found.shape != expected.shape or not float((found - expected).abs().max()) <= limit:
            raise OutOfStep


def _find_end(site: Site) -> nn.Module:
    if site.output_projection is None:
        raise OutOfStep
    return site.output_projection.module
