"""Models compiled by torch.compile: reading them as they were before, running them so, and having hooks seen."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# The name under which torch.compile keeps the module it wraps.
WRAPPED = "_orig_mod"


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` has wrapped, or the module itself.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> unwrap_compiled(torch.compile(linear, backend="eager")) is unwrap_compiled(linear) is linear
        True
    """
    return module.get_submodule(WRAPPED) if _is_wrapper(module) else module


def strip_wrappers(name: str) -> str:
    """Return the name of a module without the wrappers of torch.compile in it.

    Example:
        >>> strip_wrappers("encoder._orig_mod.layers.0")
        'encoder.layers.0'
    """
    return ".".join(part for part in name.split(".") if part != WRAPPED)


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[None]:
    """Have modules inside a model hold what torch.compile has wrapped, until the end of the block.

    Example:
        >>> model = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))
        >>> with without_wrappers(model):
        ...     print([name for name, _ in model.named_modules()])
        ['', '0']
        >>> [name for name, _ in model.named_modules()]
        ['', '0', '0._orig_mod']
    """
    # torch.jit holds modules in no dict, and none that torch.compile has wrapped
    holders = [own._modules for own in model.modules() if not isinstance(own, torch.jit.ScriptModule)]
    places = [(held, name) for held in holders for name in held]
    wrappers = [
        (held, name, child) for held, name in places if (child := held[name]) is not None and _is_wrapper(child)
    ]
    for held, name, child in wrappers:
        held[name] = unwrap_compiled(child)
    try:
        yield
    finally:
        for held, name, child in wrappers:
            # what was replaced in the block stays so
            if held.get(name) is unwrap_compiled(child):
                held[name] = child


def guard_hooks() -> None:
    """Have torch.compile check, at each call of what it compiled, whether hooks were added since or removed.

    By default it does not look at modules without hooks: code compiled before a hook runs without it, and so does a
    layer that shares its code with a layer without hooks. The option stays set; what was compiled before is compiled
    again. Where torch.compile was never used this does nothing.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.config.skip_nnmodule_hook_guards:
        dynamo.config.skip_nnmodule_hook_guards = False
        dynamo.reset_code_caches()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run what torch.compile has compiled as it was before, until the end of the block.

    For measurements that attach something else for each of many forwards, which would be compiled for each.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _is_wrapper(module: nn.Module) -> bool:
    return WRAPPED in module._modules and type(module).__module__ == "torch._dynamo.eval_frame"
