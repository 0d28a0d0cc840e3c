"""`Roles`: turn roles and sentences into a mask per head.

What a role allows is found between words, once per sentence; every token has the row and the column of its words.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import DataError, SettingError
from headwise.masks.flex import FlexMask
from headwise.masks.head_mask import HeadMask, place_roles
from headwise.roles.idf import IDF
from headwise.roles.roles import Dependency, Found, Major, Rare, Role, RoleSetting, Separator, Window
from headwise.roles.word_table import AlignedRow, Alignment, Sentence, WordTable, align, tokens_as_words


@dataclass(frozen=True, init=False)
class Roles:
    """Roles for the heads of an attention, in order; called with sentences, it returns their mask.

    Args:
        *roles: Roles, or functions from a word table to columns or pairs (see `Role`).
        idf: Inverse document frequencies of the training split, for `Rare` and for `table.rarities` in functions.

    Raises:
        SettingError: There is no role, or an argument is not a role.

    Example:
        >>> def previous(table):
        ...     return [(word, word - 1) for word in range(1, len(table))]
        >>> roles = Roles(Separator(), previous)
        >>> mask = roles([WordTable.split("Good film."), WordTable.split("No.")], num_heads=3)
        >>> mask.names, mask.heads, mask.allowed()[0, 1].int().tolist()
        (('separator', 'previous'), (0, 1), [[1, 1, 1], [1, 0, 0], [0, 1, 0]])
    """

    roles: tuple[RoleSetting, ...]
    idf: IDF | None

    def __init__(self, *roles: RoleSetting | Callable[[WordTable], Found], idf: IDF | None = None) -> None:
        if not roles:
            raise SettingError("Roles was given no role; expected for example Rare(), Separator() or Window(3).")
        if idf is not None and not isinstance(idf, IDF):
            raise SettingError(f"idf is a {type(idf).__name__}; expected the result of headwise.roles.idf or IDF.load.")
        object.__setattr__(self, "roles", tuple(_as_role(role) for role in roles))
        object.__setattr__(self, "idf", idf)

    @staticmethod
    def paper(idf: IDF) -> Roles:
        """Return the five roles as in the paper, in its order (Wang et al. 2021, 3.2)."""
        return Roles(Rare(), Separator(), Dependency(), Major(), Window(), idf=idf)

    @staticmethod
    def released(idf: IDF) -> Roles:
        """Return the five roles as in the paper's code."""
        return Roles(Rare.released(), Separator.released(), Dependency(), Major.released(), Window.released(), idf=idf)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each role; the second window is "window 2"."""
        names: list[str] = []
        for role in self.roles:
            again = sum(name.partition(" ")[0] == role.name for name in names)
            names.append(role.name if again == 0 else f"{role.name} {again + 1}")
        return tuple(names)

    def __call__(
        self,
        tables: WordTable | Sequence[Sentence],
        num_heads: int,
        *,
        encoding: Any = None,
        before: int = 0,
        after: int = 0,
        length: int | None = None,
        heads: Sequence[int] = (),
        empty: str = "regular",
        causal: bool = False,
    ) -> HeadMask:
        """Return the mask of a batch of sentences.

        Args:
            tables: A word table per sentence, or a pair of them for a pair of texts; one table is a batch of one.
            num_heads: Number H of heads of the attention.
            encoding: The output of a fast Hugging Face tokenizer for the texts, a list of `tokenizers.Encoding`, or
                the result of `align`, whose tables may have another parse. Default: every word is one token.
            before: Number of special tokens before the words; without `encoding` only.
            after: Number of special tokens after the words; without `encoding` only.
            length: Number n of tokens in the batch. Default: that of the longest sentence. `align` sets its own.
            heads: The head of each role. Default: 0 to R - 1.
            empty: How a query attends if its role allows no key, for example in a sentence without a separator:
                "regular" (like a head without a role) or "self".
            causal: Whether the mask is causal. `guide` finds causal attention itself; `randomized` does not.

        Raises:
            DataError: A sentence has no token, or no parse although a role needs one, or a text or its words are not
                the encoded ones.
            SettingError: A sentence is longer than `length`, a role found words that do not exist, or an argument would
                have no effect.
            MaskError: The heads do not fit.
        """
        aligned = _align_batch(tables, encoding, before, after, length)
        units, windows = self._mask_units(aligned)
        for number, reach in windows.items():
            near = torch.arange(units.shape[-1])
            units[:, number] |= (near[:, None] - near[None, :]).abs() <= reach
        roles, keep = _expand_to_tokens(units, aligned)
        return HeadMask(roles, keep, num_heads, tuple(heads), self.names, empty, causal)

    def for_flex(
        self,
        tables: WordTable | Sequence[Sentence],
        num_heads: int,
        *,
        encoding: Any = None,
        before: int = 0,
        after: int = 0,
        length: int | None = None,
        heads: Sequence[int] = (),
        empty: str = "regular",
        causal: bool = False,
    ) -> FlexMask:
        """Return the mask of a batch for flex attention, with masks of n x n tokens only for the roles that need them.

        Windows, and roles that allow columns (separators, rare and major words), are tables of O(n) numbers; a role of
        pairs, such as the dependencies, has a boolean mask. The mask allows the same as the `HeadMask`. Arguments and
        errors are those of `Roles.__call__`.

        Example:
            >>> mask = Roles(Separator(), Window(3)).for_flex(WordTable.split("Good film."), num_heads=3)
            >>> block_mask = mask.block_mask()  # flex_attention(q, k, v, block_mask=block_mask)
        """
        aligned = _align_batch(tables, encoding, before, after, length)
        columns, pairs, windows, most = self._find_cells(aligned)
        batch, count = len(aligned.rows), len(self.roles)
        places, total = place_roles(heads, count, num_heads)
        first, last, keep = _locate_tokens(aligned)
        everywhere = torch.zeros(batch * count * most, dtype=torch.bool)
        everywhere[torch.tensor(columns, dtype=torch.long)] = True
        # number of allowed columns before each word: a token has one if the count grows over its words
        below = F.pad(everywhere.view(batch, count, most).cumsum(-1), (1, 0))
        ends, starts = ((t[:, None] + add).expand(-1, count, -1) for t, add in ((last, 1), (first, 0)))
        table = (below.gather(2, ends) > below.gather(2, starts)) & keep[:, None]
        paired = sorted({pair // (most * most) % count for pair in pairs})
        dense = {}
        if paired:
            within = Roles(*(self.roles[number] for number in paired), idf=self.idf)
            dense = {places[number]: within._mask_tokens(aligned)[:, i] for i, number in enumerate(paired)}
        plain = [number for number in range(count) if number not in paired and number not in windows]
        return FlexMask.from_tables(
            keep,
            first,
            last,
            num_heads=total,
            columns={places[number]: table[:, number] for number in plain},
            windows={places[number]: reach for number, reach in windows.items()},
            pairs=dense,
            empty=empty,
            causal=causal,
        )

    def _mask_tokens(self, aligned: Alignment) -> Tensor:
        return _expand_to_tokens(self._mask_units(aligned)[0], aligned)[0]

    def _mask_units(self, aligned: Alignment) -> tuple[Tensor, dict[int, int]]:
        """Return what each role except windows allows between units, [B, R, U, U], and the reach of each window."""
        columns, pairs, windows, most = self._find_cells(aligned)
        batch, count = len(aligned.rows), len(self.roles)
        units = torch.zeros(batch * count * most * most, dtype=torch.bool)
        units[torch.tensor(pairs, dtype=torch.long)] = True
        everywhere = torch.zeros(batch * count * most, dtype=torch.bool)
        everywhere[torch.tensor(columns, dtype=torch.long)] = True
        return units.view(batch, count, most, most) | everywhere.view(batch, count, 1, most), windows

    def _find_cells(self, aligned: Alignment) -> tuple[list[int], list[int], dict[int, int], int]:
        """Return the allowed columns and pairs of units as flat indices, the reach of each window, and U."""
        count, most = len(self.roles), max(row.units for row in aligned.rows)
        windows = {number: role.reach for number, role in enumerate(self.roles) if isinstance(role, Window)}
        columns: list[int] = []
        pairs: list[int] = []
        for index, (tables, row) in enumerate(zip(aligned.tables, aligned.rows, strict=True)):
            rated = tables if self.idf is None else [self.idf.rate(table) for table in tables]
            for number, role in enumerate(self.roles):
                if isinstance(role, Window):
                    continue
                start = (index * count + number) * most
                paired = False
                for table, places in zip(rated, row.places, strict=True):
                    found = _find(role, table)
                    if found and isinstance(found[0], tuple):
                        paired = True
                        allowed = [(places[i], places[j]) for i, j in found]
                        pairs += [(start + i) * most + j for i, j in allowed if i >= 0 and j >= 0]
                    else:
                        columns += [start + places[word] for word in found if places[word] >= 0]
                if role.special_tokens:
                    columns += [start + unit for unit in row.special]
                elif paired:
                    pairs += [(start + unit) * most + unit for unit in row.special]
        return columns, pairs, windows, most


def _align_batch(
    tables: WordTable | Sequence[Sentence], encoding: Any, before: int, after: int, length: int | None
) -> Alignment:
    batch = [tables] if isinstance(tables, WordTable) else list(tables)
    if not batch:
        raise DataError("Roles was called with no sentence; expected at least one word table.")
    if encoding is not None and (before, after) != (0, 0):
        raise SettingError(
            f"before is {before} and after is {after}, and the encoding has its own special tokens; leave both out."
        )
    if isinstance(encoding, Alignment):
        if length not in (None, encoding.tokens):
            raise SettingError(
                f"length is {length} and the alignment has {encoding.tokens} tokens; pass length={length} to "
                "hw.roles.align."
            )
        aligned = encoding.with_tables(batch)
    elif encoding is not None:
        aligned = align(batch, encoding, length=length)
    else:
        aligned = tokens_as_words(batch, before=before, after=after, length=length)
    for index, row in enumerate(aligned.rows):
        if row.units == 0:
            raise DataError(f"sentence {index} has neither words nor special tokens; leave it out of the batch.")
    return aligned


def _find(role: RoleSetting, table: WordTable) -> Sequence[Any]:
    """Return what a role finds, checked if the role is user-defined."""
    assert not isinstance(role, Window)
    if not isinstance(role, Role):
        return role.find(table)
    given: Any = role.find(table)
    # arrays and tensors
    given = given.tolist() if hasattr(given, "tolist") else given
    expected = "expected words, or pairs of words, by their index"
    if not isinstance(given, Iterable):
        raise SettingError(f"the role {role.name!r} found {given!r}; {expected}, or an empty list.")
    found = list(given)
    cells = [_as_indices(one) for one in found]
    if {len(cell) for cell in cells} not in (set(), {1}, {2}):
        raise SettingError(f"the role {role.name!r} found {found[:4]!r}; {expected}.")
    wrong = next((word for cell in cells for word in cell if not 0 <= word < len(table)), None)
    if wrong is not None:
        raise SettingError(f"the role {role.name!r} found word {wrong} in a sentence of {len(table)} words.")
    return [cell if len(cell) == 2 else cell[0] for cell in cells]


def _as_indices(found: Any) -> tuple[int, ...]:
    """Return a word or a pair as a tuple of indices; an empty tuple if it is neither."""
    words = found if isinstance(found, tuple | list) else (found,)
    if any(isinstance(word, bool) for word in words):
        return ()
    try:
        return tuple(map(operator.index, words))
    except TypeError:
        return ()


def _expand_to_tokens(units: Tensor, aligned: Alignment) -> tuple[Tensor, Tensor]:
    """Return masks between tokens [B, R, n, n] from those between units [B, R, U, U], and a mask of real tokens."""
    size = aligned.tokens
    if all(isinstance(row.first, range) for row in aligned.rows):
        # every word is one token, in order
        keep = torch.arange(size) < torch.tensor([[row.units] for row in aligned.rows])
        extra = size - units.shape[-1]
        tokens = F.pad(units, (0, extra, 0, extra))
    else:
        units, places = _add_wide_tokens(units, aligned.rows)
        keep = places >= 0
        index = places.clamp_min(0)
        rows = index[:, None, :, None].expand(-1, units.shape[1], -1, units.shape[-1])
        columns = index[:, None, None, :].expand(-1, units.shape[1], size, -1)
        tokens = units.gather(2, rows).gather(3, columns)
    return tokens & (keep[:, None, None, :] & keep[:, None, :, None]), keep


def _locate_tokens(aligned: Alignment) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first and the last unit of each token, [B, n], and a mask of real tokens."""
    size = aligned.tokens
    ends = []
    for row in aligned.rows:
        first, last = list(row.first), list(row.last)
        ends.append((first + [-1] * (size - len(first)), last + [-1] * (size - len(last))))
    first, last = torch.tensor(ends).unbind(1)
    keep = first >= 0
    units = torch.tensor([[row.units] for row in aligned.rows])
    keep = keep & (first < units)
    return first.clamp_min(0), last.clamp_min(0), keep


