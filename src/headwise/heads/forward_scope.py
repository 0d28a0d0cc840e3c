"""Which calls of attention modules belong to one forward pass of the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from headwise.nn.checkpointing import is_recomputing
from headwise.nn.hooks import Hook, PerThread

# since transformers 5.24, and before
CACHES = ("cache", "past_key_values")
LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")

_partial: ContextVar[bool] = ContextVar("partial forwards", default=False)


@contextmanager
def partial_forwards() -> Iterator[None]:
    """Mark forwards inside the block as partial: they reuse parts of an earlier one, so some attentions may not run."""
    token = _partial.set(True)
    try:
        yield
    finally:
        _partial.reset(token)


def drops_layers(model: nn.Module) -> bool:
    """Return whether a forward may skip layers at random: LayerDrop, while a model of transformers is trained."""
    config = getattr(model, "config", None)
    return model.training and any((getattr(config, name, 0) or 0) > 0 for name in LAYER_DROPS)


def is_partial() -> bool:
    """Return whether forwards are partial now."""
    # torch.compile cannot trace it; what replays parts of a forward runs the model uncompiled
    return not torch.compiler.is_compiling() and _partial.get()


class _Forward:
    """Whether a forward runs, and whether the last one was given a cache."""

    def __init__(self) -> None:
        self.inside = self.generating = False


class ForwardScope:
    """Tells when a forward of a model runs. Recomputation by activation checkpointing is no forward.

    Args:
        model: The model.
        at_edge: Called when a forward starts and when it ends.
        failed: Called after a forward that raised, or returned None.

    Both are called in the thread of the forward.
    """

    def __init__(self, model: nn.Module, at_edge: Callable[[], object], failed: Callable[[], object]) -> None:
        self._here = PerThread(_Forward)
        self._at_edge, self._failed = at_edge, failed
        entered, left = Hook(model, self._on_call), Hook(model, self._on_return)
        # after a forward that raised, too
        handles = (
            model.register_forward_pre_hook(entered, with_kwargs=True, prepend=True),
            model.register_forward_hook(left, always_call=True),
        )
        self._stops: list[Callable[[], None]] = [handle.remove for handle in handles]

    @property
    def inside(self) -> bool:
        """Whether a forward of this thread is running; False while a part of the model is called alone."""
        return self._here.own.inside

    @property
    def generating(self) -> bool:
        """Whether the last one was given a cache, as `generate()` gives it."""
        return self._here.own.generating

    def remove(self) -> None:
        """Stop watching."""
        for stop in self._stops:
            stop()
        self._stops = []

    def _on_call(self, _module: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
        if not is_recomputing():
            self._here.own.inside = True
            self._here.own.generating = any(kwargs.get(name) is not None for name in CACHES)
            self._at_edge()

    def _on_return(self, _module: nn.Module, _args: tuple, output: object) -> None:
        if not is_recomputing():
            self._here.own.inside = False
            self._at_edge()
            # torch passes None to this hook after an error
            if output is None:
                self._failed()
