"""Which tokens are real, read from the masks an attention module was given.

Owns the two conventions: torch's `key_padding_mask` (True is padding) and transformers' `attention_mask` (True, 1 or an
additive 0 may be attended to), which holds causality and windows besides; and the length of a cache. Must not know
about heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from headwise.nn.multihead import VERY_NEGATIVE, valid_keys


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional parameters of a module's forward."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind not in variadic)


def named_arguments(names: tuple[str, ...], args: tuple, kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a call by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def cached_length(module: nn.Module, arguments: Iterable[object]) -> int | None:
    """Return how many tokens were in the cache that an attention module was called with; None without a cache."""
    cache: Any = next((value for value in arguments if hasattr(value, "get_seq_length")), None)
    return None if cache is None else int(cache.get_seq_length(getattr(module, "layer_idx", None) or 0))


def given_padding(module: nn.Module, arguments: Mapping[str, object]) -> Tensor | None:
    """Return True where a key of this call is a real token, [B or 1, K]; None when it was given no mask.

    Args:
        module: The attention module; masks of transformers' modules are read in transformers' convention.
        arguments: The arguments of the call by name.
    """
    mask = arguments.get("key_padding_mask")
    if isinstance(mask, Tensor):
        return valid_keys(mask) if mask.dim() == 2 else None
    if not any(base.__module__.startswith("transformers.") for base in type(module).__mro__):
        return None
    crossed = arguments.get("encoder_hidden_states") is not None and "encoder_attention_mask" in arguments
    names = ("encoder_attention_mask",) if crossed else ("attention_mask", "mask")
    mask = next((arguments[name] for name in names if isinstance(arguments.get(name), Tensor)), None)
    return real_keys(mask) if isinstance(mask, Tensor) else None


def real_keys(mask: Tensor) -> Tensor | None:
    """Return True where some query may attend to a key, from a mask in transformers' convention.

    A real token may always be attended to by itself, under causality and in a window too; padding by none.

    Args:
        mask: [B, K], [B, Q, K] or [B, 1 or H, Q, K]; boolean (True may attend), integer (1 may attend) or additive.
            A floating mask without a positive entry is additive.

    Returns:
        [B, K], or None for a mask of another shape.

    Example:
        >>> import torch
        >>> causal_and_padded = torch.tensor([[[[1, 0, 0], [1, 1, 0], [1, 1, 0]]]]).bool()
        >>> real_keys(causal_and_padded)
        tensor([[ True,  True, False]])
    """
    if mask.dim() not in (2, 3, 4):
        return None
    # 1 may attend, or an additive 0 may: the values tell, and asking them on the host would wait for the device
    allowed = mask > 0 if mask.is_floating_point() else mask != 0
    if mask.is_floating_point():
        allowed = allowed | ((mask > VERY_NEGATIVE) & ~allowed.any())
    return allowed if allowed.dim() == 2 else allowed.any(tuple(range(1, allowed.dim() - 1)))
