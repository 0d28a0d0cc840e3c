"""Documents packed into rows of one length, and the positions by which attention stays inside each document."""

import numpy as np
from numpy.typing import NDArray

from headwise.errors import SettingError
from headwise.lab.training.processes import IGNORED


class Packer:
    """Packs ids into rows without padding; each row begins with the last token of the row before it.

    A document is [start] x_1 ... x_n, and [end] after it where that is another token; else the next document's start
    is its end. As rows overlap by one token, every token but the first is predicted exactly once.

    Args:
        length: Tokens of a row.
        start: Id of the token that documents begin with.
        end: Id of the token that they end with.

    Attributes:
        held: Ids not yet in a row, the first of them the last of the row before.
        rows: Rows made so far.

    Example:
        >>> packer = Packer(4, start=1, end=2)
        >>> packer.add([7, 8, 9], ends=True).tolist(), packer.held
        ([[1, 7, 8, 9]], [9, 2, 1])
    """

    def __init__(self, length: int, start: int, end: int) -> None:
        if length < 2:
            raise SettingError(f"length is {length}; expected at least 2, a token and the next.")
        self.length, self.start, self.end = length, start, end
        self.held, self.rows = [start], 0

    def add(self, ids: list[int], *, ends: bool) -> NDArray[np.int64]:
        """Add tokens and return the rows that are full now, [R, length].

        Args:
            ids: The next tokens.
            ends: Whether their document ends with them.
        """
        self.held.extend(ids)
        if ends:
            self.held.extend((self.start,) if self.end == self.start else (self.end, self.start))
        step = self.length - 1
        count = max(0, (len(self.held) - 1) // step)
        made = [self.held[number * step : number * step + self.length] for number in range(count)]
        del self.held[: count * step]
        self.rows += count
        return np.array(made, dtype=np.int64).reshape(count, self.length)


def number_positions(ids: NDArray[np.int64], start: int) -> NDArray[np.int64]:
    """Return the position of each token in its document, [*, T], from 0 at the row's beginning where it began before.

    Models of transformers attend inside each run of rising positions only.

    >>> number_positions(np.array([7, 2, 1, 8, 9]), start=1).tolist()
    [0, 1, 0, 1, 2]
    """
    places = np.arange(ids.shape[-1])
    begins = np.where(ids == start, places, 0)
    return places - np.maximum.accumulate(begins, axis=-1)


def make_labels(ids: NDArray[np.int64], start: int, end: int) -> NDArray[np.int64]:
    """Return the labels of a row: its tokens, but the start of a document after the end of another, [*, T].

    Where one token is both, a start is the end of the document before it, and is predicted.

    >>> make_labels(np.array([7, 2, 1, 8]), start=1, end=2).tolist()
    [7, 2, -100, 8]
    """
    return ids.copy() if start == end else np.where(ids == start, IGNORED, ids)
