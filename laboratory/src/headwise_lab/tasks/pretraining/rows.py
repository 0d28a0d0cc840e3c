"""Token ids of documents packed into rows of one length, their segments and masked positions."""

import numpy as np
from numpy.typing import NDArray

from headwise.errors import SettingError
from headwise_lab.data.arrays import stable_key

# Share of rows that are one segment (Clark et al. 2020, released code).
ONE_SEGMENT = 0.1
DRAWS = 1 << 64


class Packer:
    """Packs ids into rows [CLS] a ... [SEP], without padding; tokens left over wait for more.

    Documents follow one another with [SEP] between them. A row inside one document is cut into two segments by a [SEP]
    in the middle, except for one in ten, chosen by a hash of its number: fine-tuning sees both.

    Args:
        length: Tokens of a row, specials included.
        start: Id of [CLS].
        end: Id of [SEP].

    Attributes:
        held: Ids not yet in a row.
        rows: Rows made so far.

    Example:
        >>> packer = Packer(6, start=1, end=2)
        >>> packer.add([7, 7, 7, 7, 8, 8], ends=True).tolist()
        [[1, 7, 2, 7, 7, 2]]
        >>> packer.held
        [7, 8, 8, 2]
    """

    def __init__(self, length: int, start: int, end: int) -> None:
        if length < 5:
            raise SettingError(f"length is {length}; expected at least 5, room for two tokens and the special ones.")
        self.length, self.start, self.end = length, start, end
        self.held: list[int] = []
        self.rows = 0

    def add(self, ids: list[int], *, ends: bool) -> NDArray[np.int64]:
        """Add tokens and return the rows that are full now, [R, length].

        Args:
            ids: The next tokens.
            ends: Whether their document ends with them.
        """
        self.held.extend(ids)
        if ends:
            self.held.append(self.end)
        room, at, made = self.length - 2, 0, []
        while len(self.held) - at >= room + 1:
            if self.held[at] == self.end:
                at += 1
                continue
            body = self.held[at : at + room]
            at += room
            if self.end not in body and self._in_two():
                half = (room - 1) // 2
                body = [*body[:half], self.end, *body[half:-1]]
                at -= 1
            made.append([self.start, *body, self.end])
            self.rows += 1
        del self.held[:at]
        return np.array(made, dtype=np.int64).reshape(len(made), self.length)

    def _in_two(self) -> bool:
        return stable_key("segments", str(self.rows)) / DRAWS >= ONE_SEGMENT


def number_segments(rows: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """Return the segment of each token: 0 up to the first [SEP] of its row, 1 after it, [B, T].

    >>> number_segments(np.array([[1, 7, 2, 8, 2]]), end=2).tolist()
    [[0, 0, 0, 1, 1]]
    """
    ended = np.cumsum(rows == end, axis=1)
    return np.minimum(ended - (rows == end), 1)


def draw_masked(
    row: NDArray[np.int64], special: tuple[int, ...], count: int, *, draw: int, number: int
) -> NDArray[np.int64]:
    """Return `count` positions of a row to mask, sorted; special tokens are masked only where no others are left.

    Args:
        row: The ids, [T].
        special: Ids of special tokens.
        count: Number of positions.
        draw: Number of the draw, different in each pass over the text.
        number: Index of the row.

    >>> draw_masked(np.array([1, 7, 8, 9, 2]), (1, 2), 2, draw=5, number=0).tolist()
    [2, 3]
    """
    order = np.random.default_rng([draw, number]).random(len(row))
    order[np.isin(row, special)] += 1.0
    return np.sort(np.argsort(order, kind="stable")[:count])
