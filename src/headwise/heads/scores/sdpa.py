"""The attention scores of modules that call torch's `scaled_dot_product_attention` or a softmax themselves.

While something listens to such a module, its forward runs inside a `TorchFunctionMode`, which sees every function of
torch that the module calls, however it was imported, and takes over these. Modes belong to a thread, so that other
models and threads run as ever. A module without listeners runs its own forward.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.errors import LayoutError, NotFired
from headwise.heads.capture import count_cached, list_parameters, name_arguments
from headwise.heads.heads import Site
from headwise.heads.scores.written_softmax import (
    SOFTMAXES,
    FollowedWeights,
    Witness,
    arrange_heads,
    hides_later_keys,
    is_provable,
    normalize_biased,
    prove_weights,
    read_settings,
    watch,
)
from headwise.nn.average_weights import mean_of, mean_weights
from headwise.nn.checkpointing import Request, is_recomputing, outside_graphs, resolve_request
from headwise.nn.hooks import Hook, hold, run_uncompiled
from headwise.nn.mixing import drop_weights, find_mixer
from headwise.nn.scores import (
    Bias,
    Listeners,
    Observer,
    ScoreCall,
    add_listener,
    always,
    clear_empty_rows,
    normalize_scores,
    show_compared,
    sum_masks,
)

CALLED = "scaled_dot_product_attention"
WRITTEN = "softmax"
REACHED = {CALLED: (F.scaled_dot_product_attention,), WRITTEN: SOFTMAXES}
# How far a call is looked for: a method of the attention, a function that it calls, and one that this calls.
DEPTH = 2


def connect_called_scores(site: Site) -> Site:
    """Return the site with its scores reachable, when the code of its module calls one of the functions."""
    stacked = any(head_slice.stacked for head_slice in site.slices)
    if site.scores is not None or stacked:
        return site
    called = list_called(site.module)
    if called == {WRITTEN} and not is_provable(site):
        return site
    return replace(site, scores=partial(CalledScores, site, called)) if called else site


def list_called(module: nn.Module) -> frozenset[str]:
    """Return which of torch's `scaled_dot_product_attention` and `softmax` a module and the functions it calls name.

    >>> sorted(list_called(nn.Sequential(nn.Softmax(-1)))), sorted(list_called(nn.Linear(2, 2)))
    (['softmax'], [])
    """
    seen: set[CodeType] = set()
    found = {WRITTEN for part in module.modules() if isinstance(part, nn.Softmax)}
    for part in module.modules():
        held = (getattr(value, "func", value) for value in vars(part).values())
        for function in (*list_methods(type(part)), *(one for one in held if isinstance(one, FunctionType))):
            found |= _list_mentioned(function, seen, DEPTH)
    return frozenset(found)


def list_methods(kind: type) -> Iterator[FunctionType]:
    """Yield the methods of a class that may run: inherited ones unless they are replaced by one without super()."""
    replaced: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Module or base is object or base.__module__.startswith("torch.nn."):
            continue
        for name, member in vars(base).items():
            function = inspect.unwrap(member) if callable(member) else None
            if name in replaced or not isinstance(function, FunctionType):
                continue
            yield function
            if "__class__" not in function.__code__.co_freevars:
                replaced.add(name)


def _list_mentioned(function: FunctionType, seen: set[CodeType], depth: int) -> set[str]:
    codes = [function.__code__]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        if code in seen:
            continue
        seen.add(code)
        names |= set(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    around: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing is in it yet
            around[name] = cell.cell_contents
    names |= {*around}
    named = [*(function.__globals__.get(name) for name in names), *around.values()]
    files = [one for one in named if isinstance(one, ModuleType) and one.__name__.split(".")[0] != "torch"]
    named += [getattr(file, name, None) for file in files for name in names]
    found = {
        called
        for called, known in REACHED.items()
        if called in names or any(one is two for one in named for two in known)
    }
    # one of them is taken from the mapping of transformers
    found |= set(REACHED) if "ALL_ATTENTION_FUNCTIONS" in names else set()
    for other in named if depth > 0 else ():
        if isinstance(other, FunctionType) and not other.__module__.startswith("torch."):
            found |= _list_mentioned(other, seen, depth - 1)
    return found


class CalledScores:
    """The scores of a module that calls `scaled_dot_product_attention`, or a softmax, itself."""

    def __init__(self, site: Site, called: frozenset[str], module: nn.Module) -> None:
        self.site, self.module = site, module
        # observers get the values and the outputs of the heads from the one function, too
        self.gives: tuple[str, ...] = ("values", "outputs") if CALLED in called else ()
        self.written, self.writes = CALLED not in called, WRITTEN in called

    def listen(self, listener: Observer | Bias) -> Callable[[], None]:
        """Attach an observer or a bias to the module, and return what detaches it."""
        forward, release = _intercept(self.module, self.site, self.writes)
        # refuses replicas of the module, which would run the original's forward
        handle = self.module.register_forward_pre_hook(Hook(self.module, lambda *_: None))
        return add_listener(forward.listeners, listener, handle.remove, release)

    def mix(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Have the module attend with its mixer, and return what ends that and a check that does nothing."""
        # the call itself is checked: `InterceptedForward` refuses a forward without attention
        return _intercept(self.module, self.site, self.writes)[1], always


