"""Role masks of the source side of a translation: from the ids an encoder reads to words, and to their subwords."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headwise.errors import DataError
from headwise.masks.head_mask import HeadMask
from headwise.roles.idf import IDF, idf
from headwise.roles.word_table import WordTable
from headwise.texts.batching import Pieces, make_pieces
from headwise_lab.data.arrays import Ragged, stable_key
from headwise_lab.data.subwords import Subwords
from headwise_lab.experiment.arm import Guided
from headwise_lab.experiment.seeding import derive_key
from headwise_lab.role_masks.sentences import Donors, RoleMasks
from headwise_lab.role_masks.stored import read_roles

Parse = Callable[[Sequence[str]], list[WordTable]]
# Separates the digests of corpus and pipeline in the fingerprint of the data.
PARSED_BY = "+"
UNREADABLE = "\ufffd"


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
        """Return the number of each source; new sources are added and parsed together."""
        found, new = [], []
        for source in sources:
            ids = tuple(source)
            number = stable_key("source", *map(str, ids)) >> 1
            found.append(number)
            if number not in self._ids:
                self._ids[number] = ids
                new.append(number)
        # a source cut inside a character ends in a replacement character, which would be a separate word
        texts = [self.subwords.decode(self._ids[number]).rstrip(UNREADABLE) for number in new]
        self._tables.update(zip(new, self.parse(texts), strict=True))
        return found

    def table(self, number: int) -> WordTable:
        """Return the words of a source."""
        return self._tables[number]

    def pieces(self, number: int) -> Pieces:
        """Return the tokens of a source; a truncated one may end inside a word, whose last subwords then differ."""
        (*ids, _end), table = self._ids[number], self._tables[number]
        text = table.text or ""
        encoding = self.subwords.tokenizer.encode(text, add_special_tokens=False)
        again = [self.subwords.shift + id_ for id_ in encoding.ids]
        offsets = list(encoding.offsets)
        if again != ids:
            both = zip(again, ids, strict=False)
            same = next((place for place, (a, b) in enumerate(both) if a != b), min(len(again), len(ids)))
            known = offsets[same - 1][1] if same else 0
            last = table.spans[-1][0] if table.spans else 0
            if text[known:last].strip():
                raise DataError(
                    f"the subwords of {text[:60]!r} do not come back from their text; role masks need a tokenizer that "
                    "gives a text back as it was, as one that is learned here."
                )
            offsets = [*offsets[:same], *[(last, len(text))] * (len(ids) - same)]
        # END is in no word
        return make_pieces([*offsets, None])

    def forget(self) -> None:
        """Drop every source; its number stays the same."""
        self._ids.clear()
        self._tables.clear()


class SourceMasks:
    """Makes the mask of a batch of sources."""

    def __init__(
        self,
        guided: Guided,
        sources: Sources,
        rarity: IDF,
        donors: Callable[[int], WordTable],
        *,
        num_heads: int,
        seed: int,
        pipeline: Path | None = None,
    ) -> None:
        self.sources = sources
        self.masks = RoleMasks(
            guided,
            sources.table,
            donors,
            rarity,
            num_heads=num_heads,
            seed=seed,
            encoding=sources.pieces,
            pipeline=pipeline,
        )

    def __call__(self, batch: Mapping[str, Any]) -> HeadMask:
        """Return the mask of "input_ids" [B, S]; "attention_mask" [B, S] is 1 at real tokens."""
        ids, real = batch["input_ids"], batch["attention_mask"].bool()
        rows = [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]
        return self.masks({"tokens": ids.masked_fill(~real, 0), "numbers": torch.tensor(self.sources.numbers(rows))})

    def keep(self, folder: Path) -> None:
        """Write the files that `read_masks` reads into a run's folder."""
        self.masks.keep(folder)

    def forget(self) -> None:
        """Drop the sources and their masks, which are the same when they are made again."""
        self.sources.forget()
        self.masks.forget()


def learn_masks(
    guided: Guided, sources: Sources, train: Ragged, *, num_heads: int, seed: int, pipeline: Path | None = None
) -> SourceMasks:
    """Return the masks with the rarity of words, and the donors of other parses, of the training sources."""
    pool = sources.numbers(train[index] for index in range(len(train)))
    lengths = {number: len(sources.table(number)) for number in pool}
    donors = Donors(sources.table, lengths, pool, derive_key(seed, "shuffled parse"))
    rarity = idf([sources.table(number).words for number in pool])
    return SourceMasks(guided, sources, rarity, donors, num_heads=num_heads, seed=seed, pipeline=pipeline)


def read_masks(
    folder: Path, guided: Guided, subwords: Subwords, pipeline: Path | None, *, num_heads: int, seed: int
) -> SourceMasks:
    """Return the masks of new sources, from the files of a finished run."""
    rarity, found = read_roles(folder, guided, pipeline)
    sources = Sources(subwords, make_parser(found, None))
    # only a role from another sentence's parse asks for that
    donors = sources.table
    return SourceMasks(guided, sources, rarity, donors, num_heads=num_heads, seed=seed, pipeline=found)


def make_parser(pipeline: Path | None, cache: Path | None) -> Parse:
    """Return a function from texts to word tables: parsed by a pipeline and cached in a folder, if they are given."""
    if pipeline is None:
        return lambda texts: [WordTable.split(text) for text in texts]
    # spaCy takes seconds to import, and is needed only where a pipeline is named
    from headwise.roles.spacy import Parser

    parse = Parser(str(pipeline), cache=cache, progress=cache is not None)
    if cache is not None:
        return parse

    def parse_once(texts: Sequence[str]) -> list[WordTable]:
        tables = parse(texts)
        parse.forget()
        return tables

    return parse_once
