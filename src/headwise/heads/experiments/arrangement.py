"""A cheap experiment at `find_heads`: whether heads lie one after another in a user's own module, as they are read.

Weights do not tell "(h d)" from "(d h)". A module that can be called with random tokens does: one feature of the query
of a token changes what its own head computes for this token, and nothing else; one of a key or value reaches its own
heads, and those of a key no single feature of them. `verify` proves far more, and needs inputs of the model.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, LayoutError
from headwise.heads.experiments.replay import Replay, draw_noise
from headwise.heads.heads import Site, note_proved
from headwise.heads.record import Call, copy_deeply, copy_site
from headwise.heads.view import is_sharded

TOKENS = 4
# The most tokens, and numbers of them, that a module is called with because of a table it holds.
MOST_TOKENS, MOST_COUNTS = 1024, 8
# A change far above rounding, also in half precision, relative to the largest output.
CHANGED = 1e-2
# Names of arguments that are no tokens.
_NO_TOKENS = re.compile(r"mask|bias|pos|len|cache|past|state|freq|rope|rotary|pad|layer", re.IGNORECASE)
# Their attentions are read by rows that are tested on them.
KNOWN = ("torch.", "transformers.", "headwise.", "headwise_lab.")


def require_arranged(model: nn.Module, sites: Sequence[Site], advise: Callable[[str, nn.Module], str]) -> None:
    """Raise `LayoutError` for a module whose heads are elsewhere than they are read, where it can be called.

    One module of each kind is called seven times, in a copy that shares its parameters: on four tokens, or on as many
    as its tables and masks are made for. Nothing is said of a module that cannot be called with tokens alone, or whose
    output projection is outside it. `advise` makes what follows the message, given name and module.
    """
    kinds = {
        (type(site.module), site.layout, site.num_heads, site.head_size, site.slices[0].across): site
        for site in reversed(sites)
        if _is_testable(site)
    }
    for site in kinds.values():
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            called, found = _find_misread(model, site)
        if found is not None:
            try:
                Replay(site, Call(site.module)).refuse(found)
            except LayoutError as error:
                raise LayoutError(f"{error}{advise(site.name, site.module)}") from None
        if called:
            note_proved(site)


def is_known(module: nn.Module) -> bool:
    """Return whether a module is of a library whose attentions the rows are tested on."""
    return type(module).__module__.startswith(KNOWN)


def _is_testable(site: Site) -> bool:
    return (
        not is_known(site.module)
        and min(site.num_heads, site.head_size) > 1
        and all(part.module is not None for part in site.parts)
        and site.output_projection is not None
        and can_run(site.module)
    )


def can_run(module: nn.Module) -> bool:
    """Return whether a module holds parameters that have values here, and nothing that a call would compile."""
    held = [*module.parameters()]
    compiled = any(part._compiled_call_impl is not None for part in module.modules())
    return bool(held) and not compiled and not any(one.is_meta or is_sharded(one) for one in held)


def _find_misread(model: nn.Module, site: Site) -> tuple[bool, str | None]:
    """Return whether a module could be called, and what a change of a query did that it does not do in true heads."""
    # a copy of the module that shares its parameters and has no hooks
    memo = drop_hooks(site.module) | {id(parameter): parameter for parameter in model.parameters()}
    try:
        twin = copy_site(site, copy_deeply(site.module, memo).eval(), memo)
    except Exception:
        # what cannot be copied cannot be called apart
        return False, None
    if twin is None or twin.output_projection is None:
        return False, None
    widths = [head_slice.across for head_slice in twin.slices]
    for args in (args for shape in _list_shapes(twin) for args in list_arguments(twin.module, widths, shape)):
        replay = Replay(twin, Call(twin.module, args))
        try:
            before, again = replay.heads({}), replay.heads({})
            if not torch.equal(before, again) or not before.isfinite().all():
                return False, None
            seen = 0
            for head, feature in ((0, 0), (0, 1), (site.num_heads - 1, 0)):
                tokens, changed = _list_changed(replay, before, head, feature)
                finding = _describe_change(site, head, feature, tokens, changed)
                if finding is not None:
                    return True, finding
                seen += 0 < len(changed) <= site.head_size
            told, finding = _try_keys(site, replay, before)
            if finding is not None:
                return True, finding
        except HeadwiseError:
            return False, None
        except Exception:
            # a module that takes something else than tokens
            continue
        # what changed nothing, or mixes heads, told nothing
        return seen == 3 and told, None
    return False, None


def _list_shapes(site: Site) -> list[tuple[int, ...]]:
    """Return shapes of tokens that a module may be called with: four, and as many as its tables and masks are for."""
    read = {id(part.owner._parameters.get(part.attribute)) for part in (*site.parts, site.output) if part is not None}
    counts: dict[int, None] = {}
    for tensor in (*site.module.buffers(), *site.module.parameters()):
        if id(tensor) in read or tensor.dim() < 2:
            continue
        sides = [*tensor.shape]
        counts |= dict.fromkeys(a for a, b in pairwise(sides) if a == b)
        # a bias for each distance, in one direction or two
        counts |= {(size + 1) // 2: None for size in sides if size % 2}
        counts |= {((math.isqrt(size) + 1) // 2) ** 2: None for size in sides if size % 2}
        counts |= dict.fromkeys(sides[:-1])
    counts = dict.fromkeys(count for count in counts if 1 < count <= MOST_TOKENS and count != TOKENS)
    shapes: list[tuple[int, ...]] = [(1, count) for count in (TOKENS, *list(counts)[:MOST_COUNTS])]
    return [*shapes, *((1, side, side) for _, count in shapes if (side := math.isqrt(count)) ** 2 == count)]


def _try_keys(site: Site, replay: Replay, before: Tensor) -> tuple[bool, str | None]:
    """Return whether keys and values were seen to reach their own heads, and what shows that others are read as them.

    A feature of a key changes all features of what its heads give, and one of a value, as a rule, that feature alone.
    """
    told, scale = True, before.abs().max()
    for projection in (one.projection for one in site.slices if one.projection != "query"):
        head = min(1, site.key_value_heads - 1)

        def change(features: Tensor, head: int = head) -> None:
            # under causality all others attend to the first token
            first = features.flatten(0, -3)[0]
            first[head, 0] = 3.0 - first[head, 0]

        apart = (replay.heads({projection: change}) - before).abs()
        changed = (apart.amax(0) > CHANGED * scale).any(1).nonzero().flatten().tolist()
        own, other = [*site.list_members(head)], replace(site, tiled=not site.tiled)
        if changed and not {*changed} & {*own}:
            return True, _describe_heads(projection, head, changed, own)
        if 1 < site.key_value_heads < site.num_heads and changed == [*other.list_members(head)] != own:
            found = _describe_heads(projection, head, changed, own)
            how = "head by head" if site.tiled else "as a whole"
            return True, f"{found}; its keys and values are repeated {how} (tiled={other.tiled})"
        # without rounding: what is multiplied with other features is the same
        tokens, features = int((apart > 0).flatten(1).any(1).sum()), int((apart > 0).flatten(0, 1).any(0).sum())
        if projection == "key" and tokens > 1 == features < site.head_size and "value" in replay.draws:
            return True, (
                f"changing a feature of key head {head} changed one feature of what its heads give, as one of a value "
                "does; its keys and values are stored in another order"
            )
        told &= bool(changed) and {*changed} <= {*own}
    return told, None


def _describe_heads(projection: str, head: int, changed: Sequence[int], own: Sequence[int]) -> str:
    return f"changing {projection} head {head} changed query heads {_list_some(changed)}, and not {_list_some(own)}"


def _list_changed(replay: Replay, before: Tensor, head: int, feature: int) -> tuple[int, list[int]]:
    """Return for how many tokens a feature of the last one's query changes what W_O gets, and which features there."""

    def change(features: Tensor) -> None:
        # under causality the first token has no other key
        last = features.flatten(0, -3)[-1]
        last[head, feature] = 3.0 - last[head, feature]

    apart = (replay.heads({"query": change}) - before).abs().flatten(1) > CHANGED * before.abs().max()
    return int(apart.any(1).sum()), apart.any(0).nonzero().flatten().tolist()


