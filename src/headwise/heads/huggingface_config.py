"""A view of a model's configuration that names our attention implementation, given to one module.

The configuration itself never changes, so copies, saved files and models built from it are unaffected. Changes to it,
including the attention implementation, show in the view at once.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from headwise.errors import LayoutError

# Our names in the attention interface, and the implementation that each wraps.
UNDERNEATH = {"headwise": "sdpa", "headwise_eager": "eager"}
OURS = {under: ours for ours, under in UNDERNEATH.items()}


@cache
def _make_view_class(config_class: type) -> type:
    """Return a class whose instances are configurations that name our implementation over the one of another."""

    def read_name(view: Any) -> str | None:
        name = view.headwise_original._attn_implementation
        return OURS.get(name or "eager", name)

    def write_name(view: Any, name: object) -> None:
        view.headwise_original._attn_implementation = name

    def original(view: Any, _protocol: int) -> tuple:
        # for copy and pickle: a copy of the module has the configuration itself
        return _return_original, (view.headwise_original,)

    members = {
        "__slots__": ("headwise_original",),
        "__module__": config_class.__module__,
        "__reduce_ex__": original,
        "_attn_implementation": property(read_name, write_name),
    }
    return type(config_class.__name__, (config_class,), members)


def _return_original(config: object) -> object:
    return config


def _make_view(config: object) -> Any:
    view: Any = object.__new__(_make_view_class(type(config)))
    # one dictionary: what is set on either is set on both
    object.__setattr__(view, "__dict__", vars(config))
    object.__setattr__(view, "headwise_original", config)
    return view


@dataclass
class _Override:
    """A module's configuration, the view that replaces it, and how many listeners need it."""

    config: Any
    view: Any
    holders: int = 0


_overrides: weakref.WeakKeyDictionary[nn.Module, _Override] = weakref.WeakKeyDictionary()


def override_implementation(module: nn.Module) -> Callable[[], None]:
    """Give a module a configuration that names our implementation, and return what ends that.

    Raises:
        LayoutError: The module runs an implementation other than sdpa and eager.
    """
    override = _overrides.get(module)
    if override is None:
        config = getattr(module, "config", None)
        named = getattr(config, "_attn_implementation", None)
        if not isinstance(config, PreTrainedConfig) or (named or "eager") not in OURS:
            raise LayoutError(
                f"{type(module).__name__} runs the attention implementation {named!r}, where weights and "
                "biases of single heads cannot be reached; call model.set_attn_implementation('sdpa') first."
            )
        override = _overrides[module] = _Override(config, _make_view(config))
        module.config = override.view
    override.holders += 1
    ended = False

    def release() -> None:
        nonlocal ended
        if ended:
            return
        ended = True
        override.holders -= 1
        if override.holders == 0:
            del _overrides[module]
            if module.config is override.view:
                module.config = override.config

    return release
