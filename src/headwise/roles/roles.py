"""Roles of heads: which words of a sentence each word may attend to.

The five roles of Wang et al. 2021, as in the paper and as in its code, and user-defined roles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from headwise.errors import SettingError, require_range
from headwise.roles.word_table import WordTable
from headwise.settings import Count, Natural, check_fields

# Columns (words that every word may attend to), or pairs (attending word, attended word).
Found = Sequence[int] | Sequence[tuple[int, int]]

MAJOR = ("nsubj", "dobj", "obj", "amod", "advmod")


@dataclass(frozen=True)
class Rare:
    """Attend to the rarest words of the sentence: the tenth with the highest inverse document frequency.

    Columns of the k words with the greatest idf, k = max(least, ceil(share * n)) of n words (Wang et al. 2021, 3.2).

    Args:
        share: Share of the words, in (0, 1].
        least: The minimum number of words.
        round_up: Whether share * n is rounded up rather than down.
        skip: Whether words of one character and numbers are excluded.
        ties: Which of equally rare words come first: "earlier" or "later".

    Example:
        >>> table = WordTable(["a", "film", "noir"], rarities=[1.0, 1.5, 4.0])
        >>> Rare().find(table)
        [2]
    """

    share: Annotated[float, partial(require_range, low=0.0, high=1.0, low_open=True)] = 0.1
    least: Natural = 1
    round_up: bool = True
    skip: bool = False
    ties: Literal["earlier", "later"] = "earlier"

    name = "rare"
    special_tokens = False

    __post_init__ = check_fields

    @staticmethod
    def released() -> Rare:
        """Return the role of the paper's code: max(2, n // 10) words, without single characters and numbers."""
        return Rare(least=2, round_up=False, skip=True, ties="later")

    def find(self, table: WordTable) -> list[int]:
        """Return the columns.

        Raises:
            SettingError: The rarities are missing.
        """
        rarities = table.rarities
        if rarities is None:
            raise SettingError(
                "Rare was given a table without rarities; pass Roles(..., idf=headwise.roles.idf(training words))."
            )
        # 0.07 * 100 is a little more than 7 in binary, and 0.29 * 100 a little less than 29
        exact = self.share * len(table) - 1e-9 if self.round_up else self.share * len(table) + 1e-9
        count = max(self.least, math.ceil(exact) if self.round_up else math.floor(exact))
        chosen: Sequence[int] = range(len(table))
        if self.skip:
            chosen = [i for i in chosen if len(table.words[i]) > 1 and not table.words[i].replace(".", "").isdigit()]
        # sorting is stable: equal values keep their order
        order = chosen if self.ties == "earlier" else reversed(chosen)
        return sorted(sorted(order, key=lambda i: -rarities[i])[:count])


@dataclass(frozen=True)
class Separator:
    """Attend to separators: comma, semicolon, period, question mark, exclamation mark, and special tokens.

    Columns of the words made of these marks only (Wang et al. 2021, 3.2).

    Args:
        marks: The marks.
        repeated: Whether a word of several marks, such as "...", is a separator too.

    Example:
        >>> Separator().find(WordTable.split("Well, why not?"))
        [1, 4]
    """

    marks: str = ",;.?!"
    repeated: bool = True

    name = "separator"
    special_tokens = True

    def __post_init__(self) -> None:
        if not isinstance(self.marks, str) or not self.marks:
            raise SettingError(f"marks is {self.marks!r}; expected at least one character.")

    @staticmethod
    def released() -> Separator:
        """Return the role of the paper's code: with the colon, without the exclamation mark, one mark per word."""
        return Separator(marks=";?,.:", repeated=False)

    def find(self, table: WordTable) -> list[int]:
        """Return the columns."""
        marks = set(self.marks)
        if self.repeated:
            return [i for i, word in enumerate(table.words) if word[0] in marks and marks.issuperset(word)]
        return [i for i, word in enumerate(table.words) if word in marks]


