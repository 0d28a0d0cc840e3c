"""The attention scores of transformers models, where a module looks its attention function up in the interface.

The lookup gives a function that attends as the one that was found, and over sdpa and over each family's own eager
function reads weights and adds biases for modules that are listened to. Nothing that a model sees is changed: its
configuration names what it named. A module without listeners computes exactly what the found function computes.

Imported by `find_heads` only, and only for models whose modules come from transformers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from headwise.errors import LayoutError, NotFired
from headwise.heads.capture import count_cached, is_partial, list_parameters, name_arguments
from headwise.heads.heads import Site
from headwise.heads.scores.sdpa import list_methods, repeat_groups
from headwise.nn.average_weights import mean_of, mean_weights
from headwise.nn.checkpointing import Request, is_recomputing, resolve_request
from headwise.nn.difference import find_difference
from headwise.nn.hooks import Hook, hold
from headwise.nn.mixing import compute_weights, drop_weights, find_mixer
from headwise.nn.scores import (
    Bias,
    Listeners,
    Observer,
    ScoreCall,
    add_listener,
    clear_empty_rows,
    normalize_scores,
    show_compared,
    sum_masks,
)

LISTENERS = "_headwise_listeners"
# what a module calls where its configuration names an implementation, or none
Attend = Callable[..., tuple[Tensor, Any]]


def connect_scores(site: Site) -> Site:
    """Return the site with its scores reachable, when its module calls the attention interface."""
    if site.scores is not None or not calls_interface(site.module):
        return site
    return replace(site, scores=InterfaceScores)


def calls_interface(module: nn.Module) -> bool:
    """Return whether the code of a module's class looks its attention function up in the interface.

    >>> calls_interface(nn.Linear(2, 2))
    False
    """
    names = ({*method.__code__.co_names} for method in list_methods(type(module)))
    return any({"ALL_ATTENTION_FUNCTIONS", "get_interface"} <= named for named in names)


class InterfaceScores:
    """The scores of a module that calls the attention interface."""

    gives: tuple[str, ...] = ()
    written = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def listen(self, listener: Observer | Bias) -> Callable[[], None]:
        """Attach an observer or a bias to the module, and return what detaches it; flash and flex are refused."""
        listeners, release = _reach(self.module)
        return add_listener(listeners, listener, release)

    def mix(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Have the module attend with its mixer, and return what ends that and what raises where it is passed by."""
        return _reach(self.module)[1], partial(require_reached, self.module)


class InterfaceCall(NamedTuple):
    """A call of the interface: its function and name, the module, and what that gave but for the keys."""

    attend: Attend
    named: str
    module: Any
    query: Tensor
    value: Tensor
    mask: Any
    settings: dict[str, Any]


class AttendedKeys(Tensor):
    """Keys that a cache gives and attends to itself: `attend` takes the place of the function of the interface.

    Nothing is computed with them before that.
    """

    attend: Callable[[InterfaceCall], tuple[Tensor, Any]]

    @classmethod
    def of(cls, keys: Tensor, attend: Callable[[InterfaceCall], tuple[Tensor, Any]]) -> AttendedKeys:
        """Return keys that are attended to by a function."""
        own = keys.as_subclass(cls)
        own.attend = attend
        return own

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Tell sizes and the like; `LayoutError` for what computes."""
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor | tuple | list) and not isinstance(found, torch.Size):
            raise LayoutError(
                "the attention computes with what the cache of a budget returns before it calls the attention "
                "interface of transformers, or never calls that (latent attention, attention written by hand); "
                "generate without the budget."
            )
        return found


class _Reached(Listeners):
    """Listeners of a module, hooks on it, and how many need these."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.holders = 0
        self.hooks = (
            module.register_forward_pre_hook(Hook(module, _record_position), with_kwargs=True),
            module.register_forward_hook(Hook(module, _require_attended)),
        )


