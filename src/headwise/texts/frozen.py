"""A trained model that is only read: lines of a text go in, states come out; and how much its output moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import SettingError
from headwise.heads.heads import Heads
from headwise.heads.record import keep, record
from headwise.texts.batching import Encoded, read_sentences
from headwise.texts.tables import USUAL, Columns


class Fidelity:
    """How little vectors move: mean_t cos(h_t, h'_t), h' without a head, over the tokens of a text.

    Outputs are [B, n, d], or [B, d] where a text has one vector. They are compared with the first output of the same
    batch: `measure` computes that of the whole model first, whose own score is 1.
    """

    name = "fidelity"

    def __init__(self) -> None:
        self._number, self._whole = -1, torch.empty(0)

    def __call__(self, output: Tensor, batch: Encoded) -> Tensor:
        """Return one number per text, [B]."""
        if batch.number != self._number:
            self._number, self._whole = batch.number, output
        return self._compare(output.double(), self._whole.double(), batch.keep)

    def _compare(self, output: Tensor, whole: Tensor, keep: Tensor, /) -> Tensor:
        cosines = nn.functional.cosine_similarity(output, whole, dim=-1)
        return cosines if cosines.dim() == 1 else (cosines * keep).sum(1) / keep.sum(1)


class Agreement(Fidelity):
    """How little a classifier's answer moves: sum_c min(p_c, p'_c) over classes, p' without a head.

    It is 1 less the total variation distance of both answers. Outputs are logits, [B, C].
    """

    name = "agreement"

    def _compare(self, output: Tensor, whole: Tensor, _keep: Tensor, /) -> Tensor:
        return torch.minimum(output.softmax(-1), whole.softmax(-1)).sum(-1)


@dataclass(frozen=True, eq=False)
class Frozen:
    """A model that is only read.

    Attributes:
        name: What it is called, after its folder.
        model: The model, or the part of it that is read, in evaluation mode.
        heads: Its heads.
        read: Returns lines as it takes them, in batches.
        run: Runs the model on a batch and returns what it puts out, one forward of `model`.
        states: Returns the states [B, n, d] before its first layer and after each layer; the last are its output.
            None where lines are no sentences, or tokens have no state in each layer.
        files: Everything its states follow from.
        lines: Returns the lines of a text file.
        score: Makes the measure of how little its output changes.
        note: What a reader should know of what was left out; "" for nothing.
        longest: How much of a line is read, such as "256 tokens"; "" for all of it.
    """

    name: str
    model: nn.Module = field(repr=False)
    heads: Heads
    read: Callable[[Sequence[Any]], Iterable[Encoded]]
    run: Callable[[Encoded], Tensor]
    states: Callable[[Encoded], Sequence[Tensor]] | None
    files: tuple[Path, ...]
    lines: Callable[[Path], Sequence[Any]] = read_sentences
    score: Callable[[], Fidelity] = Fidelity
    note: str = ""
    longest: str = ""

    def read_text(self, path: Path, columns: Columns = USUAL) -> Sequence[Any]:
        """Return the lines of a file, or the sentences in the columns of a table.

        Raises:
            DataError: The file cannot be read.
            SettingError: Columns are named, and its lines are not sentences.
        """
        columns.require(1)
        if self.reads_sentences:
            return read_sentences(path, columns)
        if columns.names:
            raise SettingError(f"the lines of {self.name} are no sentences in columns; omit --text-column.")
        return self.lines(path)

    @property
    def reads_sentences(self) -> bool:
        """Whether its lines are sentences, and not formulas or graphs."""
        return self.lines is read_sentences


def read_states(layers: Iterable[nn.Module], call: Callable[[], Tensor]) -> list[Tensor]:
    """Return the input of the first layer, the outputs of all but the last, and what the call returns."""
    stack = list(layers)
    with record(stack, inputs=keep, outputs=keep) as calls:
        final = call()
    return [calls[0].args[0], *(one.output for one in calls[:-1]), final]
