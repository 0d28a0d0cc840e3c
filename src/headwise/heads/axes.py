"""Where heads lie in a parameter, as its axes are written: "h d e", "p d h e", "(p h e) d"."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

from headwise.errors import SettingError

# Patterns by number of axes, where heads may lie: "h" heads, "e" their features, "d" inputs, "p" projections.
_SEPARATE = {2: ("(h e) d", "d (h e)"), 3: tuple(" ".join(order) for order in permutations("hde"))}
_PACKED = {
    2: ("(p h e) d", "d (p h e)"),
    3: ("p (h e) d", "p d (h e)", "d p (h e)"),
    4: tuple(" ".join(order) for order in permutations("phde")),
}


@dataclass(frozen=True)
class Axes:
    """The axes of a parameter, each made of one or several letters, the last of which changes fastest.

    The letters are "h" heads, "e" features of a head, "d" inputs (outputs, of W_O), and "p" projections where one
    parameter has several. So "(p h e) d" is the [3 d, d] of torch, "(h p e) d" has query, key and value of head 0
    first, "d (h e)" is multiplied from the right, and in "(e h) d" heads alternate feature by feature.

    Args:
        groups: The letters of each axis.

    Raises:
        SettingError: There are other letters, one is missing or written twice, or "d" shares an axis.
    """

    groups: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        letters = sorted(letter for group in self.groups for letter in group)
        alone = all(len(group) == 1 for group in self.groups if "d" in group)
        if letters not in (list("deh"), list("dehp")) or not alone:
            written = " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in self.groups)
            raise SettingError(
                f"axes is {written!r}; expected h (heads), e (features of a head) and d (inputs, an axis of its own) "
                "once each, and p (projections) where one parameter has several: 'h d e', 'p d h e', '(p h e) d'."
            )

    @staticmethod
    def read(pattern: str) -> "Axes":
        """Return the axes of a pattern such as "d (h e)".

        >>> Axes.read("d (h e)").groups
        (('d',), ('h', 'e'))
        """
        if not isinstance(pattern, str):
            raise SettingError(f"axes is {pattern!r}; expected a pattern such as 'h d e' or '(h e) d'.")
        found = re.findall(r"\(([^()]*)\)|([^\s()]+)", pattern)
        return Axes(tuple(tuple(inside.split()) if inside else (alone,) for inside, alone in found))

    def __str__(self) -> str:
        return " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in self.groups)

    @property
    def packed(self) -> bool:
        """Whether one of the axes counts projections."""
        return any("p" in group for group in self.groups)

    def bind(self, shape: tuple[int, ...], known: Mapping[str, int]) -> dict[str, int] | None:
        """Return the size of each letter, None where the shape does not fit them or leaves two of an axis open.

        >>> Axes.read("(p h e) d").bind((24, 8), {"p": 3, "h": 2})
        {'p': 3, 'h': 2, 'e': 4, 'd': 8}
        """
        if len(shape) != len(self.groups):
            return None
        sizes = dict(known)
        for group, size in zip(self.groups, shape, strict=True):
            unknown = [letter for letter in group if letter not in sizes]
            rest = prod(sizes[letter] for letter in group if letter in sizes)
            if len(unknown) > 1 or rest < 1 or size % rest or (not unknown and rest != size):
                return None
            if unknown:
                sizes[unknown[0]] = size // rest
        return sizes

    def drop_projections(self) -> "Axes":
        """Return the axes of a parameter with one projection: without "p".

        >>> str(Axes.read("(p h e) d").drop_projections())
        '(h e) d'
        """
        kept = (tuple(letter for letter in group if letter != "p") for group in self.groups)
        return Axes(tuple(group for group in kept if group))

    def place(self, sizes: Mapping[str, int], start: int = 0) -> dict[str, Any]:
        """Return where heads lie, as settings of a `HeadSlice`.

        Args:
            sizes: The size of each letter.
            start: Number of the projection along "p", of the first head along "h" where there is no "p".
        """
        axis: dict[str, int] = {}
        unit: dict[str, int] = {}
        for index, group in enumerate(self.groups):
            for place, letter in enumerate(group):
                axis[letter], unit[letter] = index, prod(sizes[after] for after in group[place + 1 :])
        along = "p" if self.packed else "h"
        return {
            "start": start * unit[along],
            "stride": unit["h"],
            "axis": axis["h"],
            "step": unit["e"],
            "feature_axis": axis["e"],
            "input_axis": axis["d"],
            "start_axis": axis[along],
        }


def list_patterns(count: int, *, packed: bool) -> tuple[str, ...]:
    """Return the orders in which a parameter of so many axes may hold heads whose features follow one another.

    >>> list_patterns(2, packed=False)
    ('(h e) d', 'd (h e)')
    """
    return (_PACKED if packed else _SEPARATE).get(count, ())


def list_readings(
    shape: tuple[int, ...], known: Mapping[str, int], width: int | None, *, packed: bool
) -> list[tuple[Axes, dict[str, int]]]:
    """Return the ways in which a parameter of this shape may hold heads whose features follow one another.

    Args:
        shape: Its shape.
        known: Sizes of the letters that are known, "h" among them.
        width: h * e where it is known; where it is not, it is taken to be d.
        packed: Whether it holds several projections.

    >>> [str(axes) for axes, _ in list_readings((4, 32, 8), {"h": 4}, None, packed=False)]
    ['h d e']
    """
    found = []
    for pattern in list_patterns(len(shape), packed=packed):
        axes = Axes.read(pattern)
        sizes = axes.bind(shape, known)
        if sizes is not None and sizes["h"] * sizes["e"] == (sizes["d"] if width is None else width):
            found.append((axes, sizes))
    return found