def _reach(module: nn.Module) -> tuple[_Reached, Callable[[], None]]:
    """Return the listeners of a module and what ends the need of them; `LayoutError` unless it runs sdpa or eager."""
    named = _read_name(module)
    if named not in REACHED:
        raise LayoutError(
            f"{type(module).__name__} runs the attention implementation {named!r}, where weights and "
            "biases of single heads cannot be reached; call model.set_attn_implementation('sdpa') first."
        )
    listeners = _find_listeners(module)
    if listeners is None:
        listeners = module.__dict__[LISTENERS] = _Reached(module)

    def undo() -> None:
        module.__dict__.pop(LISTENERS, None)
        for hook in listeners.hooks:
            hook.remove()

    return listeners, hold(listeners, undo)


def _find_listeners(module: nn.Module) -> _Reached | None:
    found = module.__dict__.get(LISTENERS)
    # a copy of the module has none
    return found if isinstance(found, _Reached) else None


def _read_name(module: nn.Module) -> str:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) or "eager"


def require_reached(module: nn.Module) -> None:
    """Raise `NotFired` where a module runs an implementation, set since, in which scores are not reached."""
    _require_reached(module, _read_name(module))


def _require_reached(module: nn.Module, named: str) -> None:
    if named not in REACHED:
        raise NotFired(
            f"{type(module).__name__} runs the attention implementation {named!r}, set after hw.bias_heads, hw.Taps, "
            "a penalty or hw.mix_heads was attached to its scores, where these cannot be reached; call "
            "model.set_attn_implementation('sdpa'), or remove() what is attached."
        )


def _record_position(module: nn.Module, args: tuple, kwargs: dict) -> None:
    require_reached(module)
    listeners: _Reached = module.__dict__[LISTENERS]
    running = listeners.running.own
    running.attended = False
    running.cached = count_cached(module, name_arguments(list_parameters(module), args, kwargs))


def _require_attended(module: nn.Module, _args: tuple, _output: object) -> None:
    listeners: _Reached = module.__dict__[LISTENERS]
    needed = listeners.biases or find_mixer(module) or any(observer.active() for observer in listeners.observers)
    if needed and not listeners.running.own.attended and not is_partial():
        raise NotFired(
            f"{type(module).__name__} did not call the attention function that it looks up in the interface of "
            "transformers, at which weights and biases of its heads are reached: it took another way. Call "
            "model.set_attn_implementation('sdpa'), or remove() what is attached."
        )


def _attend_itself(
    found: Attend,
    named: str,
    module: nn.Module,
    query: Tensor,
    key: AttendedKeys,
    value: Tensor,
    attention_mask: Any = None,
    **settings: Any,
) -> tuple[Tensor, Any]:
    return key.attend(InterfaceCall(found, named, module, query, value, attention_mask, settings))


def _attend(found: Attend, named: str, module: nn.Module, *args: Any, **settings: Any) -> Any:
    """Attend with a function of the interface, and with what is listened to, paired or mixed."""
    listeners = _find_listeners(module)
    paired_or_mixed = find_difference(module) is not None or find_mixer(module) is not None
    key = args[1] if len(args) > 1 else settings.get("key")
    if isinstance(key, AttendedKeys):
        _require_reached(module, named)
        if listeners is not None or paired_or_mixed:
            raise LayoutError(
                f"{type(module).__name__} has a bias, taps, or paired or mixed heads, and the cache of a budget "
                "attends without them; remove() them, or generate without the budget."
            )
        return _attend_itself(found, named, module, *args, **settings)
    if listeners is None and not paired_or_mixed and not is_recomputing():
        return found(module, *args, **settings)
    _require_reached(module, named)
    if listeners is not None:
        listeners.running.own.attended = True
        _show_compared(listeners, module, *args, **settings)
    return REACHED[named](found, module, *args, **settings)


def _show_compared(
    listeners: _Reached,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    _value: Tensor,
    mask: Any = None,
    **settings: Any,
) -> None:
    causal = _is_causal(module, mask, query, settings)
    show_compared(listeners.observers, query, key, mask, causal, settings.get("scaling"))