def _add_wide_tokens(units: Tensor, rows: Sequence[AlignedRow]) -> tuple[Tensor, Tensor]:
    """Return the masks with an extra unit per token that covers several words, and the unit of each token."""
    places, wide = [], []
    for index, row in enumerate(rows):
        own = list(row.first)
        several = {(a, b) for a, b in zip(row.first, row.last, strict=True) if a != b}
        for extra, (first, last) in enumerate(sorted(several)):
            new = units.shape[-1] + extra
            own = [new if (a, b) == (first, last) else o for a, b, o in zip(row.first, row.last, own, strict=True)]
            wide.append((index, first, last, new))
        places.append(own)
    extra = max((new for *_, new in wide), default=units.shape[-1] - 1) + 1 - units.shape[-1]
    units = F.pad(units, (0, extra, 0, extra))
    for index, first, last, new in wide:
        units[index, :, new] = units[index, :, first : last + 1].any(1)
    for index, first, last, new in wide:
        units[index, :, :, new] = units[index, :, :, first : last + 1].any(-1)
    return units, torch.tensor(places)


def _as_role(role: Any) -> RoleSetting:
    if isinstance(role, RoleSetting):
        return role
    if callable(role) and not isinstance(role, type):
        find: Any = role
        return Role(getattr(role, "__name__", type(role).__name__), find)
    raise SettingError(f"{role!r} is not a role; expected Rare(), Separator(), ..., a Role or a function.")
