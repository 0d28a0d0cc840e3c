"""What one call of an attention module computed, and which of its tokens were real.

Masks come in two conventions: torch's `key_padding_mask` (True is padding) and transformers' `attention_mask` (True, 1
or an additive 0 may be attended to), which also holds causality and windows.

Which calls of attention modules belong to one forward pass of the model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from headwise.errors import NotFired, ShapeError
from headwise.heads.heads import Heads, Site
from headwise.heads.layouts.functional import explain_uncalled
from headwise.nn.checkpointing import is_recomputing
from headwise.nn.hooks import Hook, PerThread
from headwise.nn.multihead import VERY_NEGATIVE, valid_keys

# Arguments that hold other keys than a call's own tokens, and their mask.
CROSSED = (("encoder_hidden_states", "encoder_attention_mask"), ("inputs", "inputs_mask"))
# Names of an attention's place in a cache of all layers; GPT Neo and XLM have the second.
PLACES = ("layer_idx", "layer_id", "layer_index", "layer_number", "layer", "block_idx", "cache_idx", "cache_index")
# Modules of transformers whose boolean masks are True where a key is hidden.
HIDING = ("MptAttention", "Gemma3nAudioAttention")


@dataclass(repr=False)
class Capture:
    """What one call of one site computed.

    A deep copy shares the site and has detached copies of the tensors.

    Attributes:
        site: The attention module.
        outputs: O_h of each head as W_O gets it, [B, Q, H, e]: 0 for a head that `ablate` has removed.
        values: V_g of each key/value head, [B, K, G, e].
        weights: Attention weights before dropout, [B, H, Q, K].
        mean_weights: Their mean over heads, [B, Q, K].
        key_keep: True where a key is a real token, [B, K], cached keys included: one that the mask the call received
            lets some query attend to. None when it received none, as where nothing is padded.
        query_keep: The same for queries, [B, Q]; for cross-attention that of the decoder's own self-attention; for
            pooling, [B, 1], True where a text has a real token.
    """

    site: Site
    outputs: Tensor | None = None
    values: Tensor | None = None
    weights: Tensor | None = None
    mean_weights: Tensor | None = None
    key_keep: Tensor | None = None
    query_keep: Tensor | None = None

    @property
    def read(self) -> tuple[Tensor | None, ...]:
        """What was computed of the heads, None for what was not requested."""
        return self.outputs, self.values, self.weights, self.mean_weights

    @property
    def queries(self) -> int:
        """How many real queries the call had; 0 where neither outputs nor weights of each head were computed."""
        if self.query_keep is not None:
            return int(self.query_keep.sum())
        if self.outputs is not None:
            return self.outputs.shape[0] * self.outputs.shape[1]
        return 0 if self.weights is None else self.weights.shape[0] * self.weights.shape[2]

    def __repr__(self) -> str:
        held = ((entry.name, getattr(self, entry.name)) for entry in fields(self) if entry.name != "site")
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in held if tensor is not None)
        return f"Capture({self.site.label}: {shapes or 'nothing yet'})"

    def __deepcopy__(self, _memo: dict[int, object]) -> Self:
        # torch copies no tensor with a graph, and a copy of the site would hold a copy of the model
        tensors = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "site"}
        return replace(self, **{name: None if t is None else t.detach().clone() for name, t in tensors.items()})


@dataclass(frozen=True)
class Padding:
    """Which keys of a call are real, whether it was given a cache, and how many tokens were in that before it."""

    keep: Tensor | None = None
    first: int = 0
    cached: bool = False

    def select_queries(self, queries: int) -> Tensor | None:
        """Return the padding of the call's own queries, the newest of its keys."""
        if self.keep is None or self.keep.shape[1] == queries:
            return self.keep
        start = min(self.first, self.keep.shape[1] - queries)
        return self.keep[:, start : start + queries]


def read_padding(module: nn.Module, arguments: Mapping[str, object]) -> Padding:
    """Return the padding of a call, from its arguments by name."""
    first = count_cached(module, arguments)
    return Padding(read_key_padding(module, arguments), first or 0, first is not None)


