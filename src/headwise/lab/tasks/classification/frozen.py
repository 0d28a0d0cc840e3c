"""Finished runs whose tokens are words, frozen: classification and probing, sentence, and the formulas of logic.

Owns how a line becomes the ids such a run has, and which part of its model is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from torch import Tensor, nn

from headwise.errors import DataError
from headwise.heads.find import find_heads
from headwise.lab.data.arrays import numbered_lines
from headwise.lab.data.encoded import Encoded, Row, Span, batched
from headwise.lab.experiment import run_folder
from headwise.lab.experiment.arm import Arm
from headwise.lab.experiment.registry import named_task
from headwise.lab.frozen.fidelity import Agreement, Fidelity
from headwise.lab.frozen.model import Frozen, run_name, through
from headwise.lab.models.text_classifiers import SentenceTransformer, WordVectors
from headwise.lab.role_masks.lines import LineMasks
from headwise.lab.role_masks.stored import RARITY, ROLES, kept_roles
from headwise.lab.tasks.classification.data import END, SPECIAL, START, UNKNOWN
from headwise.lab.tasks.classification.scales import ClassificationScale
from headwise.lab.tasks.classification.texts import word_tables
from headwise.lab.tasks.logic.formulas import RELATIONS, bracket_fault
from headwise.lab.tasks.logic.model import PairClassifier
from headwise.lab.tasks.logic.scales import Scale
from headwise.lab.tasks.probing.model import ProbedTransformer
from headwise.lab.tasks.sentence.data import encode
from headwise.lab.tasks.sentence.model import SelfAttentive
from headwise.lab.tasks.sentence.scales import SentenceScale
from headwise.lab.tasks.sentence.words import words_in_place
from headwise.lab.training.finished import scale_record
from headwise.lab.training.trained import revived
from headwise.roles.guide import Guidance, guide
from headwise.roles.word_table import WordTable

VOCABULARY = "vocabulary.json"
MODELS: Mapping[str, type[SentenceTransformer]] = {"classification": SentenceTransformer, "probing": ProbedTransformer}
FORMULA = "a formula a line, such as ( not ( a ( and b ) ) )"


def frozen_classifier(folder: Path, record: Mapping[str, Any], arm: Arm, pipeline: Path | None) -> Frozen:
    """Return the encoder of a run of classification or probing; heads with roles have them.

    Args:
        folder: The run's folder.
        record: Its settings.
        arm: Its arm.
        pipeline: As `kept_roles` takes it.
    """
    task, scale, seed = str(record["task"]), scale_record(folder, record, ClassificationScale), int(record["seed"])
    vocabulary, labels = kept_words(folder, "labels")
    model = MODELS[task](_vectors(vocabulary, scale), len(labels), scale)
    revived(folder, replace(arm, guided=None), model, named_task(task), seed=seed)
    encoder = model.encoder
    heads, run, files, cut = find_heads(encoder), _whole(encoder), _files(folder), scale
    if arm.guided is not None:
        rarity, parsed_by = kept_roles(folder, arm.guided, pipeline)
        masks = LineMasks(arm.guided, rarity, num_heads=scale.heads, seed=seed)
        run, files = _guided(run, guide(heads), masks), (*files, folder / RARITY, folder / ROLES)
        cut = replace(scale, pipeline=parsed_by)
    ids = {token: index for index, token in enumerate(vocabulary) if index >= len(SPECIAL)}

    def read(lines: Sequence[str]) -> Iterable[Encoded]:
        rows = []
        for line, table in zip(lines, word_tables(lines, cut, None), strict=True):
            words = table[: scale.max_words]
            numbers = [START, *(ids.get(word.lower(), UNKNOWN) for word in words.words), END]
            shown = tuple(vocabulary[number] for number in numbers)
            places = [None, *_places(line, words), None]
            rows.append(Row(numbers, shown, places, words, cut=len(table) > len(words)))
        return batched(rows, next(encoder.parameters()).device)

    def states(batch: Encoded) -> Sequence[Tensor]:
        layers: Any = encoder.layers
        return through(layers, lambda: run(batch))

    return Frozen(run_name(folder), encoder, heads, read, run, states, files, longest=f"{scale.max_words} words")


def frozen_sentence(folder: Path, record: Mapping[str, Any], arm: Arm) -> Frozen:
    """Return the model of a run of sentence; of one that compares two texts, the part that reads each of them."""
    scale = scale_record(folder, record, SentenceScale)
    vocabulary, labels = kept_words(folder, "labels")
    with safe_open(str(folder / run_folder.WEIGHTS), "pt") as weights:
        pairs = any(name.startswith("gate.") for name in weights.keys())  # noqa: SIM118  it is no mapping
    model = SelfAttentive(_vectors(vocabulary, scale), len(labels), scale, texts=1 + pairs)
    revived(folder, arm, model, named_task("sentence"), seed=int(record["seed"]))
    read = OneText(model) if pairs else model

    def row(sentence: str) -> Row:
        whole = next(words_in_place([sentence]))
        found = whole[: scale.max_words]
        numbers = encode([word for word, _ in found], vocabulary)
        shown = tuple(
            word if one != UNKNOWN else vocabulary[UNKNOWN] for (word, _), one in zip(found, numbers, strict=True)
        )
        return Row(numbers, shown, [span for _, span in found], cut=len(whole) > len(found))

    def run(batch: Encoded) -> Tensor:
        found = read(batch.inputs["input_ids"])
        return found if isinstance(found, Tensor) else found["logits"]

    return Frozen(
        run_name(folder),
        read,
        find_heads(read),
        _rows(row, read),
        run,
        None,
        _files(folder),
        score=Fidelity if pairs else Agreement,
        note="This run compares two texts; each line was read as one, and fidelity is of its heads side by side."
        if pairs
        else "",
        longest=f"{scale.max_words} words",
    )


def frozen_logic(folder: Path, record: Mapping[str, Any], arm: Arm) -> Frozen:
    """Return the encoder of a run of logic, which reads formulas."""
    (vocabulary,) = kept_words(folder)
    model = PairClassifier(len(vocabulary), len(RELATIONS), scale_record(folder, record, Scale))
    revived(folder, arm, model, named_task("logic"), seed=int(record["seed"]))
    encoder, ids = model.encoder, {token: index for index, token in enumerate(vocabulary)}

    def formulas(path: Path) -> list[str]:
        found = []
        for number, line in numbered_lines(path):
            tokens = line.split()
            strange = next((token for token in tokens if token not in ids), None)
            fault = f"{strange!r} is none of the run's tokens" if strange is not None else bracket_fault(tokens)
            if tokens and fault:
                raise DataError(f"{path}, line {number}: {fault}; expected {FORMULA}.")
            found += [" ".join(tokens)] if tokens else []
        if not found:
            raise DataError(f"{path} holds no text; expected {FORMULA}.")
        return found

    def row(formula: str) -> Row:
        tokens = formula.split()
        return Row([ids[token] for token in tokens], tuple(tokens))

    return Frozen(
        run_name(folder),
        encoder,
        find_heads(encoder),
        _rows(row, encoder),
        _whole(encoder),
        None,
        _files(folder),
        lines=formulas,
        note="Of this run the encoder was looked at, which reads each formula of a pair alone.",
    )


class OneText(nn.Module):
    """Returns the heads of each text side by side, [B, r * d], of ids [B, L], by a model that compares two.

    Args:
        model: The model.
    """

    def __init__(self, model: SelfAttentive) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the heads."""
        return self.model.attention_of(tokens)[0]


