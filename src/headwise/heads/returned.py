"""What a projection of a user's own returns: features along the last axis, or heads along axes of their own."""

from collections import OrderedDict
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError
from headwise.heads.adapters import has_adapters, is_peft_layer
from headwise.heads.copying import copy_deeply
from headwise.heads.head_slice import HeadSlice, is_sharded
from headwise.heads.heads import Site
from headwise.heads.replay import draw_noise

# Numbers of sequences and tokens: two that are no size of the heads are told from these in a shape.
COUNTS = (5, 7, 11, 13, 17, 19, 23, 29)
PLAIN = ("torch.", "transformers.", "headwise.", "peft.")


def read_returned(site: Site) -> Site:
    """Return the site with the axes that its projections return, where these are no features along the last axis.

    Each projection that is a user's own is called once, on random tokens, in a copy that shares its parameters. Nothing
    is said of one that cannot be called so.

    Raises:
        LayoutError: One returns no tensor, or heads and tokens along one axis; or W_O takes no concatenated heads.
    """
    _require_joined(site)
    slices = [head_slice.with_parts([_read(site, part) for part in head_slice.parts]) for head_slice in site.slices]
    return replace(site, slices=tuple(slices))


def _require_joined(site: Site) -> None:
    """Raise `LayoutError` where W_O takes heads along an axis of their own, and not concatenated ones."""
    module = None if site.output is None else site.output.module
    if module is None or not _is_own(module):
        return
    joined = _draw(*COUNTS[:2], site.num_heads * site.head_size)
    apart = joined.unflatten(-1, (site.num_heads, site.head_size))
    if _call(module, joined) is None and any(_call(module, one) is not None for one in (apart, apart.transpose(1, 2))):
        raise LayoutError(
            f"{site.label} ({type(site.module).__name__}): its output projection, a {type(module).__name__}, takes "
            f"heads along an axis of their own; expected the concatenated heads, (batch, tokens, {joined.shape[-1]}). "
            f"Have the attention flatten them, or leave it out: find_heads(model, exclude=({site.name!r},))."
        )


def _read(site: Site, part: HeadSlice) -> HeadSlice:
    module = part.module
    if module is None or not _is_own(module):
        return part
    counts = [count for count in COUNTS if count not in {part.heads, part.head_size, part.along, site.num_heads}][:2]
    tokens = _draw(*counts, part.across)
    output = _call(module, tokens)
    if output is None or (isinstance(output, Tensor) and output.shape == (*counts, part.along)):
        return part
    if isinstance(output, Tensor):
        shape = tuple(output.shape)
        rest = [axis for axis, size in enumerate(shape) if size not in counts]
        if len(shape) == len(rest) + 2 and {*counts} <= {*shape} and prod(shape[axis] for axis in rest) == part.along:
            read = replace(part, returned=(*map(shape.index, counts), *rest))
            # refuses what has no axis of heads
            read.features(output)
            return read
    told = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    raise LayoutError(
        f"{site.label} ({type(site.module).__name__}): its {part.projection} projection, a {type(module).__name__}, "
        f"returns {told} for tokens of shape {tuple(tokens.shape)}; expected {part.along} features along the last axis "
        "or along axes of their own, such as (batch, tokens, heads, features). Have it return these, or leave the "
        f"attention out: find_heads(model, exclude=({site.name!r},))."
    )


def _draw(*shape: int) -> Tensor:
    return draw_noise(torch.empty(shape, device="cpu"))


def _is_own(module: nn.Module) -> bool:
    held = [*module.parameters()]
    return (
        type(module).forward is not nn.Linear.forward
        and not type(module).__module__.startswith(PLAIN)
        and not any(has_adapters(part) or is_peft_layer(part) for part in module.modules())
        and bool(held)
        and not any(parameter.is_meta or is_sharded(parameter) for parameter in held)
        # running a compiled part would compile it
        and all(part._compiled_call_impl is None for part in module.modules())
    )


def _call(module: nn.Module, tokens: Tensor) -> object:
    """Return what a copy of a module makes of tokens; None where it cannot be called with them alone."""
    memo: dict[int, Any] = {id(held): held for held in (*module.parameters(), *module.buffers())}
    for part in module.modules():
        memo |= {id(hooks): OrderedDict() for name, hooks in vars(part).items() if name.endswith("_hooks")}
    first = next(module.parameters())
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return copy_deeply(module, memo).eval()(tokens.to(first))
    except Exception:
        return None
