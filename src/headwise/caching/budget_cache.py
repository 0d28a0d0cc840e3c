"""A cache of transformers in which some key/value heads keep all positions, and the others the first and the last.

A query sees a key of a streaming head where the model's own mask lets it, and the key is one of the first `sink` real
tokens of its row or of the last `window` up to the query. Padding is no token: a row computes what it computes alone.

The cache returns keys that attend to themselves (`AttendedKeys`), as only the attention is given the mask: full and
streaming heads have different numbers of keys, and are attended to apart. Imported where a budget is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from headwise.errors import LayoutError, SettingError
from headwise.heads.scores.huggingface import Attend, AttendedKeys, InterfaceCall, attend_explicitly

# Queries of a prompt that streaming heads attend with at a time, at least.
BLOCK = 64


def list_windows(config: Any) -> list[int | None]:
    """Return the window of each layer of a model, None where it attends to all positions.

    Raises:
        LayoutError: A layer keeps something else than keys and values.
    """
    windows: list[int | None] = []
    for number, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise LayoutError(
                f"layer {number} of the model keeps a {type(layer).__name__} in its cache; expected keys and values of "
                "its own for each position (linear attention, indexed and shared keys have none). Generate without a "
                "budget."
            )
        windows.append(getattr(layer, "sliding_window", None))
    return windows


def see_near(query: Tensor, key: Tensor, sink: int, window: int) -> Tensor:
    """Return whether queries see keys [B, Q, K] in a streaming head, given the numbers of their tokens [B, Q], [B, K].

    Tokens are counted from 0 in each row; a key below 0 is none.
    """
    query, key = query[:, :, None], key[:, None]
    return (key >= 0) & ((key < sink) | (query - key < window))


def narrow(mask: Tensor | None, seen: Tensor, *, additive: bool) -> Tensor:
    """Return a mask [B, 1, Q, K] of the interface that also forbids what is not `seen` [B, Q, K]."""
    if mask is None:
        mask = torch.zeros_like(seen, dtype=torch.float32) if additive else torch.ones_like(seen)
        mask = mask[:, None]
    if mask.dtype == torch.bool:
        return mask & seen[:, None]
    return mask.masked_fill(~seen[:, None], torch.finfo(mask.dtype).min)


class BudgetLayer(CacheLayerMixin):
    """Keys and values of one layer; `full` are the heads that keep all positions that the model's own window keeps."""

    is_croppable = True

    def __init__(self, heads: int, full: Sequence[int], sink: int, window: int, sliding: int | None) -> None:
        super().__init__()
        self.heads, self.full = heads, tuple(full)
        self.streaming = tuple(head for head in range(heads) if head not in full)
        self.sink, self.window, self.sliding = sink, window, sliding
        # transformers makes one mask for all layers that slide
        self.is_sliding = sliding is not None
        self.record_past = False
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self.is_initialized, self.seen, self.trimmed = False, 0, 0
        empty = torch.empty(0)
        self.full_keys = self.full_values = self.near_keys = self.near_values = empty
        # of the keys that streaming heads keep: numbers among the real tokens of the row, -1 for none, and columns,
        # [B, C], or [1, C] where all rows are alike; and the number of real tokens, [B] or [1]
        self.tokens = self.columns = self.counts = empty

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Begin with no keys."""
        self.is_initialized, self.device, self.dtype = True, key_states.device, key_states.dtype
        self.chosen = [
            torch.tensor(heads, dtype=torch.long, device=self.device) for heads in (self.full, self.streaming)
        ]
        parts = [states[:, heads, :0] for heads in self.chosen for states in (key_states, value_states)]
        self.full_keys, self.full_values, self.near_keys, self.near_values = parts
        none = torch.empty(1, 0, dtype=torch.long, device=key_states.device)
        self.tokens, self.columns, self.counts = none, none, none.new_zeros(1)

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_settings: Any) -> tuple[Tensor, Tensor]:
        """Return keys that attend themselves; they are kept when they have."""
        require_heads(key_states, self.heads)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return AttendedKeys.of(key_states, partial(self._attend, key_states, value_states)), value_states

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.seen

    def get_max_length(self) -> int:
        """Return -1: it has none."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that the model makes a mask for, and the column of the first."""
        first = 0 if self.sliding is None else max(self.seen - self.sliding + 1, 0)
        return self.seen + query_length - first, first

    def activate_past_recording(self) -> None:
        """Keep all that comes from here on until the next `crop`."""
        self.record_past = True

    def reset(self) -> None:
        """Forget all tokens."""
        self.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, -n for n of them, and what is no longer needed.

        Raises:
            SettingError: The number is above 0, or streaming heads have dropped what they would see again.
        """
        gone = -tokens_to_remove
        if gone < 0 or gone > self.seen:
            raise SettingError(f"crop was given {tokens_to_remove}; expected -n for n of the {self.seen} tokens, or 0.")
        left = self.seen - gone
        if left < self.trimmed:
            raise SettingError(
                f"crop({tokens_to_remove}) would need tokens that streaming heads dropped; expected "
                "activate_past_recording() of the cache before the tokens that may be removed."
            )
        if not self.is_initialized:
            return
        self.seen = left
        removed = self.columns >= left
        self.counts = self.counts - (removed & (self.tokens >= 0)).sum(1)
        self.tokens = self.tokens.masked_fill(removed, -1)
        if gone:
            self.full_keys, self.full_values = self.full_keys[:, :, :-gone], self.full_values[:, :, :-gone]
        self._trim_full()
        self._trim_near(crop=True)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take other rows, as beams do."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows of the batch."""
        self._map_rows(lambda rows: rows[indices.to(rows.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._map_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def count_bytes(self) -> int:
        """Return the bytes of everything it keeps."""
        held = (
            self.full_keys,
            self.full_values,
            self.near_keys,
            self.near_values,
            self.tokens,
            self.columns,
            self.counts,
        )
        return sum(one.untyped_storage().nbytes() for one in held)

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        alike = self.tokens.shape[0] == 1
        for name in (
            "full_keys",
            "full_values",
            "near_keys",
            "near_values",
            *(() if alike else ("tokens", "columns", "counts")),
        ):
            setattr(self, name, change(getattr(self, name)))

    def _attend(self, keys: Tensor, values: Tensor, call: InterfaceCall) -> tuple[Tensor, None]:
        """Attend with full and with streaming heads, and keep the keys."""
        queries = call.query.shape[2]
        length, first = self.get_mask_sizes(queries)
        mask = require_mask(call, values, length)
        additive = call.named == "eager"
        runs = (partial(self._attend_full, mask, first), partial(self._attend_near, mask, first, additive))
        output = attend_apart(call, keys, values, self.chosen, runs)
        self.seen += queries
        return output, None

    def _attend_full(
        self, mask: Tensor | None, first: int, call: Attend, query: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        self.full_keys, self.full_values = (
            torch.cat([self.full_keys, keys], 2),
            torch.cat([self.full_values, values], 2),
        )
        length = self.seen + query.shape[2] - first
        output, _ = call(query, self.full_keys[:, :, -length:], self.full_values[:, :, -length:], mask)
        if not self.record_past:
            self._trim_full(query.shape[2])
        return output

    def _attend_near(
        self, mask: Tensor | None, first: int, additive: bool, call: Attend, query: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attend block by block, as a long prompt needs no score of a key that no query of a block sees."""
        outputs, size = [], max(self.sink + self.window, BLOCK)
        for start in range(0, query.shape[2], size):
            part = slice(start, min(start + size, query.shape[2]))
            rows = None if mask is None else mask[:, :, part]
            seen = self.seen + start
            self._append(keys[:, :, part], values[:, :, part], rows, seen, first)
            outputs.append(self._attend_block(call, additive, query[:, :, part], rows, first))
            if not self.record_past:
                self._trim_near(seen + part.stop - start)
        return torch.cat(outputs, 1)

    def _append(self, keys: Tensor, values: Tensor, mask: Tensor | None, seen: int, first: int) -> None:
        """Keep more keys; a token is real where it sees itself."""
        self.near_keys, self.near_values = (
            torch.cat([self.near_keys, keys], 2),
            torch.cat([self.near_values, values], 2),
        )
        columns = torch.arange(seen, seen + keys.shape[2], device=keys.device)[None]
        if mask is None:
            real = torch.ones_like(columns, dtype=torch.bool)
        else:
            places = (columns - first)[:, :, None].expand(mask.shape[0], -1, -1)
            real = find_allowed(mask[:, 0]).gather(2, places)[:, :, 0]
            if real.shape[1] > 1 and bool(real.all()):
                # rows of a prompt without padding are alike
                real = real[:1]
        tokens = (self.counts[:, None] + real.cumsum(1) - 1).masked_fill(~real, -1)
        if tokens.shape[0] != self.tokens.shape[0]:
            self.tokens, self.columns = (
                one.expand(max(len(tokens), len(one)), -1) for one in (self.tokens, self.columns)
            )
        self.tokens = torch.cat([self.tokens, tokens.expand(len(self.tokens), -1)], 1)
        self.columns = torch.cat([self.columns, columns.expand(len(self.columns), -1)], 1)
        self.counts = self.counts + real.sum(1)

    def _attend_block(self, call: Attend, additive: bool, query: Tensor, mask: Tensor | None, first: int) -> Tensor:
        queries = query.shape[2]
        if mask is None and queries == 1 and self.columns.shape[1] <= self.sink + self.window and len(self.tokens) == 1:
            # all that is kept is seen
            return call(query, self.near_keys, self.near_values, None)[0]
        near = see_near(self.tokens[:, -queries:], self.tokens, self.sink, self.window)
        if mask is None:
            near = near & (self.columns[:, -queries:, None] >= self.columns[:, None])
        else:
            rows = max(mask.shape[0], len(self.columns))
            places = (self.columns - first).clamp_min(0)[:, None].expand(rows, queries, -1)
            mask = mask[:, 0].expand(rows, -1, -1).gather(2, places)[:, None]
            near = near & (self.columns >= first)[:, None]
        return call(query, self.near_keys, self.near_values, narrow(mask, near, additive=additive))[0]

    def _trim_full(self, more: int = 0) -> None:
        most = self.full_keys.shape[2] if self.sliding is None else self.sliding - 1
        if self.full_keys.shape[2] > most:
            start, self.trimmed = self.full_keys.shape[2] - most, max(self.trimmed, self.seen + more)
            self.full_keys, self.full_values = (
                self.full_keys[:, :, start:].clone(),
                self.full_values[:, :, start:].clone(),
            )

    def _trim_near(self, seen: int | None = None, *, crop: bool = False) -> None:
        """Drop the keys that no later query of streaming heads sees."""
        seen = self.seen if seen is None else seen
        most = min(self.columns.shape[1], self.sink + self.window - 1)
        if most == self.columns.shape[1] and not crop:
            return
        kept = (self.tokens >= 0) & ((self.tokens < self.sink) | (self.tokens > self.counts[:, None] - self.window))
        if self.columns.shape[1] > self.sink + self.window - 1:
            self.trimmed = max(self.trimmed, seen)
        if crop and len(kept) == 1:
            most = int(kept.sum())
        # those that are kept come first, in their order
        order = kept.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
        self.tokens = self.tokens.masked_fill(~kept, -1).gather(1, order)
        self.columns = self.columns.gather(1, order)
        self.near_keys, self.near_values = (take(one, order) for one in (self.near_keys, self.near_values))


def require_heads(keys: Tensor, heads: int) -> None:
    """Raise `LayoutError` unless a model computes as many key/value heads as its budget has."""
    if keys.shape[1] != heads:
        raise LayoutError(
            f"the model computes {keys.shape[1]} key/value heads in a layer for which the budget has {heads}; expected "
            "the model that the budget was made for."
        )


def attend_apart(
    call: InterfaceCall,
    keys: Tensor,
    values: Tensor,
    chosen: Sequence[Tensor],
    runs: Sequence[Callable[[Attend, Tensor, Tensor, Tensor], Tensor]],
) -> Tensor:
    """Attend with groups of key/value heads, each in its own way, and return the outputs of all heads [B, Q, H, e].

    Args:
        call: The call of the interface.
        keys: Of its tokens, [B, G, Q, e].
        values: Likewise.
        chosen: The heads of each group.
        runs: The way of each group: from a function that attends, queries, keys and values to an output.
    """
    heads, output = keys.shape[1], None
    attend = attend_explicitly if call.settings.get("s_aux") is not None else call.attend
    for own_heads, run in zip(chosen, runs, strict=True):
        if not len(own_heads):
            continue
        own = dict(call.settings)
        if own.get("s_aux") is not None:
            own["s_aux"] = own["s_aux"].unflatten(0, (heads, -1))[own_heads].flatten()
        query = call.query.unflatten(1, (heads, -1))[:, own_heads].flatten(1, 2)
        part = run(partial(attend, call.module, **own), query, keys[:, own_heads], values[:, own_heads])
        part = part.unflatten(2, (len(own_heads), -1))
        output = part.new_empty(*part.shape[:2], heads, *part.shape[3:]) if output is None else output
        output[:, :, own_heads] = part
    assert output is not None  # a layer has heads
    return output.flatten(2, 3)


def take(states: Tensor, order: Tensor) -> Tensor:
    """Return the columns of states [B, G, C, e] that `order` [B or 1, K] names."""
    if len(order) == 1:
        return states.index_select(2, order[0])
    return states.gather(2, order[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


def find_allowed(mask: Tensor) -> Tensor:
    """Return where a mask of the interface, boolean or additive, lets queries see keys."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def require_mask(call: InterfaceCall, values: Tensor, length: int) -> Tensor | None:
    """Return the mask of a call; `LayoutError` where heads are told apart by what is added to scores."""
    name, mask = type(call.module).__name__, call.mask
    if call.value is not values:
        raise LayoutError(f"{name} changes the values that its cache returned; generate without the budget.")
    if call.settings.get("position_bias") is not None:
        raise LayoutError(f"{name} adds a bias of each head to its scores; generate without the budget.")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1):
        raise LayoutError(f"{name} was given a mask that differs between heads; expected one of [B, 1, Q, K].")
    if mask is not None and mask.shape[-1] != length:
        raise LayoutError(f"{name} was given a mask of {mask.shape[-1]} keys; expected {length}.")
    return mask


class _MixingLayer(DynamicLayer):
    """The keys of one forward; heads give g * (their full output) + (1 - g) * (their streaming output)."""

    def __init__(self, gates: Tensor, sink: int, window: int, sliding: int | None) -> None:
        super().__init__()
        self.gates, self.sink, self.window = gates, sink, window
        self.is_sliding = sliding is not None

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_settings: Any) -> tuple[Tensor, Tensor]:
        """Return keys that attend themselves."""
        return AttendedKeys.of(key_states, partial(self._attend, key_states, value_states)), value_states

    def _attend(self, keys: Tensor, values: Tensor, call: InterfaceCall) -> tuple[Tensor, None]:
        mask = require_mask(call, values, keys.shape[2])
        places = torch.arange(keys.shape[2], device=keys.device)[None]
        real = torch.ones_like(places) if mask is None else find_allowed(mask[:, 0]).diagonal(dim1=1, dim2=2).long()
        tokens = (real.cumsum(1) - 1).masked_fill(real == 0, -1)
        near = see_near(tokens, tokens, self.sink, self.window)
        if mask is None:
            near = near & (places[:, :, None] >= places[:, None])
        masks = (mask, narrow(mask, near, additive=call.named == "eager"))
        whole, part = (call.attend(call.module, call.query, keys, values, one, **call.settings)[0] for one in masks)
        gates = self.gates.to(whole).repeat_interleave(call.query.shape[1] // keys.shape[1])[:, None]
        return part + gates * (whole - part), None


def mixing_cache(gates: Mapping[int, Tensor], sink: int, window: int, windows: Sequence[int | None]) -> Cache:
    """Return what a model is called with, once, to mix full and streaming outputs by gates [G] of layers."""
    return Cache(
        layers=[
            _MixingLayer(gates[layer], sink, window, sliding) if layer in gates else stock_layer(sliding)
            for layer, sliding in enumerate(windows)
        ]
    )


def stock_layer(sliding: int | None) -> CacheLayerMixin:
    """Return the layer that transformers has for a layer of a model."""
    return DynamicLayer() if sliding is None else DynamicSlidingWindowLayer(sliding_window=sliding)


class BudgetCache(Cache):
    """A cache for `generate`, and for calls of the model, in which each key/value head has its own budget.

    Made by `KVBudget.cache()`, for one batch; `reset()` makes it empty again.
    """

    @property
    def nbytes(self) -> int:
        """The bytes that it holds now."""
        total = 0
        layers: list[Any] = self.layers
        for layer in layers:
            if not layer.is_initialized:
                continue
            if hasattr(layer, "count_bytes"):
                total += layer.count_bytes()
            else:
                total += sum(one.untyped_storage().nbytes() for one in (layer.keys, layer.values))
        return total
