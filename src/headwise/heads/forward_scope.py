"""Which calls of attention modules belong to one forward pass of the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from headwise.heads.heads import Heads
from headwise.nn.checkpointing import is_recomputing, outside_graphs
from headwise.nn.hooks import Hook

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
    return _partial.get()


class ForwardCounter:
    """Counts the forwards of a model, and records some of their arguments.

    Recomputation by activation checkpointing is no forward.

    Args:
        heads: The sites.
        failed: Called after a forward that raised, or returned None.

    Attributes:
        number: Forwards started so far.
        inside: Whether one is running; False while a part of the model is called alone.
        generating: Whether the last one was given a cache, as `generate()` gives it.
        causal: For each site's module whose last call was given is_causal, its value.
    """

    def __init__(self, heads: Heads, failed: Callable[[], object] = lambda: None) -> None:
        self.number, self.inside, self.generating = 0, False, False
        self._failed = failed
        self.causal: dict[nn.Module, bool] = {}
        model = heads.model
        entered, left = Hook(model, self._on_call), Hook(model, self._on_return)
        self._stops: list[Callable[[], None]] = [
            model.register_forward_pre_hook(entered, with_kwargs=True, prepend=True).remove,
            # also after a forward that raised
            model.register_forward_hook(left, always_call=True).remove,
        ]
        for site in heads.sites:
            hook = Hook(site.module, self._on_site_call)
            self._stops.append(site.module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def remove(self) -> None:
        """Stop counting."""
        for stop in self._stops:
            stop()
        self._stops = []

    # a count in a compiled graph would recompile every forward
    @outside_graphs
    def _on_call(self, _module: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
        if not is_recomputing():
            self.number += 1
            self.inside = True
            self.generating = kwargs.get("past_key_values") is not None

    @outside_graphs
    def _on_return(self, _module: nn.Module, _args: tuple, output: object) -> None:
        if not is_recomputing():
            self.inside = False
            # torch passes None to this hook after an error
            if output is None:
                self._failed()

    def _on_site_call(self, module: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
        if isinstance(kwargs.get("is_causal"), bool):
            self.causal[module] = kwargs["is_causal"]