def kept_words(folder: Path, *others: str) -> list[list[str]]:
    """Return the vocabulary a run keeps, and other lists beside it.

    Raises:
        DataError: The run does not keep them.
    """
    kept = run_folder.read_json(folder / VOCABULARY)
    try:
        return [[str(one) for one in kept[name]] for name in ("vocabulary", *others)]
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / VOCABULARY} does not say the run's words ({error}); train it again.") from error


def _vectors(vocabulary: Sequence[str], scale: ClassificationScale | SentenceScale) -> WordVectors:
    known = np.zeros((0, scale.width), dtype=np.float32)
    return WordVectors(
        len(vocabulary), scale.width, dropout=scale.dropout, ids=np.array([], dtype=np.int64), known=known
    )


def _places(line: str, table: WordTable) -> Sequence[Span]:
    """Return the characters of a line that its first words stand for."""
    if table.text == line:
        return table.spans or ()
    # words that stood apart were separated by blanks, whatever these are
    return [word.span() for word in re.finditer(r"\S+", line)][: len(table)]


def _rows(row: Callable[[str], Row], model: nn.Module) -> Callable[[Sequence[str]], Iterable[Encoded]]:
    device = next(model.parameters()).device
    return lambda lines: batched([row(line) for line in lines], device)


def _whole(encoder: nn.Module) -> Callable[[Encoded], Tensor]:
    return lambda batch: encoder(batch.inputs["input_ids"], ~batch.keep)


def _guided(run: Callable[[Encoded], Tensor], guidance: Guidance, masks: LineMasks) -> Callable[[Encoded], Tensor]:
    def masked(batch: Encoded) -> Tensor:
        guidance(masks(batch))
        return run(batch)

    return masked


def _files(folder: Path) -> tuple[Path, ...]:
    return tuple(folder / file for file in (run_folder.SETTINGS, run_folder.WEIGHTS, VOCABULARY))
