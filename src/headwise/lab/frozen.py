"""A trained model, frozen, as something that turns sentences into states: of any layer, and of any head.

Owns the opening of a folder of Hugging Face or of a run, and how the states of its layers are read. What is done with
them is `encodings`'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.checks import DataError, HeadwiseError
from headwise.heads import Heads
from headwise.lab import runs
from headwise.lab.batches import length_sorted
from headwise.lab.inspected import BATCH, Encoded, opened_folder
from headwise.lab.inspected_run import source_batches
from headwise.lab.models.probing import ProbedTransformer
from headwise.lab.models.sentence import SentenceTransformer, WordVectors
from headwise.lab.tasks.classification_data import END, SPECIAL, START, UNKNOWN
from headwise.lab.tasks.classification_scales import ClassificationScale
from headwise.lab.tasks.named import named_task
from headwise.lab.trained import read_arm, revived
from headwise.lab.translator import open_translator
from headwise.layouts import find_heads

__all__ = ["Frozen", "open_frozen"]

MODELS: Mapping[str, type[SentenceTransformer]] = {"classification": SentenceTransformer, "probing": ProbedTransformer}
VOCABULARY = "vocabulary.json"
# What a folder of Hugging Face holds that its states do not follow from.
BESIDE = {".md", ".h5", ".msgpack", ".onnx", ".ot"}


@dataclass(frozen=True, eq=False)
class Frozen:
    """A model that is only read.

    Attributes:
        name: What it is called, after its folder.
        model: The model, or the part of it that is read, in evaluation mode.
        heads: Its heads.
        read: Returns sentences as it takes them, in batches.
        states: Runs it on a batch and returns the states [B, n, d] before its first layer and after each layer; the
            last are those it puts out.
        files: Everything its states follow from.
        note: What a reader should know of what was left out; "" for nothing.
    """

    name: str
    model: nn.Module
    heads: Heads
    read: Callable[[Sequence[str]], Iterable[Encoded]]
    states: Callable[[Encoded], Sequence[Tensor]]
    files: tuple[Path, ...]
    note: str = ""


def open_frozen(folder: Path) -> Frozen:
    """Return the model of a folder of Hugging Face, or of a finished run of translation, classification or probing.

    Raises:
        DataError: The folder holds no such model, or what it holds cannot be read.
        LayoutError: The heads of the model cannot be found.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist; expected a folder of save_pretrained(), or a finished run.")
    return _run(folder) if (folder / runs.SETTINGS).is_file() else _pretrained(folder)


def _pretrained(folder: Path) -> Frozen:
    opened = opened_folder(folder)
    model = opened.model

    def states(batch: Encoded) -> Sequence[Tensor]:
        return model(**batch.inputs, output_hidden_states=True).hidden_states

    beside = (path for path in folder.iterdir() if path.is_file() and path.name[0] != "." and path.suffix not in BESIDE)
    return Frozen(
        folder.resolve().name, model, find_heads(model), opened.encoded, states, tuple(sorted(beside)), opened.note
    )


def _run(folder: Path) -> Frozen:
    record = runs.read_json(folder / runs.SETTINGS)
    task = record.get("task") if isinstance(record, dict) else None
    if task != "translation" and task not in MODELS:
        raise DataError(
            f"{folder} holds a run of {task or 'no task'}; probe takes runs of translation, "
            f"{' and '.join(MODELS)}, whose text are sentences, and folders of Hugging Face."
        )
    name = f"{folder.resolve().parent.name}-{folder.resolve().name}"
    if task == "translation":
        translator = open_translator(folder)
        encoder = translator.model.get_encoder()
        files = tuple(path for path in sorted(folder.iterdir()) if path.name in (runs.WEIGHTS, "tokenizer.json"))
        return Frozen(
            name,
            encoder,
            find_heads(encoder),
            lambda sentences: source_batches(translator, sentences),
            lambda batch: _of_encoder(encoder, batch),
            (folder / runs.SETTINGS, *files),
            "Of this run the encoder was probed.",
        )
    return _classifier(folder, name, record)


