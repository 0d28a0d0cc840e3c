"""Which key each query of each head may attend to, and its export to every form of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import MaskError, SettingError, require_choice, require_integer


@dataclass(frozen=True, eq=False, repr=False)
class HeadMask:
    """Masks for some heads of an attention, and padding for all heads; True = may attend.

    softmax((Q K^T + M_r) / sqrt(e)) V with M_r = 0 where True and -inf elsewhere (Wang et al. 2021, eq. 2; we add M_r
    after the scaling, which is the same). Padding and causality are kept apart from the roles and hold for all heads.

    A query that its role leaves without a key follows `empty`. A query that has no key at all, in a sequence of padding
    alone, has output 0 (see each export).

    Args:
        roles: Boolean masks [B or 1, R, n or 1, n] of R heads: sentence, role, query, key.
        keep: True where a token is real, [B, n]; None where all are.
        num_heads: Heads H of the attention; R when 0.
        heads: The head of each role; 0 to R - 1 when not given. The others are regular heads.
        names: A name for each role; "role 0" and so on when not given.
        empty: What a query does whose role leaves it no key: "regular" attends as a regular head does, "self" to
            itself.
        causal: Whether query i sees keys 0 to i only.

    Raises:
        MaskError: A tensor is not boolean, a shape does not fit, or heads do not.
        SettingError: `empty` is neither "regular" nor "self".

    Example:
        >>> diagonal = torch.eye(3, dtype=torch.bool)[None, None]
        >>> mask = HeadMask(diagonal, torch.tensor([[True, True, False]]), num_heads=2)
        >>> mask.allowed()[0, 0].int().tolist()  # the third query is padding and sees what a regular head sees
        [[1, 0, 0], [0, 1, 0], [1, 1, 0]]
        >>> mask
        HeadMask(1 sentence, 3 tokens of which 1 padding, 2 heads; allowed in role 0: 50 %; 1 regular head)
    """

    roles: Tensor
    keep: Tensor | None = None
    num_heads: int = 0
    heads: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    empty: str = "regular"
    causal: bool = False

    def __post_init__(self) -> None:
        require_choice("empty", self.empty, ("regular", "self"))
        _require_boolean("roles", self.roles)
        if self.roles.dim() != 4 or self.roles.shape[2] not in (1, self.roles.shape[3]):
            raise MaskError(
                f"roles has shape {tuple(self.roles.shape)}; expected (sentences or 1, roles, tokens or 1, tokens)."
            )
        count = self.roles.shape[1]
        heads, total = place_roles(self.heads, count, self.num_heads)
        names = tuple(self.names) or tuple(f"role {i}" for i in range(count))
        if len(names) != count or len(set(names)) != count:
            raise MaskError(f"names is {names} for {count} roles; expected one distinct name per role.")
        for field, value in (("heads", heads), ("names", names), ("num_heads", total)):
            object.__setattr__(self, field, value)
        if self.keep is not None:
            _require_keep(self.keep, self.roles)

    @staticmethod
    def regular(keep: Tensor, num_heads: int, *, causal: bool = False) -> HeadMask:
        """Return the mask of an attention without roles: padding alone, in every head.

        >>> HeadMask.regular(torch.tensor([[True, False]]), num_heads=3).allowed().shape
        torch.Size([1, 3, 2, 2])
        """
        _require_boolean("keep", keep)
        return HeadMask(keep.new_ones(1, 0, 1, keep.shape[-1]), keep, num_heads, causal=causal)

    @property
    def batch(self) -> int:
        """Sentences B."""
        return self.roles.shape[0] if self.keep is None else self.keep.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens n, padding included."""
        return self.roles.shape[3]

    def allowed(self, *, causal: bool | None = None) -> Tensor:
        """Return where each head may attend, [B, H, n, n]: padding, causality and the policy for empty rows applied.

        Args:
            causal: Overrides the mask's own.
        """
        causal = self.causal if causal is None else causal
        size, total = self.tokens, self.num_heads
        regular = self.roles.new_ones(1, 1, 1, size) if self.keep is None else self.keep[:, None, None, :]
        if causal:
            regular = regular & regular.new_ones(size, size).tril()
        role = self.roles & regular
        empty = ~role.any(-1, keepdim=True)
        if self.empty == "regular":
            role = torch.where(empty, regular, role)
        else:
            itself = torch.eye(size, dtype=torch.bool, device=role.device) & regular
            role = role | (itself & empty)
        role = role.expand(self.batch, -1, size, size)
        if self.heads == tuple(range(len(self.heads))):
            free = regular.expand(self.batch, total - role.shape[1], size, size)
            return torch.cat([role, free], dim=1)
        # indices in a list would be copied from the host
        every = [regular.expand(self.batch, 1, size, size)] * total
        for place, head in enumerate(self.heads):
            every[head] = role[:, place : place + 1]
        return torch.cat(every, dim=1)

    def additive(self, dtype: torch.dtype = torch.float32, *, causal: bool | None = None) -> Tensor:
        """Return 0 where a head may attend and -inf elsewhere, [B, H, n, n]; a row may be -inf throughout."""
        return _to_additive(self.allowed(causal=causal), dtype, -math.inf)

    def for_sdpa(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return `attn_mask` for `torch.nn.functional.scaled_dot_product_attention`, [B, H, n, n].

        Boolean, True = may attend; with a dtype additive, which is faster on CPUs. A query without any key has output
        0.
        """
        return self.allowed() if dtype is None else self.additive(dtype)

    def for_mha(self) -> Tensor:
        """Return `attn_mask` for `torch.nn.MultiheadAttention`, [B * H, n, n]: there True = may NOT attend.

        Padding is in it, so no `key_padding_mask` is needed. A query without any key would make NaN there; it attends
        to itself, and what comes out is padding.
        """
        allowed = self.allowed()
        itself = torch.eye(self.tokens, dtype=torch.bool, device=allowed.device)
        return ~(allowed | (itself & ~allowed.any(-1, keepdim=True))).flatten(0, 1)

    def for_huggingface(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a 4-D `attention_mask` for models of transformers with sdpa or eager attention, [B, H, n, n].

        Additive, with the least number of `dtype` for "may not", as in transformers. It replaces the model's
        own masks: set `causal` for a decoder. A query without any key attends to everything, and what comes out is
        padding. `hw.guide` needs none of this, and works where a model makes its own 4-D masks.
        """
        return _to_additive(self.allowed(), dtype)

    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return the function (batch, head, query, key) -> may attend that flex attention takes.

        For `torch.nn.attention.flex_attention.create_block_mask(mask_mod, B, H, n, n, device)`. A query without any key
        has output 0.
        """
        allowed = self.allowed()

        def may_attend(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return allowed[batch, head, query, key]

        return may_attend

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> HeadMask:
        """Return the mask on a device."""
        keep = None if self.keep is None else self.keep.to(device, non_blocking=non_blocking)
        return replace(self, roles=self.roles.to(device, non_blocking=non_blocking), keep=keep)

    def pin_memory(self, device: Any = None) -> HeadMask:
        """Return the mask in pinned memory, for data loaders that pin."""
        keep = None if self.keep is None else self.keep.pin_memory(device)
        return replace(self, roles=self.roles.pin_memory(device), keep=keep)

    def __len__(self) -> int:
        return self.batch

    def __getitem__(self, sentences: int | slice | Sequence[int] | Sequence[bool] | Tensor) -> HeadMask:
        """Return the mask of some sentences: of one, a slice, a list of integers, or those where booleans are True.

        Raises:
            IndexError: A sentence is not there.
            SettingError: `sentences` is something else.
        """
        if not isinstance(sentences, slice):
            sentences = self._index(sentences)
        shared = self.roles.shape[0] == 1 and self.keep is not None
        return replace(
            self,
            roles=self.roles if shared else self.roles[sentences],
            keep=None if self.keep is None else self.keep[sentences],
        )

    def padded(self, tokens: int) -> HeadMask:
        """Return the mask with padding on the right up to a number of tokens.

        Raises:
            MaskError: It has more tokens already.
        """
        require_integer("tokens", tokens)
        extra = tokens - self.tokens
        if extra < 0:
            raise MaskError(f"a mask of {self.tokens} tokens was padded to {tokens}; expected at least {self.tokens}.")
        rows = extra if self.roles.shape[2] > 1 else 0
        return replace(self, roles=F.pad(self.roles, (0, extra, 0, rows)), keep=F.pad(self._keep, (0, extra)))

    @staticmethod
    def concatenate(masks: Sequence[HeadMask]) -> HeadMask:
        """Return the masks of several batches as one, padded on the right to the longest.

        Raises:
            MaskError: There is none, or they differ in heads, roles, policy or causality.
        """
        if not masks:
            raise MaskError("concatenate was given no mask; expected at least one.")
        first = masks[0]
        for mask in masks[1:]:
            if mask._kind != first._kind:
                raise MaskError(f"masks of one kind can be concatenated; given {first._kind} and {mask._kind}.")
        tokens = max(mask.tokens for mask in masks)
        parts = [mask.padded(tokens) for mask in masks]
        rows = max(part.roles.shape[2] for part in parts)
        roles = [part.roles.expand(part.batch, -1, rows, -1) for part in parts]
        return replace(first, roles=torch.cat(roles), keep=torch.cat([part._keep for part in parts]))

    def without(self, *names: str) -> HeadMask:
        """Return the mask without some roles; their heads stay, as regular ones (Wang et al. 2021, figure 2)."""
        for name in names:
            require_choice("name", name, self.names)
        kept = [i for i, name in enumerate(self.names) if name not in names]
        return replace(
            self,
            roles=self.roles[:, kept],
            heads=tuple(self.heads[i] for i in kept),
            names=tuple(self.names[i] for i in kept),
        )

    def randomized(self, seeds: Sequence[int]) -> HeadMask:
        """Return random masks of equal sparsity, the control of a role (ours).

        Each query keeps the number of keys its role gives it, drawn from the keys a regular head sees. The draw for a
        sentence depends on its seed and its own tokens, not on the batch or its padding. For causal attention make the
        mask causal before the draw (`causal` of `Roles`): keys drawn behind a query would be lost afterwards.

        Args:
            seeds: One integer per sentence.
        """
        if len(seeds) != self.batch:
            raise SettingError(f"{len(seeds)} seeds were given for {self.batch} sentences; expected one per sentence.")
        shape = self.batch, self.roles.shape[1], self.tokens, self.tokens
        roles = torch.zeros(shape, dtype=torch.bool, device="cpu")
        keep = self._keep.cpu()
        own = self.roles.cpu().expand(self.batch, -1, self.tokens, -1)
        for sentence, seed in enumerate(seeds):
            real = keep[sentence].nonzero().squeeze(1)
            part = own[sentence][:, real[:, None], real[None, :]]
            regular = torch.ones(len(real), len(real), dtype=torch.bool, device="cpu")
            drawn = _draw_keys(part, regular.tril() if self.causal else regular, int(seed))
            roles[sentence, :, real[:, None], real[None, :]] = drawn
        return replace(self, roles=roles.to(self.roles.device))

    def __repr__(self) -> str:
        regular = self._keep[:, None, :, None] & self._keep[:, None, None, :]
        if self.causal:
            regular = regular & regular.new_ones(self.tokens, self.tokens).tril()
        shares = (self.roles & regular).sum((0, 2, 3)) / regular.sum().clamp_min(1)
        said = [f"{name}: {float(share):.0%}" for name, share in zip(self.names, shares, strict=True)]
        padding = "" if self.keep is None else f" of which {int((~self.keep).sum())} padding"
        sizes = _format_count(self.batch, "sentence"), _format_count(self.batch * self.tokens, "token") + padding
        parts = [
            ", ".join([*sizes, _format_count(self.num_heads, "head"), *(["causal"] if self.causal else [])]),
            *([f"allowed in {', '.join(said)}".replace("%", " %")] if said else []),
            _format_count(self.num_heads - len(said), "regular head"),
        ]
        return f"HeadMask({'; '.join(parts)})"

    def _index(self, sentences: int | Sequence[int] | Sequence[bool] | Tensor) -> Tensor:
        """Return the indices of sentences, or a boolean for each."""
        try:
            index = torch.as_tensor(sentences, device=self.roles.device)
        except (TypeError, ValueError, RuntimeError):
            # refused below
            index = torch.zeros(1)
        if index.shape == (0,):
            # torch takes an empty list for floats
            return index.long()
        numbers = index.dim() < 2 and not index.is_floating_point() and not index.is_complex()
        if not numbers or (index.dtype == torch.bool and index.shape != (self.batch,)):
            raise SettingError(
                f"a mask was indexed by {sentences!r:.60}; expected a sentence, a slice, a list of integers, or "
                f"{self.batch} booleans, one for each sentence."
            )
        if index.dim() == 0:
            if not -self.batch <= int(index) < self.batch:
                raise IndexError(f"sentence {int(index)} of a mask of {self.batch}.")
            return index[None]
        # torch takes bytes for booleans
        return index if index.dtype == torch.bool else index.long()

    @property
    def _keep(self) -> Tensor:
        return self.roles.new_ones(self.batch, self.tokens) if self.keep is None else self.keep

    @property
    def _kind(self) -> str:
        placed = ", ".join(f"{name} in head {head}" for name, head in zip(self.names, self.heads, strict=True))
        return f"{self.num_heads} heads ({placed}; empty rows: {self.empty}; causal: {self.causal})"


def _require_keep(keep: Tensor, roles: Tensor) -> None:
    _require_boolean("keep", keep)
    batch, _, _, tokens = roles.shape
    if keep.dim() != 2 or keep.shape[1] != tokens or batch not in (1, keep.shape[0]):
        expected = f"({batch if batch > 1 else 'sentences'}, {tokens})"
        raise MaskError(f"keep has shape {tuple(keep.shape)}; expected {expected}, like the roles.")
    if keep.device != roles.device:
        raise MaskError(f"keep is on {keep.device} and the roles on {roles.device}; expected one device.")


def place_roles(heads: Sequence[int], count: int, num_heads: int) -> tuple[tuple[int, ...], int]:
    """Return the head of each of `count` roles and the number of heads, as `HeadMask` takes both.

    Raises:
        MaskError: The heads do not fit.
        SettingError: `num_heads` is not a positive integer, or 0 without a role.

    Example:
        >>> place_roles((), 2, num_heads=3)
        ((0, 1), 3)
    """
    places, total = tuple(heads) or tuple(range(count)), num_heads or count
    require_integer("num_heads", total, low=1)
    if len(places) != count or len(set(places)) != count or not all(0 <= head < total for head in places):
        raise MaskError(f"heads is {places} for {count} roles; expected {count} different heads of 0 to {total - 1}.")
    return places, total


def _draw_keys(part: Tensor, regular: Tensor, seed: int) -> Tensor:
    """Return for each row of `part` [R, n, n] the same number of keys, drawn among the regular ones [n, n]."""
    counts = (part & regular).sum(-1, keepdim=True)
    drawn = torch.rand(part.shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    order = drawn.masked_fill(~regular, 2.0)
    return order.argsort(-1).argsort(-1) < counts


def _require_boolean(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
        given = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise MaskError(
            f"{name} is {given}; expected a boolean tensor, True where attention is allowed (of an additive mask: "
            "mask == 0)."
        )


def _to_additive(allowed: Tensor, dtype: torch.dtype, forbidden: float | None = None) -> Tensor:
    """Return 0 where allowed, and `forbidden` (the least number of `dtype` by default) elsewhere."""
    if not dtype.is_floating_point:
        raise MaskError(f"dtype is {dtype}; expected a floating-point type for an additive mask.")
    forbidden = torch.finfo(dtype).min if forbidden is None else forbidden
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, forbidden)


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
