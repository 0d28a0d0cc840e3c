"""The state of an optimizer after its parameters were cut."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import SettingError
from headwise.shrinking.prune_cuts import Cut

# Factored statistics of transformers' Adafactor: what is left of the axes of a parameter when one is averaged over.
_AVERAGED = {"exp_avg_sq_row": -1, "exp_avg_sq_col": -2}


def require_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise `SettingError` unless this is None or an optimizer of a model with a state for each parameter."""
    if optimizer is None:
        return
    name = type(optimizer).__name__
    if not (hasattr(optimizer, "state") and hasattr(optimizer, "param_groups")):
        raise SettingError(f"optimizer is a {name}; expected the torch optimizer that trains the model, or None.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SettingError(
            "optimizer is an LBFGS, whose state is of all parameters in one row and cannot be cut; leave it out, and "
            "make a new one afterwards."
        )
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in trained for parameter in model.parameters()):
        raise SettingError(
            f"the {name} given as optimizer holds no parameter of the {type(model).__name__}; expected the one that "
            "trains it, or None."
        )


def cut_states(optimizer: Any, cuts: Sequence[Cut]) -> None:
    """Cut the state of each parameter as the parameter; what cannot be cut is dropped, with a warning.

    Call it after the cuts are applied. Moments shaped like the parameter keep the entries that stay; a step count stays
    as it is; averages over an axis (Adafactor) keep their entries along the cut axis.
    """
    dropped = []
    for cut in cuts:
        state = optimizer.state.get(cut.parameter)
        if not state:
            continue
        new = {name: _cut(cut, name, value) for name, value in state.items()}
        if any(value is None and state[name] is not None for name, value in new.items()):
            dropped.append(cut.name)
            del optimizer.state[cut.parameter]
        else:
            state.update(new)
    if dropped:
        warnings.warn(
            f"{type(optimizer).__name__} keeps a state of {len(dropped)} parameters ({', '.join(dropped[:4])}) that "
            "has no entry for each of their rows and columns; it was dropped and begins anew.",
            stacklevel=3,
        )


def _cut(cut: Cut, name: str, value: Any) -> Any:
    """Return what stays of one value of a state, None for what cannot be cut."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return value
    left: list[int] = list(range(cut.parameter.dim()))
    if name in _AVERAGED and value.dim() == len(left) - 1:
        left.pop(_AVERAGED[name])
    if value.dim() != len(left):
        return None
    if cut.axis not in left:
        return value
    axis = left.index(cut.axis)
    if value.shape[axis] == 1:
        # averaged over the cut axis, which stays an average over heads of which some are gone
        return value
    others = [size for place, size in enumerate(value.shape) if place != axis]
    expected = [cut.parameter.shape[place] for place in left if place != cut.axis]
    if value.shape[axis] != cut.size or any(a not in (1, b) for a, b in zip(others, expected, strict=True)):
        return None
    return value.index_select(axis, torch.tensor(cut.keep, device=value.device)).contiguous()
