"""Aggregators in models of peft: trained and saved with an adapter, as its `modules_to_save` are."""

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from headwise.errors import LayoutError
from headwise.heads.adapters import is_peft_layer
from headwise.heads.heads import Site
from headwise.routing.modules import Aggregator


def find_adapter(model: nn.Module) -> tuple[Any, str]:
    """Return the configuration of the adapter that a model trains, and its name.

    Raises:
        LayoutError: The model is a part of a peft model, or several adapters are active, or none.
    """
    configs: Any = next((module.peft_config for module in model.modules() if hasattr(module, "peft_config")), None)
    if configs is None:
        raise LayoutError(
            f"{type(model).__name__} holds adapters of peft, and is not the model that peft returned, where the names "
            "of the aggregators must be kept; find the heads in that: hw.find_heads(peft_model)."
        )
    layers: list[Any] = [module for module in model.modules() if is_peft_layer(module)]
    active = list(layers[0].active_adapters) if layers else list(configs)
    if len(active) != 1:
        raise LayoutError(
            f"{len(active)} adapters are active ({', '.join(active) or 'none'}), and an aggregator is trained and "
            "saved with one; choose it with set_adapter(name) before hw.aggregate."
        )
    return configs[active[0]], active[0]


def require_plain_projection(site: Site, old: nn.Module) -> None:
    """Raise `LayoutError` where the output projection itself is adapted or saved by peft."""
    if is_peft_layer(old) or is_peft_layer(site.output_projection.owner if site.output_projection else old):
        raise LayoutError(
            f"{site.label}: its output projection has an adapter of its own, which an aggregator would leave without "
            "a use; leave it out of target_modules (peft adapts that of nn.MultiheadAttention with the attention)."
        )
    if isinstance(getattr(old, "modules_to_save", None), nn.ModuleDict):
        raise LayoutError(
            f"{site.label}: peft trains a copy of its output projection (modules_to_save), which an aggregator would "
            "replace; leave it out of modules_to_save."
        )


def wrap(old: nn.Module, new: Aggregator, adapter: str) -> Any:
    """Return peft's wrapper, which calls the aggregator while its adapter is active, and else the projection."""
    from peft.utils import ModulesToSaveWrapper

    wrapper: Any = ModulesToSaveWrapper(old, adapter)
    # a projection that the aggregator keeps is trained with it, and the wrapper's own stays as it is
    wrapper.modules_to_save[adapter] = copy.deepcopy(new)
    # also makes its parameters trainable
    wrapper.set_adapter(adapter)
    return wrapper


def add_names(config: Any, names: Iterable[str]) -> None:
    """Add modules to those that peft saves with an adapter and looks for when it loads it."""
    config.modules_to_save = [*(config.modules_to_save or ()), *names]


def remove_names(config: Any, names: Iterable[str]) -> None:
    """Undo `add_names`."""
    gone = set(names)
    config.modules_to_save = [name for name in config.modules_to_save or () if name not in gone] or None
