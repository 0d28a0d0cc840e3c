"""A finished run of the translation task as something that translates.

Owns what a run's folder has to hold for that: the sizes and the arm of its settings, its weights, its subwords, and
what its roles are made from. Building the model again is `trained`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headwise.checks import DataError, HeadwiseError, require_integer, require_range
from headwise.lab import runs
from headwise.lab.results import COMPARISON
from headwise.lab.tasks.named import named_task
from headwise.lab.tasks.subwords import END, Subwords, read_subwords
from headwise.lab.tasks.translation import translation_model
from headwise.lab.tasks.translation_decoding import decoded, longest_source
from headwise.lab.tasks.translation_preparation import TOKENIZER
from headwise.lab.tasks.translation_roles import SourceMasks, kept_masks
from headwise.lab.tasks.translation_scales import TranslationScale
from headwise.lab.trained import read_arm, revived

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
        masks: Makes the role masks of sources, where heads of the model have roles.
    """

    model: Any
    subwords: Subwords
    decoding: Decoding
    masks: SourceMasks | None = None

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
        if self.masks is not None:
            # a stream may be longer than memory
            self.masks.forget()
        lines = [""] * len(sources)
        for index, line in zip(told, found, strict=True):
            lines[index] = line
        return lines


def open_translator(
    folder: Path,
    *,
    beams: int | None = None,
    length_penalty: float | None = None,
    batch: int = 32,
    pipeline: Path | None = None,
) -> Translator:
    """Return what a finished run of the translation task learned.

    Args:
        folder: The run's folder, such as `runs/translation-demo/plain/seed-0`.
        beams: Beams of the search; None for those the run was tested with.
        length_penalty: Likewise.
        batch: As in `Decoding`.
        pipeline: The spaCy pipeline that parsed the sources of a run with roles; None for the place where it lay then.

    Raises:
        DataError: The folder holds no run, an unfinished one, one of another task, or a file is missing or damaged.
        SettingError: A setting is outside its range.
    """
    record = _record(folder)
    scale, arm = _scale(folder, record), read_arm(folder, record)
    decoding = Decoding(
        scale.beams if beams is None else beams,
        scale.length_penalty if length_penalty is None else length_penalty,
        batch,
    )
    for name in (runs.WEIGHTS, TOKENIZER):
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing; a run keeps it when it ends: train this one again.")
    if arm.guided is None and pipeline is not None:
        raise DataError(f"the heads of {folder} have no roles; leave --pipeline out.")
    subwords = read_subwords(folder / TOKENIZER)
    seed, data, masks = int(record["seed"]), str(record["data"]), None
    if arm.guided is not None:
        masks = kept_masks(folder, arm.guided, subwords, pipeline, num_heads=scale.heads, seed=seed, data=data)
    model = translation_model(scale, subwords.vocabulary_size)
    revived(folder, arm, model, named_task(TASK), seed=seed, masks=masks)
    return Translator(model, subwords, decoding, masks)


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
    lacking = {"seed", "data", "scale"} - record.keys()
    if lacking:
        raise DataError(f"{folder / runs.SETTINGS} has no {min(lacking)}; was it changed since the run began?")
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
