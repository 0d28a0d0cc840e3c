"""Hooks that serve one module: a copy or a pickle of that module is nobody's.

Owns `Hook`. Must not know about heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Hook"]


class Hook:
    """A forward hook or pre-hook of one module, forgotten when that module is copied or pickled.

    What observes or changes a model belongs to that model: a deep copy must not be observed in its stead, and a
    pickle cannot hold the observer. Both get a hook that does nothing.

    Args:
        module: The module served; a call by another one is ignored.
        function: What torch's hook would be: (module, args[, kwargs][, output]) -> anything a hook may return.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self.module, self.function = module, function

    def __call__(self, module: nn.Module, *call: Any) -> Any:
        """Call the function for the module served."""
        return self.function(module, *call) if module is self.module else None

    def __reduce__(self) -> tuple:
        # asked for by copy and by pickle
        return _forgotten, ()


def _nothing(_module: nn.Module, *_call: Any) -> None:
    return None


def _forgotten() -> Callable[..., None]:
    return _nothing
