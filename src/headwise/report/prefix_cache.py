"""What a forward computed before an output projection was reached, to be given back instead of computed again.

Removing a head changes nothing that ran before its output projection. Owns the record of one whole forward, and the
replay of the part before a site: each layer that was done by then, and in the layer of the site what projects its
queries, keys and values, gives back what it gave before. Everything else runs. Must not know what is removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import NotFired
from headwise.heads.forward_scope import partial_forwards
from headwise.heads.heads import Heads
from headwise.heads.site import Site
from headwise.nn.hooks import Hook


@dataclass(eq=False)
class _Call:
    """One call of a module: when it began and ended, and what it gave."""

    module: nn.Module
    start: int
    end: int = -1
    output: Any = None
    versions: tuple[tuple[Tensor, int], ...] = ()


@dataclass(eq=False)
class Recording:
    """One forward of a model: the calls of some modules, and when each site's output projection was first called.

    Attributes:
        changed: Names of modules whose output was changed in place after they had returned; these are never replayed.
    """

    heads: Heads
    changed: tuple[str, ...] = ()
    _calls: list[_Call] = field(default_factory=list)
    _reached: dict[str, int] = field(default_factory=dict)
    _clock: int = 0

    @contextmanager
    def before(self, site: Site) -> Iterator[int]:
        """Give back what ran before `site`, in every forward inside the block, and yield how many calls that spares.

        The forward must be the recorded one up to the site: the same inputs, in evaluation mode.

        Raises:
            NotFired: The recorded forward did not reach the site.
        """
        if site.name not in self._reached:
            raise NotFired(
                f"the forward did not go through {site.name or 'the model'}; leave that site out, or give batches "
                "that use it."
            )
        done = [call for call in self._calls if 0 <= call.end < self._reached[site.name] and not _stale(call)]
        outermost = [call for call in done if not any(_inside(call, other) for other in done)]
        by_module: dict[nn.Module, list[_Call]] = {}
        for call in outermost:
            by_module.setdefault(call.module, []).append(call)
        replayed = {module: calls for module, calls in by_module.items() if self._in_order(module, calls, outermost)}
        restore: list[Callable[[], None]] = []
        begin: Counter[nn.Module] = Counter()
        reset = self.heads.model.register_forward_pre_hook(lambda *_: begin.clear())
        try:
            for module, calls in replayed.items():
                restore.append(_patched(module, calls, begin))
            with partial_forwards():
                yield sum(map(len, replayed.values()))
        finally:
            reset.remove()
            for undo in restore:
                undo()

    def reached(self, site: Site) -> int:
        """Return when the output projection of a site was first called, as a number that grows; -1 for never."""
        return self._reached.get(site.name, -1)

    def _in_order(self, module: nn.Module, calls: list[_Call], outermost: list[_Call]) -> bool:
        """Return whether the calls to be given back are the first that the module will get."""
        own = [call for call in self._calls if call.module is module]
        left = [call for call in own if not any(_inside(call, other) for other in outermost)]
        return left[: len(calls)] == calls

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


@contextmanager
def record(heads: Heads) -> Iterator[Recording]:
    """Record the next forward of the model: exactly one must run inside the block.

    Args:
        heads: The sites before which `Recording.before` can replay.
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
        call.versions = tuple((tensor, tensor._version) for tensor in tensors_of(output) if not tensor.is_inference())

    def reached(site: Site) -> Callable[[nn.Module, tuple], None]:
        def at(_module: nn.Module, _args: tuple) -> None:
            recording._reached.setdefault(site.name, recording._tick())

        return at

    try:
        for site in heads.sites:
            output_projection = site.expose().module
            handles.append(output_projection.register_forward_pre_hook(Hook(output_projection, reached(site))))
        for module in replayable_modules(heads):
            handles.append(module.register_forward_pre_hook(Hook(module, begun)))
            handles.append(module.register_forward_hook(Hook(module, ended)))
        yield recording
    finally:
        for handle in handles:
            handle.remove()
    names = {module: name for name, module in heads.model.named_modules()}
    recording.changed = tuple(dict.fromkeys(names[call.module] for call in recording._calls if _stale(call)))


def replayable_modules(heads: Heads) -> list[nn.Module]:
    """Return what may be given back: the layers of every stack, what stands beside it, the sites, their projections.

    >>> import headwise as hw
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3,
    ...                               enable_nested_tensor=False)
    >>> len(replayable_modules(hw.find_heads(model)))
    7
    """
    found: dict[nn.Module, None] = {}
    for stack in dict.fromkeys(site.stack for site in heads.found if site.stack):
        parts = stack.split(".")
        for depth in range(len(parts) + 1):
            found |= dict.fromkeys(heads.model.get_submodule(".".join(parts[:depth])).children())
    for site in heads.found:
        found[site.module] = None
        found |= dict.fromkeys(head_slice.module for head_slice in site.slices if head_slice.module is not None)
    return [module for module in found if module is not heads.model]


def _patched(module: nn.Module, calls: list[_Call], begin: Counter[nn.Module]) -> Callable[[], None]:
    """Have the first calls of a module in each forward give back what was recorded; returns what undoes that."""
    own = module.__dict__.get("forward")
    forward = module.forward

    def given_back(*args: Any, **kwargs: Any) -> Any:
        number = begin[module]
        begin[module] += 1
        return calls[number].output if number < len(calls) else forward(*args, **kwargs)

    def undo() -> None:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own

    module.__dict__["forward"] = given_back
    return undo


def _inside(call: _Call, other: _Call) -> bool:
    return other.start < call.start and call.end < other.end


def _stale(call: _Call) -> bool:
    return any(tensor._version != version for tensor, version in call.versions)


def tensors_of(output: object) -> Iterator[Tensor]:
    """Yield the tensors of what a module put out, in tuples, lists and mappings too.

    >>> [len(one) for one in tensors_of({"a": torch.zeros(2), "b": [torch.zeros(3), None]})]
    [2, 3]
    """
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_of(value)
