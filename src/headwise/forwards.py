"""Which forward pass is running: calls of sites belong together when one call of a model, or of a part, holds them.

Owns `Forwards`. Must not know what is done in a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from headwise.heads import Heads
from headwise.hooks import Hook
from headwise.recomputation import recomputing

__all__ = ["Forwards"]


class Forwards:
    """Counts the forwards around some sites: calls of the model, or of a part of it that is called alone.

    Recomputation by activation checkpointing is no forward.

    Attributes:
        number: Forwards begun so far; the number of the one that is running.
        generating: Whether that one was given a cache, as `generate()` gives it.
        causal: For each module whose last call said so (is_causal=...), whether it was causal.

    Example:
        >>> import torch
        >>> import headwise as hw
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2,
        ...                               enable_nested_tensor=False)
        >>> forwards = Forwards(hw.find_heads(model))
        >>> _ = model(torch.randn(1, 4, 8)), model.layers[0](torch.randn(1, 4, 8))
        >>> forwards.number
        2
    """

    def __init__(self, heads: Heads) -> None:
        self.number, self.generating = 0, False
        self.causal: dict[nn.Module, bool] = {}
        self._depth = 0
        self._stops: list[Callable[[], None]] = []
        for module in _around(heads):
            entered = Hook(module, self._entered)
            self._stops.append(module.register_forward_pre_hook(entered, with_kwargs=True, prepend=True).remove)
            left = Hook(module, self._left)
            # a forward that ends in an error has ended too
            self._stops.append(module.register_forward_hook(left, always_call=True).remove)

    def remove(self) -> None:
        """Stop counting."""
        for stop in self._stops:
            stop()
        self._stops = []

    def _entered(self, module: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
        if recomputing():
            return
        if isinstance(kwargs.get("is_causal"), bool):
            self.causal[module] = kwargs["is_causal"]
        if self._depth == 0:
            self.number += 1
            self.generating = kwargs.get("past_key_values") is not None
        self._depth += 1

    def _left(self, _module: nn.Module, _args: tuple, _output: object) -> None:
        if not recomputing():
            self._depth = max(0, self._depth - 1)


def _around(heads: Heads) -> list[nn.Module]:
    """Return the model, the sites and every module between."""
    found: dict[int, nn.Module] = {id(heads.model): heads.model}
    for site in heads.sites:
        parts = site.name.split(".") if site.name else []
        for end in range(1, len(parts) + 1):
            module = heads.model.get_submodule(".".join(parts[:end]))
            found[id(module)] = module
    return list(found.values())
