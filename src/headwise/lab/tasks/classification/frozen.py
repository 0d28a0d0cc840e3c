"""A finished run of classification, frozen: its encoder; heads with roles have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.heads.find import find_heads
from headwise.lab.data.encoded import Encoded, Row, Span, collate_rows
from headwise.lab.experiment.frozen import Frozen, name_run, read_states
from headwise.lab.experiment.guided import Guided
from headwise.lab.experiment.task import Task
from headwise.lab.frozen.runs import list_files, read_attending_arm, read_words, run_encoder
from headwise.lab.models.text_classifiers import SentenceTransformer, WordVectors
from headwise.lab.role_masks.lines import LineMasks
from headwise.lab.role_masks.stored import RARITY, ROLES, kept_roles
from headwise.lab.tasks.classification.data import END, SPECIAL, START, UNKNOWN
from headwise.lab.tasks.classification.scales import ClassificationScale
from headwise.lab.tasks.classification.texts import word_tables
from headwise.lab.training.trained import read_scale, restore_run
from headwise.roles.guide import Guidance, guide
from headwise.roles.word_table import WordTable


def open_classifier(
    task: Task, kind: type[SentenceTransformer], folder: Path, record: Mapping[str, Any], pipeline: Path | None
) -> Frozen:
    """Return the encoder of a run of classification or probing; heads with roles have them.

    Args:
        task: The task.
        kind: Its model.
        folder: The run's folder.
        record: Its settings.
        pipeline: As `kept_roles` takes it.
    """
    arm, seed = read_attending_arm(folder, record), int(record["seed"])
    scale = read_scale(folder, record, ClassificationScale)
    vocabulary, labels = read_words(folder, "labels")
    words = WordVectors(len(vocabulary), scale.width, dropout=scale.dropout)
    model = kind(words, len(labels), scale)
    restore_run(folder, arm, model, task, seed=seed)
    encoder = model.encoder
    heads, run, files, cut = find_heads(encoder), run_encoder(encoder), list_files(folder), scale
    guided = arm.find(Guided)
    if guided is not None:
        rarity, parsed_by = kept_roles(folder, guided, pipeline)
        masks = LineMasks(guided, rarity, num_heads=scale.heads, seed=seed)
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
    """Return the characters of a line that its first words stand for."""
    if table.text == line:
        return table.spans or ()
    # words that stood apart were separated by blanks, whatever these are
    return [word.span() for word in re.finditer(r"\S+", line)][: len(table)]


def _guide(run: Callable[[Encoded], Tensor], guidance: Guidance, masks: LineMasks) -> Callable[[Encoded], Tensor]:
    def masked(batch: Encoded) -> Tensor:
        guidance(masks(batch))
        return run(batch)

    return masked
