"""Finding, opening and writing the folder that a task's text is prepared in."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from headwise.atomic import hold, require_no_others, require_unchanged
from headwise.errors import DataError, SettingError, require_integer
from headwise_lab.data.documents import FORMS, find_files
from headwise_lab.data.subwords import TextEncoder
from headwise_lab.experiment.run_folder import read_json
from headwise_lab.experiment.task import Task
from headwise_lab.packed_text.prepare import (
    RECORD,
    TOKENIZER,
    Packing,
    TextPreparation,
    compute_fingerprint,
    name_shard,
    prepare_text,
)
from headwise_lab.packed_text.shards import PackedText, StreamBatches, stack_rows

Words = TypeVar("Words", bound=TextEncoder)
# Of any number in a record, far more than rows or documents.
MOST = 1 << 48


class PackedTask(Task):
    """A task on packed text; its scales are `PackedScale`."""

    packing: Packing[Any]

    def find(self, folder: Path, scale: Any) -> None:
        """Refuse a place without text, or one that was prepared with other sizes."""
        if (folder / RECORD).exists():
            _require_fits(folder, open_packed(self.packing, folder)[0], scale.preparation, scale.name)
        else:
            find_files(folder)

    def batches(self, data: PackedText, scale: Any, seed: int) -> StreamBatches:
        """Return the stream of batches, a round at a time."""
        steps = scale.recipe.accumulation * (scale.steps // scale.rounds)
        return StreamBatches(data.shards, batch_size=scale.batch_size, steps=steps, seed=seed)

    def collate(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        """Return a batch."""
        return stack_rows(examples)

    def extra_files(self, data: PackedText) -> dict[str, str]:
        """Return the tokenizer."""
        return {TOKENIZER: data.words.to_json()}


def find_packed(
    packing: Packing[Words],
    place: Path | None,
    preparation: TextPreparation,
    cache: Path | None,
    *,
    scale: str,
    progress: bool = False,
) -> tuple[Path, dict[str, Any], Words]:
    """Return a prepared folder with its record and tokenizer: `place` itself, or one made of its text in `cache`."""
    if place is None:
        raise DataError(f"{packing.task} needs --data: {FORMS}.")
    if (place / RECORD).exists():
        record, words = open_packed(packing, place)
        _require_fits(place, record, preparation, scale)
        return place, record, words
    if cache is None:
        raise DataError(f"{packing.task} prepares its data in a cache folder, and none was given.")
    files = find_files(place)
    fingerprint = compute_fingerprint(packing, files, preparation)
    folder = cache / f"{packing.task}-{fingerprint}"
    if not folder.exists():
        prepare_text(packing, files, preparation, fingerprint, folder, progress=progress)
    return folder, *open_packed(packing, folder)


def write_packed(
    packing: Packing[Words],
    place: Path,
    preparation: TextPreparation,
    folder: Path,
    *,
    tokenizer: Path | None,
    progress: bool = False,
) -> tuple[dict[str, Any], Words]:
    """Prepare the text of a place in `folder`, unless that was done before; return its record and tokenizer."""
    if (place / RECORD).exists():
        raise DataError(f"{place} is prepared already; give it to headwise compare {packing.task} --data.")
    files, preparation = find_files(place), dataclasses.replace(preparation, tokenizer=tokenizer)
    fingerprint = compute_fingerprint(packing, files, preparation)
    with hold(folder, wait=True):
        if folder.exists() and not folder.is_dir():
            raise DataError(f"{folder} is no folder; choose another.")
        if not (folder.exists() and any(folder.iterdir())):
            prepare_text(packing, files, preparation, fingerprint, folder, progress=progress)
        held = open_packed(packing, folder)[0] if (folder / RECORD).exists() else {}
        if held.get("fingerprint") != fingerprint:
            raise DataError(f"{folder} holds something else; name another folder.")
    return open_packed(packing, folder)


def open_packed(packing: Packing[Words], folder: Path) -> tuple[dict[str, Any], Words]:
    """Return the record and the tokenizer of a prepared folder."""
    record = read_json(folder / RECORD)
    try:
        names = [name_shard(number) for number in range(len(record["shards"]))] + ["dev.npy", "test.npy", TOKENIZER]
        sizes = *record["shards"], *(record["rows"][split] for split in ("train", "dev", "test"))
        texts = [record[name] for name in ("fingerprint", "corpus", "tokenizer")]
        sound = all(isinstance(text, str) for text in texts) and sum(record["shards"]) == record["rows"]["train"]
        for number in (*sizes, *(record[name] for name in ("length", "vocabulary_size", "documents"))):
            require_integer("a size", number, low=1, high=MOST)
        require_integer("a size", record.get("blank", 0), high=MOST)
    except (KeyError, TypeError, SettingError) as error:
        raise DataError(
            f"{folder / RECORD} is not the record of prepared text ({error}); name another folder."
        ) from None
    if not sound:
        raise DataError(f"{folder / RECORD} is not the record of prepared text; name another folder.")
    task = str(record.get("format")).rpartition("-")[0][:60]
    if task != packing.task:
        raise DataError(f"{folder} was prepared for {task or 'no task'}; prepare the text for {packing.task}.")
    # shards may be many gigabytes, and are compared when they are opened
    require_unchanged(folder / RECORD, record, [TOKENIZER], remedy="prepare the text again.")
    require_no_others(folder / RECORD, record, remedy="take it away, or prepare the text again.")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} lacks {missing[0]}; prepare the text again.")
    return record, packing.read(folder / TOKENIZER)


def _require_fits(folder: Path, record: dict[str, Any], preparation: TextPreparation, scale: str) -> None:
    if record["length"] != preparation.length or (
        record["tokenizer"] == "learned" and record["vocabulary_size"] > preparation.vocabulary_size
    ):
        raise DataError(
            f"{folder} was prepared with rows of {record['length']} tokens and {record['vocabulary_size']} word "
            f"pieces, and scale {scale} has {preparation.length} and {preparation.vocabulary_size}; prepare it for "
            "that scale."
        )
