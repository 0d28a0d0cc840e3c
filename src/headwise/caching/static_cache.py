"""The cache of a budget in tensors of a fixed size, which are written in place: calls with one token compile.

A streaming head has a slot for each of the first `sink` real tokens of a row, and a ring of `window` slots for the
others. Keys hold their own positions, so that their order in the ring is of no account.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, StaticLayer, StaticSlidingWindowLayer

from headwise.caching.budget_cache import BLOCK, attend_apart, find_allowed, require_heads, require_mask, see_near
from headwise.errors import SettingError
from headwise.heads.scores.huggingface import Attend, AttendedKeys, InterfaceCall


class StaticBudgetLayer(CacheLayerMixin):
    """Keys and values of one layer for at most `length` tokens; `full` are the heads that keep all of them."""

    is_compileable, is_croppable, is_sliding = True, False, False

    def __init__(self, heads: int, full: Sequence[int], sink: int, window: int, length: int) -> None:
        super().__init__()
        self.heads, self.sink, self.window, self.length = heads, sink, window, length
        self.chosen = [torch.tensor(full), torch.tensor([head for head in range(heads) if head not in full])]
        self.chosen = [one.long() for one in self.chosen]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the tensors, with no token in them."""
        self.device, self.dtype = key_states.device, key_states.dtype
        batch, slots = len(key_states), self.sink + self.window
        self.chosen = [one.to(self.device) for one in self.chosen]
        states = (key_states, value_states)
        # the slot behind the others takes padding, and what a long prompt passes by
        self.full_keys, self.full_values, self.near_keys, self.near_values = (
            one.new_zeros(batch, len(heads), size, one.shape[3])
            for heads, size in zip(self.chosen, (self.length, slots + 1), strict=True)
            for one in states
        )
        # the number of the token in each slot among the real ones of its row, -1 for none; how many a row has
        self.tokens = torch.full((batch, slots + 1), -1, device=self.device)
        self.counts, self.seen = torch.zeros(batch, dtype=torch.long, device=self.device), self.tokens.new_zeros(())
        if not torch.compiler.is_compiling():
            for one in self._list_held():
                torch._dynamo.mark_static_address(one)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_settings: Any) -> tuple[Tensor, Tensor]:
        """Return keys that attend themselves; they are kept when they have."""
        require_heads(key_states, self.heads)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not torch.compiler.is_compiling() and int(self.seen) + key_states.shape[2] > self.length:
            raise SettingError(
                f"the cache was made for {self.length} tokens and is given {int(self.seen) + key_states.shape[2]}; "
                "make it with cache(max_length=...) of the prompt and the answer together."
            )
        return AttendedKeys.of(key_states, partial(self._attend, key_states, value_states)), value_states

    def get_seq_length(self) -> Any:
        """Return the number of tokens so far, as a tensor."""
        return self.seen if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Return the number of tokens that it can hold."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that the model makes a mask for, and the column of the first."""
        del query_length
        return self.length, 0

    def reset(self) -> None:
        """Forget all tokens."""
        if self.is_initialized:
            self.tokens.fill_(-1)
            self.counts.zero_()
            self.seen.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens: a ring has overwritten what would be seen again."""
        raise SettingError(
            f"crop({tokens_to_remove}) of a cache of a fixed size; make it without max_length for assisted generation."
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take other rows, as beams do."""
        for one in self._list_held():
            if one.dim():
                one.copy_(one[beam_idx.to(self.device)])

    def count_bytes(self) -> int:
        """Return the bytes of everything it keeps."""
        return sum(one.untyped_storage().nbytes() for one in self._list_held())

    def _list_held(self) -> tuple[Tensor, ...]:
        keys_and_values = (self.full_keys, self.full_values, self.near_keys, self.near_values)
        return (*keys_and_values, self.tokens, self.counts, self.seen)

    def _attend(self, keys: Tensor, values: Tensor, call: InterfaceCall) -> tuple[Tensor, None]:
        """Keep the keys, and attend with full and with streaming heads."""
        columns = self.seen + torch.arange(keys.shape[2], device=keys.device)
        mask = require_mask(call, values, self.length)
        if mask is None:
            mask = (torch.arange(self.length, device=keys.device) <= columns[:, None])[None, None]
        # a token is real where it sees itself
        places = columns[None, :, None].expand(len(mask), -1, 1)
        real = find_allowed(mask[:, 0]).gather(2, places)[:, :, 0].expand(len(keys), -1)
        numbers = (self.counts[:, None] + real.cumsum(1) - 1).masked_fill(~real, -1)
        runs = (partial(self._attend_full, mask, columns), partial(self._attend_near, mask, numbers))
        output = attend_apart(call, keys, values, self.chosen, runs)
        self.counts.add_(real.sum(1))
        self.seen.add_(keys.shape[2])
        return output, None

    def _attend_full(
        self, mask: Tensor, columns: Tensor, call: Attend, query: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        self.full_keys.index_copy_(2, columns, keys)
        self.full_values.index_copy_(2, columns, values)
        return call(query, self.full_keys, self.full_values, mask)[0]

    def _attend_near(
        self, mask: Tensor, numbers: Tensor, call: Attend, query: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attend block by block, as a long prompt needs no score of a key that no query of a block sees."""
        outputs, size = [], max(self.sink + self.window, BLOCK)
        for start in range(0, query.shape[2], size):
            part = slice(start, start + size)
            more = (keys[:, :, part], values[:, :, part], numbers[:, part])
            if query.shape[2] == 1:
                # what the slots then hold is all that is seen
                self._keep(*more)
                seen = self.tokens[:, None, :-1] >= 0
                held = [one[:, :, :-1] for one in (self.near_keys, self.near_values)]
            else:
                kept = (self.near_keys[:, :, :-1], self.near_values[:, :, :-1], self.tokens[:, :-1])
                *held, known = (
                    torch.cat(pair, -1 if pair[0].dim() == 2 else 2) for pair in zip(kept, more, strict=True)
                )
                asked = numbers[:, part]
                seen = see_near(asked, known, self.sink, self.window) & (asked[:, :, None] >= known[:, None])
                self._keep(*more)
            seen = seen[:, None]
            if mask.dtype != torch.bool:
                seen = torch.zeros_like(seen, dtype=mask.dtype).masked_fill(~seen, torch.finfo(mask.dtype).min)
            outputs.append(call(query[:, :, part], *held, seen)[0])
        return torch.cat(outputs, 1)

    def _keep(self, keys: Tensor, values: Tensor, numbers: Tensor) -> None:
        """Write keys and values of a block into the slots of their tokens."""
        last = numbers.amax(1, keepdim=True)
        kept = (numbers >= 0) & ((numbers < self.sink) | (numbers > last - self.window))
        slots = torch.where(numbers < self.sink, numbers, self.sink + (numbers - self.sink) % self.window)
        slots = torch.where(kept, slots, self.sink + self.window)
        self.tokens.scatter_(1, slots, numbers)
        for held, states in ((self.near_keys, keys), (self.near_values, values)):
            held.scatter_(2, slots[:, None, :, None].expand_as(states), states)


def stock_layer(sliding: int | None, length: int) -> CacheLayerMixin:
    """Return the layer of a fixed size that transformers has for a layer of a model."""
    return StaticLayer(length) if sliding is None else StaticSlidingWindowLayer(length, sliding)
