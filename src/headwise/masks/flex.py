"""Role masks for flex attention, stored as tables of tokens rather than of pairs of tokens.

A window needs one number and the word of each token; a role that allows columns (separators, rare words) needs one
boolean per key. A role of pairs (dependencies) keeps its boolean mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from headwise.errors import MaskError, require_choice, require_integer
from headwise.masks.head_mask import HeadMask

REGULAR, COLUMNS, WINDOW, PAIRS = range(4)


@dataclass(frozen=True, eq=False, repr=False)
class FlexMask:
    """A `HeadMask` for flex attention; made by `Roles.for_flex`.

    A query attends to the keys that its head's role allows and, where that leaves none, follows the policy of the mask.

    Attributes:
        keep: True where a token is real, [B, n].
        first: First word of each token, [B, n], special tokens counted as words.
        last: Last word of each token, [B, n].
        columns: Keys that every query of a head may attend to, [B, C, n].
        pairs: Boolean masks [B, P, n, n] as a `HeadMask` has them, with causality and the policy applied.
        role: Which kind of role each head has, [H].
        number: For each head its index among the columns or pairs, or the reach of its window in words, [H].
        empty: The policy of a query whose role leaves it no key: "regular" or "self".
        causal: Whether query i sees keys 0 to i only.
    """

    keep: Tensor
    first: Tensor
    last: Tensor
    columns: Tensor
    pairs: Tensor
    role: Tensor
    number: Tensor
    empty: str = "regular"
    causal: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> FlexMask:
        """Return the mask on a device."""
        return replace(self, **{n: t.to(device, non_blocking=non_blocking) for n, t in self._tensors.items()})

    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return the function (batch, head, query, key) -> may attend that flex attention takes.

        A query without any key, in a sentence of padding alone, has output 0.
        """
        keep, first, last, role, number = self.keep, self.first, self.last, self.role, self.number
        causal, own = self.causal, self.empty == "self"
        # an empty table could not be indexed, even for heads that do not use it
        columns = self.columns if self.columns.shape[1] else keep[:, None]
        pairs = self.pairs if self.pairs.shape[1] else keep[:, None, None, :]
        several = pairs.shape[2] > 1
        there = columns & keep[:, None]
        seen = there.cumsum(-1) > 0 if causal else there.any(-1, keepdim=True).expand_as(there)
        filled = seen & keep[:, None]

        def may_attend(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            regular = keep[b, k] & (k <= q) if causal else keep[b, k]
            kind, which = role[h], number[h]
            column = torch.where(kind == COLUMNS, which, 0)
            reach = torch.where(kind == WINDOW, which, 0)
            pair = torch.where(kind == PAIRS, which, 0)
            near = (first[b, q] - last[b, k] <= reach) & (first[b, k] - last[b, q] <= reach)
            otherwise = regular & (q == k) if own else regular
            by_column = torch.where(filled[b, column, q], columns[b, column, k] & regular, otherwise)
            # a real query is in its own window
            by_window = torch.where(keep[b, q], near & regular, otherwise)
            by_pair = pairs[b, pair, q if several else q * 0, k]
            found = torch.where(kind == COLUMNS, by_column, torch.where(kind == WINDOW, by_window, by_pair))
            return torch.where(kind == REGULAR, regular, found)

        return may_attend

    def block_mask(self, block: int = 128) -> BlockMask:
        """Return the `BlockMask` for `torch.nn.attention.flex_attention.flex_attention`.

        Equal to what `create_block_mask` makes of `mask_mod`, which evaluates it on [B, H, n, n] unless compiled; here
        one row of blocks is evaluated at a time, [B, H, block, n].

        Args:
            block: Queries and keys of a block; 128 is what flex attention expects on a GPU.
        """
        require_integer("block", block, low=1)
        may_attend, size, device = self.mask_mod(), self.keep.shape[1], self.keep.device
        sentence = torch.arange(len(self.keep), device=device)[:, None, None, None]
        head = torch.arange(len(self.role), device=device)[:, None, None]
        key = torch.arange(size, device=device)
        partial, full = [], []
        padding = -size % block
        for start in range(0, size, block):
            query = torch.arange(start, min(start + block, size), device=device)[:, None]
            allowed = may_attend(sentence, head, query, key)
            keys = torch.nn.functional.pad(allowed.sum(2), (0, padding)).unflatten(-1, (-1, block)).sum(-1)
            full.append(keys == block * block)
            partial.append((keys > 0) & ~full[-1])
        partial_counts, partial_order = _list_blocks(torch.stack(partial, 2))
        full_counts, full_order = _list_blocks(torch.stack(full, 2))
        return BlockMask.from_kv_blocks(
            partial_counts,
            partial_order,
            full_counts,
            full_order,
            BLOCK_SIZE=block,
            mask_mod=may_attend,
            seq_lengths=(size, size),
        )

    @staticmethod
    def from_tables(
        keep: Tensor,
        first: Tensor,
        last: Tensor,
        *,
        num_heads: int,
        columns: dict[int, Tensor],
        windows: dict[int, int],
        pairs: dict[int, Tensor],
        empty: str = "regular",
        causal: bool = False,
    ) -> FlexMask:
        """Return the mask of heads with roles; the others are regular heads.

        For some heads are given the keys that all may attend to, `columns` [B, n]; how many words to each side they
        see, `windows`; or where each query may attend, `pairs` [B, n, n].

        Raises:
            MaskError: A head is named twice or is none of 0 to H - 1.
            SettingError: `empty` is neither "regular" nor "self", or `num_heads` is not a positive integer.
        """
        require_choice("empty", empty, ("regular", "self"))
        require_integer("num_heads", num_heads, low=1)
        named = [*columns, *windows, *pairs]
        if len(set(named)) != len(named) or not all(0 <= head < num_heads for head in named):
            raise MaskError(f"roles are given to the heads {named}; expected different heads of 0 to {num_heads - 1}.")
        role, number = torch.zeros(2, num_heads, dtype=torch.long)
        for kind, heads in ((COLUMNS, columns), (WINDOW, windows), (PAIRS, pairs)):
            for index, head in enumerate(heads):
                role[head], number[head] = kind, windows[head] if kind == WINDOW else index
        batch, size = keep.shape
        dense = keep.new_zeros(batch, 0, size, size)
        if pairs:
            roles = torch.stack(list(pairs.values()), 1)
            dense = HeadMask(roles, keep, len(pairs), empty=empty, causal=causal).allowed()
        table = torch.stack(list(columns.values()), 1) if columns else keep.new_zeros(batch, 0, size)
        role, number = role.to(keep.device), number.to(keep.device)
        return FlexMask(keep, first, last, table, dense, role, number, empty, causal)


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, and their indices, those first."""
    counts = blocks.sum(-1, dtype=torch.int32)
    return counts, blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
