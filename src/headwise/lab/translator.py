"""A finished run of the translation task as something that translates.

Owns what a run's folder has to hold for that, and building its model again: the sizes and the routing of its
settings, its weights, its subwords.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model

from headwise.checks import DataError, HeadwiseError, require_integer, require_range
from headwise.lab import runs
from headwise.lab.arms import Arm
from headwise.lab.methods import Methods
from headwise.lab.results import COMPARISON
from headwise.lab.tasks.subwords import END, Subwords, read_subwords
from headwise.lab.tasks.translation import translation_model
from headwise.lab.tasks.translation_decoding import decoded, longest_source
from headwise.lab.tasks.translation_preparation import TOKENIZER
from headwise.lab.tasks.translation_scales import TranslationScale
from headwise.setting_records import restored

__all__ = ["Decoding", "Translator", "open_translator"]

TASK = "translation"


@dataclass(frozen=True)
class Decoding:
    """How translations are searched for.

    Attributes:
        beams: Beams of the search; 1 is greedy.
        length_penalty: p in the score log P / length^p.
        batch: Most lines decoded together.

    Raises:
        SettingError: `beams` or `batch` is below 1, or the length penalty is not finite.
    """

    beams: int
    length_penalty: float
    batch: int = 32

    def __post_init__(self) -> None:
        require_integer("beams", self.beams, low=1)
        require_integer("batch", self.batch, low=1)
        require_range("length_penalty", self.length_penalty)


@dataclass(frozen=True, eq=False)
class Translator:
    """A trained model with its subwords.

    Attributes:
        model: The model, in evaluation mode.
        subwords: Its text to ids and back.
        decoding: How it searches.
    """

    model: Any
    subwords: Subwords
    decoding: Decoding

    @property
    def longest(self) -> int:
        """Subwords of a line that are translated; what stands behind them is not."""
        return longest_source(self.model) - 1

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the subwords of each line, without an end."""
        return self.subwords.encode_batch(lines)

    def translate(self, sources: Sequence[list[int]]) -> list[str]:
        """Return the translation of each encoded line, in their order; that of a line without subwords is empty."""
        told = [index for index, ids in enumerate(sources) if ids]
        found = decoded(
            self.model,
            [[*sources[index], END] for index in told],
            self.subwords,
            beams=self.decoding.beams,
            length_penalty=self.decoding.length_penalty,
            examples=self.decoding.batch,
        )
        lines = [""] * len(sources)
        for index, line in zip(told, found, strict=True):
            lines[index] = line
        return lines


def open_translator(
    folder: Path, *, beams: int | None = None, length_penalty: float | None = None, batch: int = 32
) -> Translator:
    """Return what a finished run of the translation task learned.

    Args:
        folder: The run's folder, such as `runs/translation-demo/plain/seed-0`.
        beams: Beams of the search; None for those the run was tested with.
        length_penalty: Likewise.
        batch: As in `Decoding`.

    Raises:
        DataError: The folder holds no run, an unfinished one, one of another task, or a file is missing or damaged.
        SettingError: A setting is outside its range.
    """
    record = _record(folder)
    scale = _scale(folder, record)
    decoding = Decoding(
        scale.beams if beams is None else beams,
        scale.length_penalty if length_penalty is None else length_penalty,
        batch,
    )
    for name in (runs.WEIGHTS, TOKENIZER):
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing; a run keeps it when it ends: train this one again.")
    subwords = read_subwords(folder / TOKENIZER)
    model: Any = translation_model(scale, subwords.vocabulary_size)
    _aggregate(model, folder, record)
    try:
        load_model(model, str(folder / runs.WEIGHTS))
    except (SafetensorError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{folder / runs.WEIGHTS} does not hold the weights of this run ({reason}).") from error
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return Translator(model, subwords, decoding)


def _record(folder: Path) -> Mapping[str, Any]:
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {state}; expected the folder of a finished run of headwise compare {TASK}.")
    if not (folder / runs.SETTINGS).is_file():
        inside = sorted(path.parent for path in folder.glob(f"*/*/{runs.WEIGHTS}"))
        advice = f"name one of its runs, such as {inside[0]}" if inside else "expected the folder of a finished run"
        kind = "holds a comparison" if (folder / COMPARISON).is_file() else "holds no run"
        raise DataError(f"{folder} {kind} (it has no {runs.SETTINGS}); {advice}.")
    record = runs.read_json(folder / runs.SETTINGS)
    task = record.get("task") if isinstance(record, dict) else None
    if task != TASK:
        raise DataError(f"{folder} holds a run of {task or 'no task'}; expected one of {TASK}.")
    if "arm" not in record:
        raise DataError(f"{folder} holds the baseline {record.get('baseline')!r}, which has no model; name a run.")
    if isinstance(record["arm"], dict) and record["arm"].get("guided") is not None:
        raise DataError(
            f"{folder} holds the run {record['arm'].get('name')}, whose heads are guided by masks of the source's "
            "words, which are not made here; its translations of the test set are in predictions.txt there."
        )
    if not runs.is_finished(folder):
        raise DataError(f"{folder} holds a run that is not finished; give the command that began it again.")
    return record


def _scale(folder: Path, record: Mapping[str, Any]) -> TranslationScale:
    known = {field.name for field in fields(TranslationScale)}
    try:
        return TranslationScale(**{name: value for name, value in record["scale"].items() if name in known})
    except (KeyError, TypeError, AttributeError, HeadwiseError) as error:
        raise DataError(
            f"{folder / runs.SETTINGS} does not say the sizes of the model ({error}); was it made by another version?"
        ) from error


def _aggregate(model: Any, folder: Path, record: Mapping[str, Any]) -> None:
    """Put what the run has in the place of output projections into the model; nothing else of an arm outlives it."""
    try:
        arm = record["arm"]
        setting = restored(_named(arm["aggregation"]))
        layers, kinds = (
            None if arm[f"aggregation_{name}"] is None else tuple(arm[f"aggregation_{name}"])
            for name in ("layers", "kinds")
        )
        if setting is not None:
            kept = Arm("kept", aggregation=setting, aggregation_layers=layers, aggregation_kinds=kinds)
            Methods(kept, model, model, seed=0)
    except (KeyError, TypeError, HeadwiseError) as error:
        raise DataError(
            f"{folder / runs.SETTINGS} does not say what routes the heads ({error}); was it made by another version?"
        ) from error


def _named(value: Any) -> Any:
    """Return a value of `runs.as_record` as `setting_records` writes it."""
    if isinstance(value, dict):
        return {"setting" if name == "kind" else name: _named(inner) for name, inner in value.items()}
    return [_named(inner) for inner in value] if isinstance(value, list) else value