def _classifier(folder: Path, name: str, record: Mapping[str, Any]) -> Frozen:
    if "arm" not in record or not runs.is_finished(folder):
        raise DataError(f"{folder} holds no finished run of a model; give the command that began it again.")
    arm = read_arm(folder, record)
    if arm.guided is not None or arm.model is not None:
        why = "its heads have roles, which need each sentence's parse" if arm.model is None else "it has no attention"
        raise DataError(f"{folder} cannot be probed: {why}.")
    known = {field.name for field in fields(ClassificationScale)}
    kept = runs.read_json(folder / VOCABULARY)
    try:
        scale = ClassificationScale(**{key: value for key, value in record["scale"].items() if key in known})
        vocabulary, labels = list(kept["vocabulary"]), list(kept["labels"])
    except (KeyError, TypeError, AttributeError, HeadwiseError) as error:
        raise DataError(f"{folder} does not say the sizes of its model ({error}); train it again.") from error
    none = np.array([], dtype=np.int64), np.zeros((0, scale.width), dtype=np.float32)
    words = WordVectors(len(vocabulary), scale.width, dropout=scale.dropout, ids=none[0], known=none[1])
    model = MODELS[record["task"]](words, len(labels), scale)
    methods = revived(folder, arm, model, named_task(record["task"]), seed=int(record["seed"]))
    encoder = model.encoder
    assert methods.heads is not None  # an arm without a model of its own has heads
    return Frozen(
        name,
        encoder,
        find_heads(encoder),
        lambda sentences: _words(sentences, vocabulary, scale.max_words, next(encoder.parameters()).device),
        lambda batch: _through(encoder.layers, lambda: encoder(batch.inputs["tokens"], ~batch.keep)),
        tuple(folder / file for file in (runs.SETTINGS, runs.WEIGHTS, VOCABULARY)),
    )


def _of_encoder(encoder: Any, batch: Encoded) -> Sequence[Tensor]:
    from transformers import PreTrainedModel

    if isinstance(encoder, PreTrainedModel):
        return encoder(**batch.inputs, output_hidden_states=True).hidden_states
    return _through(encoder.layers, lambda: encoder(**batch.inputs).last_hidden_state)


def _through(layers: Iterable[nn.Module], call: Callable[[], Tensor]) -> list[Tensor]:
    """Return the input of the first layer, the outputs of all but the last, and what the call returns."""
    seen: list[Tensor] = []
    stack = list(layers)

    def after(_layer: nn.Module, _given: tuple[Any, ...], output: Tensor) -> None:
        seen.append(output)

    def before(_layer: nn.Module, given: tuple[Any, ...]) -> None:
        seen.append(given[0])

    handles = [layer.register_forward_hook(after) for layer in stack] + [stack[0].register_forward_pre_hook(before)]
    try:
        final = call()
    finally:
        for handle in handles:
            handle.remove()
    return [*seen[:-1], final]


def _words(sentences: Sequence[str], vocabulary: Sequence[str], most: int, device: torch.device) -> Iterator[Encoded]:
    ids = {token: index for index, token in enumerate(vocabulary) if index >= len(SPECIAL)}
    rows = [
        [START, *(ids.get(word, UNKNOWN) for word in sentence.lower().split()[:most]), END] for sentence in sentences
    ]
    for number, chosen in enumerate(length_sorted([len(row) for row in rows], BATCH)):
        width = max(len(rows[place]) for place in chosen)
        tokens = torch.tensor([rows[place] + [0] * (width - len(rows[place])) for place in chosen], device=device)
        shown = tuple(tuple(vocabulary[index] for index in rows[place]) for place in chosen)
        yield Encoded(number, tuple(chosen), {"tokens": tokens}, tokens != 0, shown)
