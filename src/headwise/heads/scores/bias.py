"""A separate bias on the attention scores of each head of an existing model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.errors import MaskError, NotFired
from headwise.heads.heads import Heads, Site, require_heads
from headwise.heads.method import Method
from headwise.nn.checkpointing import is_recomputing
from headwise.nn.hooks import Handle
from headwise.nn.multihead import walk_once
from headwise.nn.scores import ScoreCall

BiasFunction = Callable[[Site, ScoreCall], Tensor | None]


@dataclass(eq=False)
class _Count:
    """A site and its calls that had a bias.

    Its own object, so that layers that torch.compile compiles one by one share a graph.
    """

    site: Site
    calls: int = 0


class HeadBias(Handle):
    """A bias on the scores of heads, until `remove()` or the end of a `with` block; returned by `bias_heads`.

    A forward belongs to the bias it ran with: when activation checkpointing computes it again in the backward pass, it
    has that bias again, also after `remove()` or under another one.

    Attributes:
        heads: The sites.
    """

    def __init__(self, heads: Heads, bias: Tensor | BiasFunction) -> None:
        require_heads(heads)
        if isinstance(bias, Tensor):
            _check_values(bias)
        elif not callable(bias):
            raise MaskError(f"bias is a {type(bias).__name__}; expected a tensor, or a function of (site, call).")
        super().__init__()
        self.heads, self.bias = heads, bias
        # a given tensor on another device, and its version there; not where it is trained
        self._moved: dict[torch.device, tuple[int, Tensor]] = {}
        self._counts = [_Count(site) for site in heads.sites]
        with self._attaching(), walk_once(heads.model):
            for count in self._counts:
                scores = count.site.reach_scores(self._removers.append)
                self._removers.append(scores.listen(partial(self._compute, count)))

    @property
    def calls(self) -> dict[str, int]:
        """Calls of each site that had a bias, by its name; 1 where it had one in a compiled model."""
        return {count.site.name: count.calls for count in self._counts}

    def check(self) -> None:
        """Raise `NotFired` unless every site had a bias in some call."""
        silent = [name or "(model)" for name, calls in self.calls.items() if calls == 0]
        if silent:
            raise NotFired(
                f"the bias was added in none of the calls of {len(silent)} of {len(self.heads)} sites: "
                f"{', '.join(silent[:6])}. Run a forward pass inside the block; if you did, the call bypassed the "
                "module, or the function gave None for it (select the sites it is for)."
            )

    def _describe(self) -> str:
        what = f"tensor {tuple(self.bias.shape)}" if isinstance(self.bias, Tensor) else "function"
        return f"{what} on {len(self.heads)} sites"

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "bias": None,
            "_moved": {},
            "_counts": [_Count(site) for site in self.heads.sites],
        }

    def _move(self, bias: Tensor, device: torch.device) -> Tensor:
        """Return the bias on a device: copied there once, and again where it was changed in place."""
        # a tensor of inference mode cannot be changed, and does not tell whether it was
        kept = bias.device == device or bias.requires_grad or torch.compiler.is_compiling()
        if kept or bias.is_inference():
            return bias.to(device)
        moved = self._moved.get(device)
        if moved is None or moved[0] != bias._version:
            moved = self._moved[device] = (bias._version, bias.to(device))
        return moved[1]

    def _compute(self, count: _Count, call: ScoreCall) -> Tensor | None:
        """Return the bias of one call of one site, broadcastable to [B, H, Q, K]; None where it has none."""
        site = count.site
        if call.cached and site.kind != "cross" and call.first + call.queries > call.keys:
            # a window of keys is cached: these are the newest
            call = replace(call, first_key=call.first + call.queries - call.keys)
        computed, call = call.heads, replace(call, heads=site.count_all(call.heads, site.num_heads))
        if isinstance(self.bias, Tensor):
            found = _select_part(self._move(self.bias, call.device), call)
        else:
            found = self.bias(site, call)
            if found is None:
                return None
            if not isinstance(found, Tensor):
                raise MaskError(f"{site.label}: the bias function gave a {type(found).__name__}; expected a tensor.")
        found = _repeat_for_beams(found, call)
        sizes = ((1, call.batch), (1, call.heads), (1, call.queries), (call.keys,))
        if found.dim() != 4 or any(size not in fits for size, fits in zip(found.shape, sizes, strict=True)):
            raise MaskError(
                f"{site.label}: the bias has shape {tuple(found.shape)}; expected ({call.batch} or 1, {call.heads} or "
                f"1, {call.queries} or 1, {call.keys}): batch, heads, queries, keys. "
                "Where lengths change from call to call, as in generate(), give a function of (site, call)."
            )
        _require_floating(found)
        if torch.compiler.is_compiling():
            # a number that grows would recompile at every call
            count.calls = 1
        elif not is_recomputing():
            count.calls += 1
        return site.select_own_heads(found, 1, computed).to(call.device)


@dataclass(frozen=True, eq=False)
class BiasHeads(Method):
    """A bias on the scores of heads: `bias_heads`, as a value.

    Attributes:
        bias: As for `bias_heads`.

    Example:
        >>> BiasHeads(torch.zeros(1, 2, 1, 5), layers=(0,)).bias.shape
        torch.Size([1, 2, 1, 5])
    """

    bias: Tensor | BiasFunction

    def attach(self, heads: Heads) -> HeadBias:
        """Add the bias to the scores of the selected heads; errors as of `bias_heads`."""
        return HeadBias(self.select(heads), self.bias)


def bias_heads(heads: Heads, bias: Tensor | BiasFunction) -> HeadBias:
    """Add a bias to the attention scores of each head; returns a handle that removes it.

    A_h = softmax(Q_h K_h^T / sqrt(e) + mask + bias_h). What the model masks stays masked: a bias of 0 changes nothing,
    causality and padding included. A query whose mask and bias leave it no key has A_h = 0 and O_h = 0.

    Args:
        heads: The sites. Their scores must be reached: torch's multi-head attention, headwise's, or a module that calls
            torch's `scaled_dot_product_attention`, a softmax or the attention interface of transformers.
        bias: Additive, [B or 1, H or 1, Q or 1, K], floating; -inf forbids. Or a function (site, call) -> such a tensor
            or None, where `call` has batch, heads, queries, keys, `query_positions`, dtype and device. With a cache,
            the rows and columns of this call are taken from a tensor made for the whole length. Without gradients, a
            bias of B sequences is repeated n times in a row for B * n, the order of beams and windows.

    Returns:
        The handle, also a context manager; on leaving the block it raises `NotFired` for a site that never had a bias.

    Raises:
        MaskError: The bias is boolean, holds NaN or inf, or forbids all keys to a query; in a call, it does not fit.
        LayoutError: The scores of a site are not reached. Nothing is attached then.

    Example:
        >>> import headwise as hw
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> bias = torch.zeros(1, 2, 1, 5)
        >>> bias[:, 1, :, 1:] = -torch.inf  # head 1 sees the first token only
        >>> x = torch.randn(3, 5, 8)
        >>> with bias_heads(hw.find_heads(model), bias) as handle:
        ...     _ = model(x)
        >>> handle.calls
        {'self_attn': 1}
    """
    return HeadBias(heads, bias)


def _check_values(bias: Tensor) -> None:
    _require_floating(bias)
    if bias.dim() != 4:
        raise MaskError(
            f"the bias has shape {tuple(bias.shape)}; expected four axes: (batch or 1, heads or 1, queries or 1, keys)."
        )
    with torch.no_grad():
        if bool((bias.isnan() | (bias == torch.inf)).any()):
            raise MaskError(
                "the bias holds NaN or +inf; expected finite numbers, and -inf where attention is forbidden."
            )
        empty = (bias == -torch.inf).all(-1)
        if bool(empty.any()):
            first = tuple(int(index) for index in empty.nonzero()[0])
            raise MaskError(
                f"the bias is -inf for every key at (batch, head, query) {first}; leave that query at least one key, "
                "or the bias 0 there."
            )


def _require_floating(bias: Tensor) -> None:
    if not bias.is_floating_point():
        raise MaskError(
            f"the bias has dtype {bias.dtype}; expected an additive floating-point bias: for a mask that is True where "
            "attention is allowed, torch.where(mask, 0.0, -torch.inf)."
        )


def _select_part(bias: Tensor, call: ScoreCall) -> Tensor:
    """Return the rows and columns of this call of a tensor made for the whole length, where there is a cache."""
    if not call.cached:
        return bias
    queries, keys = bias.shape[2], bias.shape[3]
    if queries > call.queries and call.first + call.queries <= queries:
        bias = bias[:, :, call.first : call.first + call.queries]
    if keys > call.keys and call.first_key + call.keys <= keys:
        bias = bias[..., call.first_key : call.first_key + call.keys]
    return bias


def _repeat_for_beams(bias: Tensor, call: ScoreCall) -> Tensor:
    batch = bias.shape[0]
    if batch in (0, 1, call.batch) or call.batch % batch or torch.is_grad_enabled():
        return bias
    return bias.repeat_interleave(call.batch // batch, dim=0)