class InterceptedForward:
    """The forward of a module whose calls of attention are taken over; a copy of the module has the plain one.

    Attributes:
        previous: What its `forward` was, where it had one of its own (Accelerate gives it one).
        writes: Whether its code names a softmax.
        holders: How many need it.
        proven: Which axes of a softmax are shown to be sequences (0), heads (1) and queries (2); None before.
        causal: Whether the latest scores of a softmax with a bias hid later keys; read from scores before compiling.
    """

    def __init__(self, module: nn.Module, site: Site, writes: bool) -> None:
        self.module, self.site, self.writes = module, site, writes
        self.previous: Callable[..., Any] | None = module.__dict__.get("forward")
        self.names, self.__wrapped__ = list_parameters(module), module.forward
        self.listeners, self.holders = Listeners(), 0
        self.proven: frozenset[int] | None = None
        self.causal = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, and take over its call of attention or its softmax.

        Raises:
            NotFired: It made no such call.
            LayoutError: It made several, or its softmax is not proven to normalize its heads' scores.
        """
        mixed, again = find_mixer(self.module) is not None, is_recomputing()
        if not self.listeners and not mixed and not again:
            return self.__wrapped__(*args, **kwargs)
        running = _Running(count_cached(self.module, name_arguments(self.names, args, kwargs)))
        listening = self.listeners.biases or mixed or any(observer.active() for observer in self.listeners.observers)
        listening = listening and not again
        unproven = self.writes and (self.proven is None or len(self.proven) < 3)
        watched = listening and unproven and not torch.compiler.is_compiling()
        with watch(self.site) if watched else nullcontext() as witness, _TakenOver(self, running):
            if watched:
                output = _call_uncompiled(self.__wrapped__, *args, **kwargs)
            else:
                output = self.__wrapped__(*args, **kwargs)
        if running.calls == 0 and running.softmaxes == 0 and listening:
            others = f" (but over {', '.join(map(str, running.others[:4]))})" if running.others else ""
            raise NotFired(
                f"{self._label()}: its forward did not call {CALLED}, nor a softmax over the last axis of (batch, "
                f"{self.site.num_heads} heads, queries, keys){others}, at which weights and biases of "
                "its heads are reached; it took another way (a flex or flash kernel, a switch, other axes). Have it "
                "call that function, or remove() what is attached."
            )
        if running.softmaxes and listening:
            self._finish(running, witness, output)
        return output

    def _label(self) -> str:
        return f"{self.site.label} ({type(self.module).__name__})"

    def _finish(self, running: _Running, witness: Witness | None, output: Any) -> None:
        """Prove the weights of a softmax that was written out, and tell observers."""
        followed = running.followed
        if running.softmaxes > 1 or running.calls:
            if running.calls and not running.changed:
                return  # the one that attends is read
            raise LayoutError(
                f"{self._label()} computes {running.softmaxes + running.calls} softmaxes of its {self.site.num_heads} "
                "heads in one forward; which of them its heads attend with is unknown, so their weights and biases "
                "cannot be reached."
            )
        if followed is None:
            return
        if followed.cut and self.listeners.biases:
            raise LayoutError(
                f"{self._label()} has a score of no token in its softmax, such as a learned sink, so that biases of "
                "its heads cannot be reached; read their weights: Taps(heads, weights=True)."
            )
        weights = arrange_heads(followed.weights, self.site)
        assert weights is not None  # of the same axes as the scores
        self._prove(followed, witness, output, {axis for axis in range(3) if weights.shape[axis] > 1})
        mean = mean_of(weights) if running.mean else None
        for observer in self.listeners.observers:
            observer.notify(None, weights, None, mean)

    def _prove(self, followed: FollowedWeights, witness: Witness | None, output: Any, needed: set[int]) -> None:
        if followed.spoiled:
            raise LayoutError(
                f"{self._label()} drops its attention weights in place, so that they cannot be read; have it use "
                "dropout with inplace=False."
            )
        if self.proven is not None and needed <= self.proven:
            return
        if witness is None:
            raise NotFired(
                f"{self._label()} writes its softmax out, and that it is the softmax of its heads is shown by a "
                "forward that is not compiled: run one first while this is attached, inside "
                "torch.compiler.set_stance('force_eager')."
            )
        witness.take_outputs(self.site, output)
        with torch.no_grad():
            self.proven = (self.proven or frozenset()) | prove_weights(self.site, followed.used, witness)

    def __reduce__(self) -> tuple:
        # for copy and pickle; the module is among what was copied before
        return _restore_forward, (self.module, self.previous)


# what is watched is not compiled in parts either
@outside_graphs
def _call_uncompiled(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _restore_forward(module: nn.Module, previous: Callable[..., Any] | None) -> Callable[..., Any]:
    return type(module).forward.__get__(module) if previous is None else previous


def _intercept(module: nn.Module, site: Site, writes: bool) -> tuple[InterceptedForward, Callable[[], None]]:
    """Give a module an intercepted forward, or find the one it has; return it and what ends that."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, InterceptedForward):
        forward = module.__dict__["forward"] = InterceptedForward(module, site, writes)

    def undo() -> None:
        # what was wrapped around it since keeps calling it, and it does nothing without listeners
        if module.__dict__.get("forward") is forward:
            del module.__dict__["forward"]
            if forward.previous is not None:
                module.__dict__["forward"] = forward.previous

    return forward, hold(forward, undo)