def note_padding(module: nn.Module, tell: Callable[[Padding], object]) -> Callable[[nn.Module, tuple, dict], None]:
    """Return a hook before a module that tells the padding of each of its calls."""
    names = list_parameters(module)

    def called(module: nn.Module, args: tuple, kwargs: dict) -> None:
        tell(read_padding(module, name_arguments(names, args, kwargs)))

    return called


def find_askers(heads: Heads) -> list[tuple[Site, Site]]:
    """Return each cross-attention with its layer's self-attention, which ran on the same queries with their padding."""
    return [
        (asking, asked)
        for asked in heads.found
        for asking in heads.sites
        if asking.kind == "cross" != asked.kind and (asking.stack, asking.layer) == (asked.stack, asked.layer)
    ]


class ForwardToken:
    """One forward of the model itself; compared by identity, as torch.compile would recompile for each number."""


@dataclass
class OpenCapture:
    """The capture of a call that is still running.

    It has its `own` padding, and in `queries` the padding of the self-attention on the same queries. `forward` is None
    where a part was called without the model.
    """

    capture: Capture
    own: Padding
    queries: Padding
    forward: ForwardToken | None

    def finish(self, *, outputs: bool, values: bool, weights: bool, mean_weights: bool = False) -> Capture:
        """Return the capture with its queries' padding; `NotFired` if something requested was not computed in it."""
        capture = self.capture
        name = capture.site.label
        if outputs and capture.outputs is None:
            raise NotFired(
                f"{name} was called but its outputs were not computed in the call: "
                f"{explain_uncalled(capture.site, 'outputs')}"
            )
        if values:
            self._require_values(name)
        if (weights and capture.weights is None) or (mean_weights and capture.mean_weights is None):
            raise NotFired(
                f"{name} was called but computed its attention by another implementation than the one its weights "
                "are read from; attach after any set_attn_implementation()."
            )
        # in cross-attention queries are tokens of another sequence, with its padding
        cross = capture.site.kind == "cross"
        padding = self.queries if cross else Padding(capture.key_keep, self.queries.first)
        if capture.site.kind == "pooling" and capture.key_keep is not None:
            # the one query of a text of padding alone pools nothing
            padding = Padding(capture.key_keep.any(1, keepdim=True))
        axes = ((capture.outputs, 1), (capture.weights, 2), (capture.mean_weights, 1))
        queries = next((tensor.shape[axis] for tensor, axis in axes if tensor is not None), None)
        capture.query_keep = padding.keep if queries is None else padding.select_queries(queries)
        read = next((tensor for tensor in capture.read if tensor is not None), None)
        if read is not None:
            capture.key_keep = _expand_batch(capture.key_keep, len(read))
            capture.query_keep = _expand_batch(capture.query_keep, len(read))
        return capture

    def _require_values(self, name: str) -> None:
        values, keep = self.capture.values, self.capture.key_keep
        weights = self.capture.mean_weights if self.capture.weights is None else self.capture.weights
        earlier = self.own.first if self.capture.site.kind != "cross" else 0
        keys = {tensor.shape[-1] for tensor in (keep, weights) if tensor is not None}
        if self.own.cached and (values is None or earlier or keys - {values.shape[1]}):
            raise NotFired(
                f"{name} was called with a cache, which holds keys whose values the call itself did not compute; pass "
                "use_cache=False where values are read."
            )
        if values is None:
            raise NotFired(
                f"{name} was called but its values were not computed in the call: "
                f"{explain_uncalled(self.capture.site, 'values')}"
            )
        if keep is not None and keep.shape[1] != values.shape[1]:
            raise NotFired(
                f"{name} computed values of {values.shape[1]} tokens, and the mask it was called with is for "
                f"{keep.shape[1]} keys; which value belongs to which key is unknown."
            )


def split_heads(joined: Tensor, site: Site) -> Tensor:
    """Return the input of W_O, the concatenated heads [..., H * e], as [..., H, e]; refuse another last axis."""
    require_joined(joined, site)
    sizes = site.num_heads, site.head_size
    return site.gather_heads(joined, -1, sizes[0] * sizes[1]).unflatten(-1, sizes)


