"""Modules of a rebuilt model brought to the sizes of a saved one: its heads were removed or merged."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from headwise.errors import DataError
from headwise.nn.resized import GROUPS, resize, set_data
from headwise.routing.saved import REMEDY, Saved


def resize_modules(saved: Saved, model: nn.Module, tensors: Mapping[str, Tensor]) -> list[Callable[[], None]]:
    """Give modules of a model the saved sizes, and return what gives them the old ones.

    Parameters and buffers that these modules hold themselves get the shapes of the saved tensors, and no values yet. A
    model that has these sizes stays as it is, with the same parameters.

    Raises:
        DataError: A module, or an attribute of it, is not there, or a saved tensor is larger than the model's.
    """
    undo: list[Callable[[], None]] = []
    try:
        for name, sizes in saved.sizes.items():
            module = find_module(saved, model, name)
            wrong = [key for key in sizes if type(vars(module).get(key, 1 if key == GROUPS else None)) is not int]
            if wrong:
                raise DataError(
                    f"{saved.path}: {name[:60]}.{wrong[0][:60]} is no number of heads or features of a "
                    f"{type(module).__name__}; {REMEDY}"
                )
            undo.append(resize(module, sizes))
            for attribute, parameter in (*module._parameters.items(), *module._buffers.items()):
                path = f"{name}.{attribute}" if name else attribute
                stored = tensors.get(saved.tied.get(path, path))
                if parameter is None or stored is None or stored.shape == parameter.shape:
                    continue
                if stored.dim() != parameter.dim() or any(map(int.__gt__, stored.shape, parameter.shape)):
                    raise DataError(
                        f"{path} has shape {tuple(stored.shape)} in {saved.folder} and {tuple(parameter.shape)} in the "
                        f"model, which has fewer; {REMEDY}"
                    )
                undo.append(_shrink(parameter, stored.shape))
    except BaseException:
        for one in reversed(undo):
            one()
        raise
    return undo


def _shrink(parameter: Tensor, shape: torch.Size) -> Callable[[], None]:
    before, gradient = parameter.data, parameter.grad
    parameter.grad = None
    set_data(parameter, before.new_empty(shape))

    def undo() -> None:
        set_data(parameter, before)
        parameter.grad = gradient

    return undo


def find_module(saved: Saved, model: nn.Module, name: str) -> nn.Module:
    """Return a module that a record names.

    Raises:
        DataError: The model has none of that name.
    """
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise DataError(
            f"the model has no module {name[:60]!r}, which {saved.path} names; pass a model of the same structure."
        ) from None