@dataclass
class _Running:
    """One forward of a module so far; its own object, as torch.compile forgets what a mode holds when it is left.

    Attributes:
        cached: How many tokens were in the cache it was given; None without a cache.
        calls: Number of calls of attention.
        softmaxes: Number of softmaxes that may normalize the heads' scores.
        others: Shapes of other softmaxes.
        mean: Whether the mean of its weights over heads was asked for.
        followed: Its weights, where these were asked for.
        changed: Whether a bias or mixer has changed them.
    """

    cached: int | None
    calls: int = 0
    softmaxes: int = 0
    others: tuple[tuple[int, ...], ...] = ()
    mean: bool = False
    followed: FollowedWeights | None = None
    changed: bool = False


class _TakenOver(TorchFunctionMode):
    """Takes over the call of attention, or the softmax, in one forward of a module."""

    def __init__(self, forward: InterceptedForward, running: _Running) -> None:
        super().__init__()
        self.forward, self.running = forward, running

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercept attention and softmaxes; run every other torch function unchanged."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.running.calls += 1
            return self._attend(*args, **kwargs)
        if any(func is softmax for softmax in SOFTMAXES):
            return _normalize(self.forward, self.running, func, args, kwargs)
        if func is Tensor.unflatten:
            # torch.compile traces a mode's functions, and cannot trace the super() in this one
            func = torch.unflatten
        output = func(*args, **kwargs)
        if self.running.followed is not None:
            self.running.followed.follow(func, args, kwargs, output)
        return output

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        module, site = self.forward.module, self.forward.site
        if self.running.calls > 1:
            raise LayoutError(
                f"{site.label} ({type(module).__name__}) calls {CALLED} several times in one forward; in which of them "
                "its heads are is unknown, so their weights and biases cannot be reached."
            )
        _require_heads(site, module, query, key)
        unbatched = query.dim() == 3
        query, key, value = (tensor.unsqueeze(0) if unbatched else tensor for tensor in (query, key, value))
        output = _attend(self.forward, self.running.cached, query, key, value, *args, **kwargs)
        return output.squeeze(0) if unbatched else output


run_uncompiled(_TakenOver.__torch_function__)
run_uncompiled(InterceptedForward._finish)


def _require_heads(site: Site, module: nn.Module, query: Tensor, key: Tensor) -> None:
    """Raise `LayoutError` unless these are queries and keys of the site's heads, of a batch or one sequence."""
    size = site.slices[0].head_size
    fits = not query.is_nested and query.dim() == key.dim() and query.dim() in (3, 4) and query.shape[-1] == size
    if fits:
        heads, groups = query.shape[-3], key.shape[-3]
        fits = site.count_all(heads, site.num_heads) == site.num_heads and (
            site.count_all(groups, site.key_value_heads) == site.key_value_heads or groups == heads
        )
    if not fits:
        queries, keys = (
            "in a nested tensor" if tensor.is_nested else f"of shape {tuple(tensor.shape)}" for tensor in (query, key)
        )
        raise LayoutError(
            f"{site.label} ({type(module).__name__}) calls {CALLED} with queries {queries} and keys "
            f"{keys}; expected (batch, {site.num_heads} heads, tokens, {size} features), from which weights "
            "and biases of heads can be read."
        )


def _resolve_request(forward: InterceptedForward, call: ScoreCall) -> Request:
    def keep_forward(frame: Any) -> None:
        # the recomputation must find it although the listener may be gone by then
        _, release = _intercept(forward.module, forward.site, forward.writes)
        weakref.finalize(frame, release).atexit = False

    listeners = forward.listeners
    return resolve_request(forward.module, listeners.observers, listeners.biases, call, keep_forward)