def _describe_change(site: Site, head: int, feature: int, tokens: int, changed: Sequence[int]) -> str | None:
    size, which = site.head_size, "first" if head == 0 else "last"
    if tokens > 1:
        return (
            f"changing the query of one token changed what {tokens} tokens get; under softmax attention it would "
            "change no other token's"
        )
    own = range(head * size, (head + 1) * size)
    # more than a head can hold is no order of features, but a mixture of heads
    if not changed or len(changed) > size or all(place in own for place in changed):
        return None
    strided = all(place % site.num_heads == changed[0] % site.num_heads for place in changed)
    order = (
        "; its heads alternate feature by feature, as in 'b n (d h)', and are read where they are stored one after "
        "another, '(h d)'"
    )
    return (
        f"changing feature {feature} of its {which} query head changed features {_list_some(changed)} of what W_O "
        f"gets, and not those from {own[0]} to {own[-1]}{order if strided else ''}"
    )


def drop_hooks(module: nn.Module) -> dict[int, Any]:
    """Return a memo of `copy.deepcopy` with which the copy of a module has no hooks."""
    own = [held for part in module.modules() for name, held in vars(part).items() if name.endswith("_hooks")]
    return {id(hooks): OrderedDict() for hooks in own}


def list_arguments(module: nn.Module, widths: Sequence[int], shape: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield arguments with which a module may be called: tokens, for as many as it requires; or tokens and None.

    `widths` are features of the tokens of the first arguments; the last one serves further ones. `shape` is sequences
    and tokens, or tokens alone.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    required = [one for one in parameters if one.kind in kinds and one.default is inspect.Parameter.empty]
    named = [one for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    if any(one.default is inspect.Parameter.empty for one in named) or not 1 <= len(required) <= 6:
        return
    first, every = next(module.parameters()), [*widths, *[widths[-1]] * len(required)]
    tokens = [draw_noise(first.new_empty(*shape, every[seed]), seed) for seed in range(len(required))]
    optional = [re.search(_NO_TOKENS, one.name) is not None for one in required]
    yield tuple(None if absent else given for given, absent in zip(tokens, optional, strict=True))
    if any(optional):
        yield tuple(tokens)
    if len(required) > 1:
        yield (tokens[0], *[None] * (len(required) - 1))


def _list_some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")