def _attend_over_sdpa(
    stock: Attend, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    if find_difference(module) is not None:
        return _attend_in_pairs(module, query, key, value, attention_mask, explicit=False, **settings)
    answer = _resolve_request(module, query, key)
    capped = settings.get("softcap") is not None or settings.get("s_aux") is not None
    mixer = find_mixer(module)
    if answer.weights or mixer is not None or (answer.mean_weights and capped):
        weights = _compute_weights(module, query, key, value, attention_mask, answer, **settings)
        _notify(module, weights, mean_of(weights) if answer.mean_weights else None)
        if mixer is not None or not answer.beside or not answer.weights:
            return _attend_with(weights, value, mixer, **settings)[0], None
        answer = replace(answer, mean_weights=False)
    if not answer.biases and not answer.mean_weights:
        return stock(module, query, key, value, attention_mask, **settings)
    total = _build_mask(module, query, key, attention_mask, answer, settings)
    if answer.mean_weights:
        _notify(module, None, mean_weights(query, key, total, scale=settings.get("scaling")))
    if not answer.biases:
        return stock(module, query, key, value, attention_mask, **settings)
    assert total is not None  # a bias is always a mask
    mask, empty = clear_empty_rows(total)
    mask = mask.expand(-1, -1, query.shape[2], -1)
    plain = {**settings, "is_causal": False, "position_bias": None}
    output, _ = stock(module, query, key, value, mask, **plain)
    return output.masked_fill(empty.transpose(1, 2), 0.0), None


def attend_explicitly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend as written out, with the sinks `s_aux` of these heads, and not with all that the module holds."""
    weights = _compute_weights(module, query, key, value, attention_mask, Request(), **settings)
    return _attend_with(weights, value, **settings)


def _attend_over_eager(
    stock: Attend, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    if find_difference(module) is not None:
        return _attend_in_pairs(module, query, key, value, attention_mask, explicit=True, **settings)
    answer = _resolve_request(module, query, key)
    mixer = find_mixer(module)
    if answer.biases or mixer is not None:
        weights = _compute_weights(module, query, key, value, attention_mask, answer, **settings)
        _notify(module, weights, mean_of(weights) if answer.mean_weights else None)
        return _attend_with(weights, value, mixer, **settings)
    if answer.weights or answer.mean_weights:
        # what it returns beside the output are its own weights, after dropout
        whole = stock(module, query, key, value, attention_mask, **{**settings, "dropout": 0.0})
        _notify(module, whole[1], mean_of(whole[1]) if answer.mean_weights else None)
        if not settings.get("dropout"):
            return whole
    return stock(module, query, key, value, attention_mask, **settings)


def _attend_in_pairs(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    explicit: bool,
    dropout: float = 0.0,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return O of differential attention with H / 2 heads [B, Q, H / 2, 2e], and if `explicit` its maps.

    Heads are paired as in `pair_decoder_heads`.
    """
    difference: Any = find_difference(module)
    scaling = settings.get("scaling")
    own = [name for name in ("softcap", "s_aux", "position_bias") if settings.get(name) is not None]
    if own or (scaling is not None and not math.isclose(scaling, query.shape[-1] ** -0.5)):
        given = ", ".join(own) or f"scores times {scaling:.6g} instead of {query.shape[-1] ** -0.5:.6g}"
        raise LayoutError(f"{type(module).__name__} attends with {given}, which differential attention does not have.")
    query, key, value = (
        tensor.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3).contiguous() for tensor in (query, key, value)
    )
    key, value = (repeat_groups(tensor, query.shape[1]) for tensor in (key, value))
    answer = _resolve_request(module, query, key)
    mask = _build_mask(module, query, key, attention_mask, answer, settings)
    explicit = explicit or (answer.weights and not answer.beside)
    heads, weights, dropped = difference(query, key, value, mask, dropout=dropout, explicit=explicit)
    if answer.weights or answer.mean_weights:
        query, key = (difference.take_first(difference.split(tensor)) for tensor in (query, key))
        weights = compute_weights(query, key, mask) if weights is None else weights
        _notify(module, weights, mean_of(weights) if answer.mean_weights else None)
    return heads.transpose(1, 2).contiguous(), dropped