def require_joined(joined: Tensor, site: Site) -> None:
    """Raise `ShapeError` unless this is an input of W_O: [..., H * e], or its part under tensor parallel."""
    width = site.num_heads * site.head_size
    if joined.dim() == 0 or site.count_all(joined.shape[-1], width) != width:
        raise ShapeError(
            f"{site.label} gave its output projection a tensor of shape {tuple(joined.shape)}; expected "
            f"{site.num_heads} heads of {site.head_size} numbers, {width} on the last axis. If heads were pruned since "
            "find_heads, call it again."
        )


class ValueParts:
    """Values of a site, put together from what the modules that project them return."""

    def __init__(self, site: Site) -> None:
        self.site = site
        value = site.slices[-1]
        self.parts = (value,) if value.module is not None else value.parts
        self._arrived = PerThread(dict[int, Tensor])

    def take(self, index: int, output: Tensor) -> Tensor | None:
        """Return V_g, [..., G, e], when what the module `index` of `value_modules` returned completes them."""
        part = self.parts[index]
        if len(self.parts) == 1:
            whole = output if part.returned else self.site.gather_heads(output, -1, part.along)
            values, bias = part.features(whole), part.added_bias
            # latent attention projects a state of one head, [B, 1, K, r]
            values = values.squeeze(1) if values.dim() == 5 else values
            return values if bias is None else values + bias
        arrived = self._arrived.own
        if index in arrived:
            # the heads of an earlier call did not all run
            arrived.clear()
        arrived[index] = part.features(output)
        if len(arrived) < len(self.parts):
            return None
        values = torch.cat([arrived[place] for place in range(len(self.parts))], -2)
        arrived.clear()
        return values


def _expand_batch(keep: Tensor | None, batch: int) -> Tensor | None:
    # a mask may be given once for all sequences
    return keep if keep is None or keep.shape[0] == batch else keep.expand(batch, -1)


# Names of positional parameters, by the function that is a module's forward.
_parameters: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()


def list_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional parameters of a module's forward."""
    forward = module.forward
    # layers of a model share the function, whose signature takes long to read
    shared = getattr(forward, "__func__", None)
    names = None if shared is None else _parameters.get(shared)
    if names is None:
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = inspect.signature(forward).parameters.values()
        names = tuple(parameter.name for parameter in parameters if parameter.kind not in variadic)
        if shared is not None:
            _parameters[shared] = names
    return names