@dataclass(frozen=True)
class Dependency:
    """Attend to the word itself, its head and its children in the dependency tree.

    Pairs (i, i), (i, head of i) and (head of i, i) (Wang et al. 2021, 3.2; the pair (i, i) is from their code). A
    special token attends to itself.

    Args:
        head: Whether a word attends to its head.
        children: Whether a word attends to its children.

    Example:
        >>> Dependency().find(WordTable(["good", "film"], heads=[1, 1], relations=["amod", "ROOT"]))
        [(0, 0), (1, 1), (0, 1), (1, 0)]
    """

    head: bool = True
    children: bool = True

    name = "dependency"
    special_tokens = False

    def find(self, table: WordTable) -> list[tuple[int, int]]:
        """Return the pairs.

        Raises:
            DataError: The sentence has no parse.
        """
        heads, _ = table.parse()
        pairs = [(i, i) for i in range(len(heads))]
        for word, head in enumerate(heads):
            if self.head and head != word:
                pairs.append((word, head))
            if self.children and head != word:
                pairs.append((head, word))
        return pairs


@dataclass(frozen=True)
class Major:
    """Attend to the words involved in the major relations: subject, object, adjective and adverb modifiers.

    Columns of the words with these relations and of their heads, and special tokens (Wang et al. 2021, 3.2).

    Args:
        relations: Names of relations, compared exactly: "nsubj:pass" is not "nsubj". "dobj" and "obj" are the same
            relation in two annotation schemes.
        children: Whether the children of those words are included.

    Example:
        >>> Major().find(WordTable(["a", "good", "film"], heads=[2, 2, 2], relations=["det", "amod", "ROOT"]))
        [1, 2]
    """

    relations: tuple[str, ...] = MAJOR
    children: bool = False

    name = "major"
    special_tokens = True

    def __post_init__(self) -> None:
        named = isinstance(self.relations, tuple) and all(isinstance(name, str) for name in self.relations)
        if not named or not self.relations:
            raise SettingError(f"relations is {self.relations!r}; expected a tuple of names, such as {MAJOR}.")

    @staticmethod
    def released() -> Major:
        """Return the role of the paper's code, which includes the children of those words."""
        return Major(children=True)

    def find(self, table: WordTable) -> list[int]:
        """Return the columns.

        Raises:
            DataError: The sentence has no parse.
        """
        heads, relations = table.parse()
        wanted = set(self.relations)
        dependents = {i for i, relation in enumerate(relations) if relation in wanted}
        found = dependents | {heads[i] for i in dependents}
        if self.children:
            found |= {i for i, head in enumerate(heads) if head in dependents}
        return sorted(found)


@dataclass(frozen=True)
class Window:
    """Attend to the neighbors: a window of words centered on each word.

    Pairs (i, j) with |i - j| <= (size - 1) / 2, special tokens counted as words (Wang et al. 2021, 3.2).

    Args:
        size: Number of words in the window, odd.
    """

    size: Count = 3

    name = "window"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.size % 2 == 0:
            raise SettingError(
                f"size is {self.size}; expected an odd number, so that the window is centered on the word."
            )

    @property
    def reach(self) -> int:
        """Number of words on each side."""
        return self.size // 2

    @staticmethod
    def released() -> Window:
        """Return the role of the paper's code: five words."""
        return Window(5)


@dataclass(frozen=True)
class Role:
    """A user-defined role: a function from the word table of a sentence to columns or pairs.

    Columns are words that every word may attend to. A pair (i, j) lets word i attend to word j; with pairs, special
    tokens attend to themselves. A plain function given to `Roles` becomes a role named after it.

    Args:
        name: The name of the role.
        find: The function.
        special_tokens: Whether every token may also attend to the special tokens.

    Example:
        >>> def root(table):
        ...     return [word for word, head in enumerate(table.heads) if word == head]
        >>> Role("root", root).find(WordTable(["good", "film"], heads=[1, 1], relations=["amod", "ROOT"]))
        [1]
    """

    name: str
    find: Callable[[WordTable], Found]
    special_tokens: bool = False

    def __post_init__(self) -> None:
        if not callable(self.find):
            raise SettingError(f"find is {self.find!r}; expected a function from a word table to columns or pairs.")


RoleSetting = Rare | Separator | Dependency | Major | Window | Role