def _normalize(
    forward: InterceptedForward, running: _Running, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Tensor:
    """Compute a softmax as torch does; add biases to scores that may be the heads', and keep the weights."""
    site = forward.site
    scores, axis, dtype = read_settings(args, kwargs)
    arranged = arrange_heads(scores, site) if scores is not None and axis == -1 else None
    if scores is None or arranged is None or site.divided:
        if scores is not None:
            running.others = (*running.others, tuple(scores.shape))
        return func(*args, **kwargs)
    running.softmaxes += 1
    if running.softmaxes > 1 or running.calls:
        return func(*args, **kwargs)
    causal = forward.causal
    if forward.listeners.biases and not torch.compiler.is_compiling():
        causal = forward.causal = hides_later_keys(arranged)
    # [B, H, Q, K] and its transpose, of the sizes of queries and keys
    call = ScoreCall.of(arranged, arranged.mT, running.cached, causal)
    answer = _resolve_request(forward, call)
    mixer: Any = find_mixer(forward.module)
    if getattr(mixer, "logits", None) is not None or any(one.edit is not None for one in forward.listeners.observers):
        what = "scores are mixed before their masks" if mixer is not None else "outputs of heads are changed"
        raise LayoutError(
            f"{site.label} ({type(forward.module).__name__}) writes its softmax out, and {what} where a module calls "
            f"{CALLED}; have it call that function{', or pass logits=False' if mixer is not None else ''}."
        )
    if answer.biases:
        weights = normalize_biased(arranged, answer.biases, dtype).reshape(scores.shape)
    else:
        weights = func(*args, **kwargs)
    given = weights
    if mixer is not None:
        mixed = arrange_heads(weights, site)
        given = mixer(mixed, "weights").reshape(scores.shape)
    if answer.biases or mixer is not None or answer.weights or answer.mean_weights:
        running.followed, running.mean = FollowedWeights(weights, given), answer.mean_weights
        running.changed = bool(answer.biases) or mixer is not None
    return given


def _attend(
    forward: InterceptedForward,
    cached: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as torch's function does, [B, H, Q, e], with biases, and tell observers what they asked for."""
    settings: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    listeners = forward.listeners
    call = ScoreCall.of(query, key, cached, is_causal)
    show_compared(listeners.observers, query, key, attn_mask, is_causal, scale)
    answer = _resolve_request(forward, call)
    total = mask = attn_mask
    causal, empty = is_causal, None
    if answer.biases:
        total = sum_masks(attn_mask, is_causal, answer.biases, call.queries, call.keys, query.dtype)
        mask, empty = clear_empty_rows(total)
        mask, causal = mask.expand(*mask.shape[:-2], call.queries, -1), False
    weights, mixer = None, find_mixer(forward.module)
    if answer.weights or mixer is not None:
        weights = _compute_weights(query, key, total, causal, scale, mixer)
    if weights is None or (answer.beside and mixer is None):
        output = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, **settings)
        output = output if empty is None else output.masked_fill(empty, 0.0)
    else:
        output = drop_weights(weights, dropout_p, mixer) @ repeat_groups(value, query.shape[1])
    for observer in listeners.observers:
        output = output if observer.edit is None else observer.edit(output.transpose(1, 2)).transpose(1, 2)
    mean = None
    if answer.mean_weights:
        mean = mean_weights(query, key, total, scale=scale, causal=causal) if weights is None else mean_of(weights)
    if not is_recomputing():
        _notify(forward, value, weights, mean, output)
    return output


def _compute_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None, mixer: nn.Module | None
) -> Tensor:
    """Return softmax(scale Q K^T + mask), [B, H, Q, K], with the heads of the product mixed where there is a mixer."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ repeat_groups(key, query.shape[1]).mT
    scores = scores if mixer is None else mixer(scores, "logits")
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return normalize_scores(scores, torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)


def repeat_groups(tensor: Tensor, heads: int) -> Tensor:
    """Return keys or values of key/value heads [B, G, K, e] for each of H query heads.

    >>> repeat_groups(torch.tensor([[[[1.0]], [[2.0]]]]), 4).flatten()
    tensor([1., 1., 2., 2.])
    """
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def _notify(
    forward: InterceptedForward, value: Tensor, weights: Tensor | None, mean: Tensor | None, output: Tensor
) -> None:
    """Tell observers what was computed; values that were repeated for each query head are given once."""
    shared = value.shape[1] // max(1, forward.site.key_value_heads)
    if shared > 1:
        value = value[:, : forward.site.key_value_heads] if forward.site.tiled else value[:, ::shared]
    for observer in forward.listeners.observers:
        observer.notify(value.transpose(1, 2), weights, None, mean, output.transpose(1, 2))
