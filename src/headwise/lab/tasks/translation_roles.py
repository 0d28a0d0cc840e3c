"""Role masks of the source side of a translation: from the ids an encoder reads back to words, and to their subwords.

Owns the words of each source and which subwords stand for them. Masks themselves are made and kept by `sentence_masks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headwise.checks import DataError
from headwise.lab.data import Ragged, stable_key
from headwise.lab.guided import Guided
from headwise.lab.protocol import key
from headwise.lab.sentence_masks import Donors, RoleMasks
from headwise.lab.tasks.subwords import END, Subwords
from headwise.masks import HeadMask
from headwise.word_rarity import idf
from headwise.word_tables import WordTable

__all__ = ["SourceMasks", "Sources", "parser"]

Parse = Callable[[Sequence[str]], list[WordTable]]


@dataclass(frozen=True)
class Pieces:
    """The tokens of a source as `headwise.align.align` reads them: its subwords, and END, which is in no word."""

    offsets: Sequence[tuple[int, int]]
    sequence_ids: Sequence[int | None]
    special_tokens_mask: Sequence[int]
    attention_mask: Sequence[int]


class Sources:
    """Sources by a number that follows from their ids alone, with their words.

    Args:
        subwords: Ids to text.
        parse: Texts to word tables.
    """

    def __init__(self, subwords: Subwords, parse: Parse) -> None:
        self.subwords, self.parse = subwords, parse
        self._ids: dict[int, tuple[int, ...]] = {}
        self._tables: dict[int, WordTable] = {}

    def numbers(self, sources: Iterable[Sequence[int]]) -> list[int]:
        """Return the number of each source, and take in those that are new; all of them are parsed at once."""
        found, new = [], []
        for source in sources:
            ids = tuple(source)
            number = stable_key("source", *map(str, ids)) >> 1
            found.append(number)
            if number not in self._ids:
                self._ids[number] = ids
                new.append(number)
        texts = [self.subwords.decode(self._ids[number]) for number in new]
        self._tables.update(zip(new, self.parse(texts), strict=True))
        return found

    def table(self, number: int) -> WordTable:
        """Return the words of a source."""
        return self._tables[number]

    def pieces(self, number: int) -> Pieces:
        """Return the tokens of a source.

        Raises:
            DataError: Its ids do not come back from their text, so their characters are not known.
        """
        ids, text = self._ids[number], self._tables[number].text or ""
        encoding = self.subwords.tokenizer.encode(text, add_special_tokens=False)
        again = [self.subwords.shift + id_ for id_ in encoding.ids]
        if [*again, END] != list(ids):
            raise DataError(
                f"the subwords of {text[:60]!r} do not come back from their text; role masks need a tokenizer that "
                "gives a text back as it was, as one that is learned here."
            )
        count = len(again)
        return Pieces([*encoding.offsets, (0, 0)], [0] * count + [None], [0] * count + [1], [1] * (count + 1))


class SourceMasks:
    """Makes the mask of a batch of sources.

    Args:
        guided: The roles and what replaces them.
        sources: The sources.
        train: Ids of the training sources, which the rarity of words and other parses are taken from.
        num_heads: Heads of a layer of the encoder.
        seed: Seed of the run.
    """

    def __init__(self, guided: Guided, sources: Sources, train: Ragged, *, num_heads: int, seed: int) -> None:
        self.sources = sources
        pool = sources.numbers(train[index] for index in range(len(train)))
        lengths = {number: len(sources.table(number)) for number in pool}
        self.masks = RoleMasks(
            guided,
            sources.table,
            Donors(sources.table, lengths, pool, key(seed, "shuffled parse")),
            idf([sources.table(number).words for number in pool]),
            num_heads=num_heads,
            seed=seed,
            encoding=sources.pieces,
        )
        self.heads = self.masks.heads

    def __call__(self, batch: Mapping[str, Any]) -> HeadMask:
        """Return the mask of "input_ids" [B, S], of which "attention_mask" [B, S] says which are real."""
        ids, real = batch["input_ids"], batch["attention_mask"].bool()
        rows = [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]
        return self.masks({"tokens": ids.masked_fill(~real, 0), "numbers": torch.tensor(self.sources.numbers(rows))})


def parser(pipeline: Path | None, cache: Path) -> Parse:
    """Return what makes word tables of texts: a pipeline whose parses are kept in `cache`, or without one no parses."""
    if pipeline is None:
        return lambda texts: [WordTable.split(text) for text in texts]
    # spaCy takes seconds to import, and is needed only where a pipeline is named
    from headwise.bridges.spacy import Parser

    return Parser(str(pipeline), cache=cache)
