"""Record a forward pass and replay the part before an attention module.

Removing a head changes nothing that ran before its output projection. In a replay, every layer that had finished by
then, and the query, key and value projections of the module itself, return their recorded outputs; the rest runs.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import NotFired
from headwise.heads.forward_scope import partial_forwards
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