def _resolve_request(module: nn.Module, query: Tensor, key: Tensor) -> Request:
    listeners: Listeners | None = _find_listeners(module)
    if listeners is None:
        if not is_recomputing():
            return Request()
        # only its checkpoint knows
        listeners = Listeners()
    call = ScoreCall.of(query, key, listeners.running.own.cached)
    return resolve_request(module, listeners.observers, listeners.biases, call)


def _is_causal(module: nn.Module, mask: Any, query: Tensor, settings: dict[str, Any]) -> bool:
    causal = settings.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return bool(causal) and mask is None and query.shape[2] > 1


def _build_mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, answer: Request, settings: dict
) -> Tensor | None:
    """Return everything that is added to the scores; -inf in a whole row leaves that query without a key."""
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        given = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"{type(mask).__name__}"
        raise LayoutError(f"{type(module).__name__} was given a mask {given}; expected (batch, heads, queries, keys).")
    if settings.get("cache") is not None:
        raise LayoutError(f"{type(module).__name__} runs on a paged cache, where scores of heads cannot be reached.")
    causal = _is_causal(module, mask, query, settings)
    own: Tensor | None = settings.get("position_bias")
    if not answer.biases and (own is not None or mask is None or mask.is_floating_point()) and not causal:
        # as in the stock functions, also for rows that are masked throughout
        if own is None or mask is None:
            return mask if own is None else own
        least = torch.finfo(query.dtype).min
        return torch.where(mask, own, least) if mask.dtype == torch.bool else own + mask
    terms = [*answer.biases, *([] if own is None else [own])] or [query.new_zeros(1, 1, 1, 1)]
    return sum_masks(mask, causal, terms, query.shape[2], key.shape[2], query.dtype)


def _compute_weights(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    answer: Request,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **settings: Any,
) -> Tensor:
    """Return softmax(scale Q K^T + everything added), [B, H, Q, K], of mixed heads where the module has a mixer.

    With attention sinks the softmax has one score more, of no key, and the weights of a query sum to less than 1.
    """
    mask = _build_mask(module, query, key, attention_mask, answer, settings)
    scores = (query @ repeat_groups(key, query.shape[1]).mT) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    mixer = find_mixer(module)
    scores = scores if mixer is None else mixer(scores, "logits")
    if mask is not None:
        scores = scores + mask
    sinks: Tensor | None = settings.get("s_aux")
    if sinks is not None:
        own = sinks.view(1, -1, 1, 1).to(scores.dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, own], dim=-1)
    weights = normalize_scores(scores, torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return weights if sinks is None else weights[..., :-1]


def _attend_with(
    weights: Tensor, value: Tensor, mixer: nn.Module | None = None, *, dropout: float = 0.0, **_settings: Any
) -> tuple[Tensor, Tensor]:
    """Return O = dropout(A) V and dropout(A), with A mixed where there is a mixer."""
    dropped = drop_weights(weights, dropout, mixer)
    return (dropped @ repeat_groups(value, weights.shape[1])).transpose(1, 2).contiguous(), dropped


def _notify(module: nn.Module, weights: Tensor | None, mean: Tensor | None) -> None:
    listeners = _find_listeners(module)
    if listeners is not None and not is_recomputing():
        for observer in listeners.observers:
            observer.notify(None, weights, None, mean)


# The implementations in which scores are reached.
REACHED = {"sdpa": _attend_over_sdpa, "eager": _attend_over_eager}

# as it is, where this file is run again
_look_up = inspect.unwrap(AttentionInterface.get_interface)


@wraps(_look_up)
def _get_interface(interface: AttentionInterface, attn_implementation: str | None, default: Attend) -> Attend:
    found = _look_up(interface, attn_implementation, default)
    return partial(_attend, found, attn_implementation or "eager")


_interface: Any = AttentionInterface
_interface.get_interface = _get_interface
