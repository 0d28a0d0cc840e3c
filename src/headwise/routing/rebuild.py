"""A model of transformers built from what a folder says of it, no larger than its tensors and without foreign code."""

import contextlib
import copy
import importlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from headwise.errors import DataError, HeadwiseError
from headwise.foreign_code import (
    FLAG,
    LOCAL,
    is_local,
    refuse_foreign_code,
    require_local_kernels,
)
from headwise.nn.bounds import TooLarge, build_within
from headwise.routing.saved import REMEDY, Identity
from headwise.stock_folders import describe_excess, require_countable
from headwise.stored_tensors import Stored

MODULE = re.compile(r"transformers\.models(\.\w+)+")


def rebuild(identity: Identity, names: Collection[str], stored: Stored, *, trusted: bool) -> nn.Module:
    """Return a new model of the class and configuration that a folder names.

    Args:
        identity: What the folder says of the model.
        names: Names of its tensors, those that are tied to others too.
        stored: Its tensors.
        trusted: Whether Python files and kernels that the configuration names may run.

    Raises:
        DataError: The class is no model of transformers, the configuration does not fit it or names code, or the model
            would be much larger than its tensors.
    """
    cls = _find_class(identity)
    if not trusted:
        _require_local_attention(identity)
    require_countable(identity.path, identity.config, stored)
    try:
        with refuse_foreign_code(identity.path.parent, trusted=trusted):

            def build(given: Mapping[str, bool]) -> nn.Module:
                return build_within(lambda: _build(cls, identity, given), tensors=stored.tensors, size=stored.size)

            return build(find_arguments(cls, names, build))
    except TooLarge as error:
        raise DataError(describe_excess(identity.path, identity.config, stored, error)) from None
    except HeadwiseError:
        raise
    except Exception as error:
        # whatever a class of transformers raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"{identity.path}: no {identity.name} can be built from its configuration ({reason}); {REMEDY}"
        ) from None


def _find_class(identity: Identity) -> Any:
    cls: Any = None
    if MODULE.fullmatch(identity.module):
        with contextlib.suppress(ImportError):
            cls = getattr(importlib.import_module(identity.module), identity.name, None)
    from transformers import PreTrainedModel

    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise DataError(
            f"{identity.path}: the class is {f'{identity.module}:{identity.name}'[:60]!r}, which is not from "
            "transformers, or no model of the installed version; build one like it, without aggregators, and pass it: "
            "load(folder, model)."
        )
    return cls


def _build(cls: Any, identity: Identity, arguments: Mapping[str, bool]) -> nn.Module:
    config = cls.config_class.from_dict(copy.deepcopy(identity.config))
    config._attn_implementation = dict(identity.attention)
    model = cls(config, **arguments)
    if identity.generation is not None and getattr(model, "generation_config", None) is not None:
        model.generation_config = type(model.generation_config).from_dict(copy.deepcopy(identity.generation))
    return model


def find_arguments(
    cls: type, names: Collection[str], build: Callable[[Mapping[str, bool]], nn.Module]
) -> dict[str, bool]:
    """Return the switches of a class of models, such as `add_pooling_layer`, that give its tensors certain names.

    Args:
        cls: The class.
        names: The names.
        build: Builds a model with such switches; called without memory for its weights.
    """
    switches = {
        name: not parameter.default
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if isinstance(parameter.default, bool)
    }

    def count_others(arguments: Mapping[str, bool]) -> int:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return len(set(list_tensors(build(arguments))) ^ {*names})

    found: dict[str, bool] = {}
    try:
        others = count_others(found) if switches else 0
        for name, value in switches.items():
            if others and (fewer := count_others({**found, name: value})) < others:
                found, others = {**found, name: value}, fewer
    except Exception:
        # what cannot be built so is told where it is built
        return {}
    return found


def list_tensors(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of the parameters and buffers of a model by name, tied ones under all their names."""
    held = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor.shape for some in held for name, tensor in some}


def _require_local_attention(identity: Identity) -> None:
    require_local_kernels(identity.path, identity.config)
    from transformers import AttentionInterface

    registered = (name for name in AttentionInterface().valid_keys() if not re.match(r"flash_|.*/", name))
    known = LOCAL["attn_implementation"].union(registered)
    strange = next((name for name in identity.attention.values() if not is_local(name, known)), None)
    if strange is not None:
        raise DataError(
            f"{identity.path} has the attention {str(strange)[:60]!r}, which is not installed: transformers may fetch "
            f"it from the Hub and run it; {FLAG}."
        )