def name_arguments(names: tuple[str, ...], args: tuple, kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a call by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def count_cached(module: nn.Module, arguments: Mapping[str, object]) -> int | None:
    """Return how many tokens were in the cache that an attention module was called with; None without a cache.

    The module's place in the cache is one of its arguments or attributes.
    """
    cache: Any = next((value for value in arguments.values() if hasattr(value, "get_seq_length")), None)
    if cache is None:
        return None  # before the layer is read, for whose number torch.compile would compile each layer anew
    # one attention that several layers share is told its place at each call
    places = (*(arguments.get(name) for name in PLACES), *(getattr(module, name, None) for name in PLACES))
    layer = next((place for place in places if type(place) is int and place >= 0), None)
    kept = () if layer is None else getattr(cache, "layers", ())[layer : layer + 1]
    if kept and not hasattr(kept[0], "get_seq_length"):
        # it reads the keys of a layer that was called before, which has the tokens of this call too
        states = next((value for value in arguments.values() if isinstance(value, Tensor) and value.dim() == 3), None)
        return max(int(cache.get_seq_length()) - (0 if states is None else states.shape[1]), 0)
    return int(cache.get_seq_length() if layer is None else cache.get_seq_length(layer))


def read_key_padding(module: nn.Module, arguments: Mapping[str, object]) -> Tensor | None:
    """Return True where a key of this call is a real token, [B or 1, K]; None when it was given no mask."""
    mask = arguments.get("key_padding_mask")
    if isinstance(mask, Tensor):
        return valid_keys(mask) if mask.dim() == 2 else None
    if not any(base.__module__.startswith("transformers.") for base in type(module).__mro__):
        return None
    given = dict(arguments)
    if isinstance(inputs := given.get("attention_inputs"), tuple) and len(inputs) == 4:
        # Funnel: positions, token types, mask, mask of positions
        given["attention_mask"] = inputs[2]
    # keys of another sequence, with its mask
    crossed = [mask for keys, mask in CROSSED if given.get(keys) is not None and mask in given]
    names = crossed or ["attention_mask", "mask"]
    mask = next((given[name] for name in names if isinstance(given.get(name), Tensor)), None)
    if not isinstance(mask, Tensor):
        return None
    hides = mask.dtype == torch.bool and type(module).__name__ in HIDING
    return find_real_keys(~mask if hides else mask)


def find_real_keys(mask: Tensor) -> Tensor | None:
    """Return True where some query may attend to a key [B, K], or None for a mask of an unknown shape.

    A real token may always attend to itself, also under causality and in a window; no query attends to padding. The
    mask is [B, K], [B, Q, K] or [B, 1 or H, Q, K] in transformers' convention: True or 1 may attend, or additive, which
    a floating mask without a positive entry is.

    >>> find_real_keys(torch.tensor([[[[1, 0, 0], [1, 1, 0], [1, 1, 0]]]]).bool())
    tensor([[ True,  True, False]])
    """
    if mask.dim() not in (2, 3, 4):
        return None
    # 1 may attend, or an additive 0 may: the values tell, and reading them would synchronize with the device
    allowed = mask > 0 if mask.is_floating_point() else mask != 0
    if mask.is_floating_point():
        allowed = allowed | ((mask > VERY_NEGATIVE) & ~allowed.any())
    return allowed if allowed.dim() == 2 else allowed.any(tuple(range(1, allowed.dim() - 1)))


# since transformers 5.24, and before
CACHES = ("cache", "past_key_values")
LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")

_partial: ContextVar[bool] = ContextVar("partial forwards", default=False)


@contextmanager
def partial_forwards() -> Iterator[None]:
    """Mark forwards inside the block as partial: they reuse parts of an earlier one, so some attentions may not run."""
    token = _partial.set(True)
    try:
        yield
    finally:
        _partial.reset(token)


def drops_layers(model: nn.Module) -> bool:
    """Return whether a forward may skip layers at random: LayerDrop, while a model of transformers is trained."""
    config = getattr(model, "config", None)
    return model.training and any((getattr(config, name, 0) or 0) > 0 for name in LAYER_DROPS)


def is_partial() -> bool:
    """Return whether forwards are partial now."""
    # torch.compile cannot trace it; what replays parts of a forward runs the model uncompiled
    return not torch.compiler.is_compiling() and _partial.get()


@dataclass
class _Forward:
    """Whether a forward runs, which, and whether the last one was given a cache."""

    inside: bool = False
    generating: bool = False
    token: ForwardToken = field(default_factory=ForwardToken)


class ForwardScope:
    """Calls `begun` and `ended`, with whether it raised, in the thread of each forward of a model.

    Recomputation by activation checkpointing is not a forward.
    """

    def __init__(self, model: nn.Module, begun: Callable[[], object], ended: Callable[[bool], object]) -> None:
        self._here = PerThread(_Forward)
        self._begun, self._ended = begun, ended
        entered, left = Hook(model, self._on_call), Hook(model, self._on_return)
        # after a forward that raised, too
        self._handles = (
            model.register_forward_pre_hook(entered, with_kwargs=True, prepend=True),
            model.register_forward_hook(left, always_call=True),
        )

    @property
    def inside(self) -> bool:
        """Whether a forward of this thread is running; False while a part of the model is called alone."""
        return self._here.own.inside

    @property
    def token(self) -> ForwardToken:
        """What tells the forward that runs, or ran last, from others."""
        return self._here.own.token

    @property
    def generating(self) -> bool:
        """Whether the last one was given a cache, as `generate()` gives it."""
        return self._here.own.generating

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def _on_call(self, _module: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
        if not is_recomputing():
            here = self._here.own
            here.inside, here.token = True, ForwardToken()
            here.generating = any(kwargs.get(name) is not None for name in CACHES)
            self._begun()

    def _on_return(self, _module: nn.Module, _args: tuple, output: object) -> None:
        if not is_recomputing():
            self._here.own.inside = False
            # torch passes None to this hook after an error
            self._ended(output is None and sys.exc_info()[1] is not None)
