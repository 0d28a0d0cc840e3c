"""Sizes of modules that differ from those their configuration gives, noted on each module for saving and loading."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

# In a module's own dictionary, so that copies and pickles keep it.
MARK = "_headwise_sizes"
# What the attention functions of transformers look for on a module: how many query heads share a key/value head.
GROUPS = "num_key_value_groups"


def resize(module: nn.Module, sizes: Mapping[str, int]) -> Callable[[], None]:
    """Set integer attributes of a module, note them on it, and return what sets both back.

    An empty mapping notes that parameters of the module itself have other shapes.
    """
    own = vars(module)
    before = {name: getattr(module, name, None) for name in sizes}
    noted = own.get(MARK)
    for name, value in sizes.items():
        setattr(module, name, value)
    own[MARK] = {**(noted or {}), **sizes}

    def undo() -> None:
        for name, value in {**before, MARK: noted}.items():
            if value is None:
                own.pop(name, None)
            else:
                setattr(module, name, value)

    return undo


def set_data(parameter: Tensor, data: Tensor) -> None:
    """Give a parameter data of another shape; it stays the same object, with its hooks."""
    # what accumulates its gradient keeps the old shape while a loss of before is alive; torch makes it anew only where
    # the dtype changes
    other = torch.float16 if parameter.dtype == torch.float32 else torch.float32
    parameter.data = torch.empty(0, dtype=other, device=data.device)
    parameter.data = data


def read_sizes(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return the sizes noted on the modules of a model, by name of the module."""
    return {name: dict(vars(module)[MARK]) for name, module in model.named_modules() if MARK in vars(module)}


def forget_sizes(model: nn.Module) -> None:
    """Remove the notes: the model's configuration gives its sizes."""
    for module in model.modules():
        vars(module).pop(MARK, None)
