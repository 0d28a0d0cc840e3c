"""A finished run of classification, frozen: its encoder; heads with roles have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.heads.find import find_heads
from headwise.masks.head_mask import HeadMask
from headwise.roles.guide import Guidance, guide
from headwise.roles.idf import IDF
from headwise.roles.word_table import WordTable
from headwise.texts.batching import Encoded, Row, Span, collate_rows
from headwise.texts.frozen import Frozen, read_states
from headwise_lab.data.arrays import stable_key
from headwise_lab.experiment.arm import Guided
from headwise_lab.experiment.task import Task, name_run
from headwise_lab.frozen.runs import list_files, load_run, read_words, run_encoder
from headwise_lab.models.text_classifiers import SentenceTransformer, WordVectors
from headwise_lab.role_masks.sentences import RoleMasks
from headwise_lab.role_masks.stored import RARITY, ROLES, read_roles
from headwise_lab.tasks.classification.data import END, SPECIAL, START, UNKNOWN
from headwise_lab.tasks.classification.scales import ClassificationScale
from headwise_lab.tasks.classification.texts import word_tables
from headwise_lab.training.trained import read_arm, read_scale


def open_classifier(
    task: Task, kind: type[SentenceTransformer], folder: Path, record: Mapping[str, Any], pipeline: Path | None
) -> Frozen:
    """Return the encoder of a run of classification or probing, with role masks if it has them; see `read_roles`."""
    scale, (vocabulary, labels) = read_scale(folder, record, ClassificationScale), read_words(folder, "labels")

    def make() -> SentenceTransformer:
        return kind(WordVectors(len(vocabulary), scale.width, dropout=scale.dropout), len(labels), scale)

    encoder = load_run(folder, record, task, make).encoder
    heads, run, files, cut = find_heads(encoder), run_encoder(encoder), list_files(folder), scale
    guided = read_arm(folder, record).find(Guided)
    if guided is not None:
        rarity, parsed_by = read_roles(folder, guided, pipeline)
        masks = LineMasks(guided, rarity, num_heads=scale.heads, seed=int(record["seed"]))
        run, files = _guide(run, guide(heads), masks), (*files, folder / RARITY, folder / ROLES)
        cut = replace(scale, pipeline=parsed_by)
    ids = {token: index for index, token in enumerate(vocabulary) if index >= len(SPECIAL)}

    def read(lines: Sequence[str]) -> Iterable[Encoded]:
        rows = []
        for line, table in zip(lines, word_tables(lines, cut, None), strict=True):
            kept = table[: scale.max_words]
            numbers = [START, *(ids.get(word.lower(), UNKNOWN) for word in kept.words), END]
            shown = tuple(vocabulary[number] for number in numbers)
            places = [None, *_find_spans(line, kept), None]
            rows.append(Row(numbers, shown, places, kept, cut=len(table) > len(kept)))
        return collate_rows(rows, next(encoder.parameters()).device)

    def states(batch: Encoded) -> Sequence[Tensor]:
        layers: Any = encoder.layers
        return read_states(layers, lambda: run(batch))

    return Frozen(name_run(folder), encoder, heads, read, run, states, files, longest=f"{scale.max_words} words")


def _find_spans(line: str, table: WordTable) -> Sequence[Span]:
    """Return the characters of the first words of a line."""
    if table.text == line:
        return table.spans or ()
    # these words were separated by white space
    return [word.span() for word in re.finditer(r"\S+", line)][: len(table)]


def _guide(run: Callable[[Encoded], Tensor], guidance: Guidance, masks: LineMasks) -> Callable[[Encoded], Tensor]:
    def run_masked(batch: Encoded) -> Tensor:
        guidance(masks(batch))
        return run(batch)

    return run_masked


class LineMasks:
    """Makes the masks of batches of lines, whose tokens are the words with one token before and one after.

    A random mask depends on the run's seed and the words of the line; arguments as of `RoleMasks`.
    """

    def __init__(self, guided: Guided, rarity: IDF, *, num_heads: int, seed: int) -> None:
        self._tables: dict[int, WordTable] = {}
        table = self._tables.__getitem__
        self._masks = RoleMasks(guided, table, table, rarity, num_heads=num_heads, seed=seed)

    def __call__(self, batch: Encoded) -> HeadMask:
        """Return the masks of a batch with word tables."""
        assert batch.tables is not None
        numbers = [stable_key("line", *table.words) >> 1 for table in batch.tables]
        self._tables.update(zip(numbers, batch.tables, strict=True))
        return self._masks({"tokens": batch.inputs["input_ids"], "numbers": torch.tensor(numbers)})
