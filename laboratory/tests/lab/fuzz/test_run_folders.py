"""Mutated files of finished runs, comparisons, checkpoints and caches: a result or a sentence, within two seconds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import headwise as hw
from fuzz.mutate import BYTES, INPUTS, Mutation, fuzz, limit_memory, mutate_bytes, mutate_json, mutate_json_lines
from headwise_lab.data.arrays import Ragged, cache_arrays, read_arrays
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.run_folder import require_intact
from headwise_lab.frozen.open import open_frozen
from headwise_lab.frozen.vectors import encodings
from headwise_lab.results.evidence import read_numbers
from headwise_lab.results.runs import read_results
from headwise_lab.tasks.translation.data import open_prepared
from headwise_lab.training.checkpoints import seal_checkpoint, verify_checkpoint
from headwise_lab.training.train import read_state
from lab.sealing import resealing
from lab.trained_runs import CLASSIFICATION, LOGIC, STOPPED, TRANSLATION
from routing.hostile import Large, pack

SLOW = pytest.param(INPUTS, marks=pytest.mark.slow)


class Reading(NamedTuple):
    """A file, how it is read, the record that holds its digest, if any, and how it is mutated."""

    file: str
    read: Callable[[Path], object]
    record: str | None
    mutate: Mutation = mutate_json


def frozen(run: str) -> Callable[[Path], object]:
    return lambda saved: open_frozen(saved / run)


def table(task: str) -> Callable[[Path], object]:
    return lambda saved: read_results(saved / task)


LOGIC_RESULT, CLASSIFICATION_RESULT = f"{LOGIC}/result.json", f"{CLASSIFICATION}/result.json"
TRANSLATION_RESULT, COMPARISON = f"{TRANSLATION}/result.json", "logic/comparison.json"
REDUNDANCY, STEP_TIME = f"{LOGIC}/analysis-redundancy.json", f"{LOGIC}/analysis-step-time.json"
READINGS = {
    "logic: settings": Reading(f"{LOGIC}/settings.json", frozen(LOGIC), LOGIC_RESULT),
    "logic: vocabulary": Reading(f"{LOGIC}/vocabulary.json", frozen(LOGIC), LOGIC_RESULT),
    "logic: weights": Reading(f"{LOGIC}/model.safetensors", frozen(LOGIC), LOGIC_RESULT, mutate_bytes),
    "logic: result": Reading(LOGIC_RESULT, frozen(LOGIC), LOGIC_RESULT),
    "classification: settings": Reading(
        f"{CLASSIFICATION}/settings.json", frozen(CLASSIFICATION), CLASSIFICATION_RESULT
    ),
    "classification: roles": Reading(f"{CLASSIFICATION}/roles.json", frozen(CLASSIFICATION), CLASSIFICATION_RESULT),
    "classification: rarities": Reading(f"{CLASSIFICATION}/idf.json", frozen(CLASSIFICATION), CLASSIFICATION_RESULT),
    "translation: settings": Reading(f"{TRANSLATION}/settings.json", frozen(TRANSLATION), TRANSLATION_RESULT),
    "translation: subwords": Reading(f"{TRANSLATION}/tokenizer.json", frozen(TRANSLATION), TRANSLATION_RESULT),
    "table: result": Reading(LOGIC_RESULT, table("logic"), LOGIC_RESULT),
    "table: numbers": Reading(LOGIC_RESULT, lambda saved: read_numbers(saved / LOGIC), LOGIC_RESULT),
    "table: analysis": Reading(REDUNDANCY, table("logic"), REDUNDANCY),
    "table: steps": Reading(STEP_TIME, table("logic"), STEP_TIME),
    "table: epochs": Reading(f"{LOGIC}/epochs.jsonl", table("logic"), LOGIC_RESULT, mutate_json_lines),
    "table: answers": Reading(f"{LOGIC}/predictions.npz", table("logic"), LOGIC_RESULT, mutate_bytes),
    "table: items": Reading("logic/test.npz", table("logic"), COMPARISON, mutate_bytes),
    "table: comparison": Reading(COMPARISON, table("logic"), COMPARISON),
    "table: tests": Reading("translation/paired-tests.json", table("translation"), None),
    "progress": Reading(
        f"{TRANSLATION}/progress.json", lambda saved: run_folder.read_progress(saved / TRANSLATION), None
    ),
    "report": Reading("report.json", lambda saved: hw.report.load_report(saved / "report.json"), None),
}


@pytest.fixture
def saved(trained_runs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained_runs, tmp_path / "saved")


def share_inputs(name: str, inputs: int) -> int:
    """Return the inputs of one file where those of a reader are shared by all of its files."""
    files = sum(other.partition(":")[0] == name.partition(":")[0] for other in READINGS)
    return max(40, inputs // files)


@pytest.mark.parametrize("inputs", [40, SLOW])
@pytest.mark.parametrize("name", READINGS)
def test_a_mutated_file_of_a_run(name: str, saved: Path, inputs: int):
    reading, count = READINGS[name], share_inputs(name, inputs)

    def read() -> object:
        return reading.read(saved)

    checked = read if reading.record is None else resealing(saved / reading.record, read)
    tally = fuzz(checked, saved / reading.file, mutate=reading.mutate, inputs=count)
    assert tally.read + tally.refused == count
    # the reader was reached
    assert not any("digest is another" in message for message in tally.messages.values())


def test_a_sealed_run_is_read_only_as_it_was_written(saved: Path):
    run = saved / LOGIC
    for name in ("settings.json", "vocabulary.json", "model.safetensors", "predictions.npz", "epochs.jsonl"):
        tally = fuzz(lambda: require_intact(run), run / name, inputs=200)
        # some mutations leave a file as it is
        assert tally.read < 10
        assert all(name in message for message in tally.messages.values())


@pytest.mark.parametrize("inputs", [40, SLOW])
@pytest.mark.parametrize("name", ["run.pt", "manifest.json"])
def test_a_mutated_checkpoint(name: str, saved: Path, inputs: int):
    (checkpoint,) = (saved / STOPPED).glob("checkpoint-*")

    def read() -> Any:
        # its maker can seal it
        if name != "manifest.json":
            seal_checkpoint(checkpoint)
        verify_checkpoint(checkpoint)
        return read_state(checkpoint)

    fuzz(read, checkpoint / name, mutate=mutate_json if name == "manifest.json" else mutate_bytes, inputs=inputs // 2)


@pytest.mark.parametrize("inputs", [40, SLOW])
@pytest.mark.parametrize("name", ["record.json", "tokenizer.json", "dev.source.ids.npy", "dev.source.offsets.npy"])
def test_a_mutated_file_of_prepared_data(name: str, saved: Path, inputs: int):
    (folder,) = saved.glob("translation/data/translation-*")
    mutate = mutate_json if name.endswith(".json") else mutate_bytes
    read = resealing(folder / "record.json", lambda: list(open_prepared(folder).dev))
    fuzz(read, folder / name, mutate=mutate, inputs=inputs // 4)


@pytest.mark.parametrize("inputs", [200, SLOW])
def test_a_damaged_cache_of_arrays_is_made_again(inputs: int, tmp_path: Path):
    made = Ragged.of([[4, 5, 600], [6], [], [7] * 300]).pack("text") | {"labels": np.arange(40.0)}
    cache_arrays(tmp_path, "data", lambda: made)
    path = tmp_path / "data.npz"

    def read() -> None:
        found = cache_arrays(tmp_path, "data", lambda: made)
        assert found.keys() == made.keys()
        assert all(np.array_equal(found[name], array) for name, array in made.items())

    assert fuzz(read, path, inputs=inputs).read == inputs


@pytest.mark.parametrize("inputs", [60, SLOW])
@pytest.mark.parametrize("name", ["layers.npy", "heads-0.npy", "shapes.json"])
def test_a_damaged_cache_of_encodings_is_made_again(name: str, inputs: int, saved: Path, tmp_path: Path):
    opened, sentences = open_frozen(saved / CLASSIFICATION), ["a fine plot .", "film"]

    def read() -> Any:
        with torch.no_grad():
            return encodings(opened, sentences, tmp_path / "cache", model="m")

    layers, heads = np.array(read().layers), np.array(read().heads[0])
    (place,) = (tmp_path / "cache").iterdir()

    def compare() -> None:
        found = read()
        np.testing.assert_allclose(found.layers, layers, atol=1e-5)
        np.testing.assert_allclose(found.heads[0], heads, atol=1e-5)

    mutate = mutate_json if name == "shapes.json" else mutate_bytes
    assert fuzz(compare, place / name, mutate=mutate, inputs=inputs // 3).read == inputs // 3


@pytest.mark.parametrize("change", [pack, lambda path: torch.save({"run": Large(), "methods": {}}, path)])
def test_a_checkpoint_that_becomes_larger_when_it_is_loaded(change: Callable[[Path], object], saved: Path):
    (checkpoint,) = (saved / STOPPED).glob("checkpoint-*")
    change(checkpoint / "run.pt")
    with pytest.raises(hw.errors.DataError, match=r"is packed|which is no tensor"), limit_memory(BYTES):
        read_state(checkpoint)


def test_arrays_that_become_larger_when_they_are_read(tmp_path: Path):
    path = tmp_path / "test.npz"
    np.savez(path, labels=np.zeros(1 << 20))
    read_arrays(path)
    pack(path)
    with pytest.raises(hw.errors.DataError, match="is packed"):
        read_arrays(path)


def test_the_names_of_files_in_a_manifest_stay_in_the_checkpoint(saved: Path):
    (checkpoint,) = (saved / STOPPED).glob("checkpoint-*")
    outside = checkpoint.parent / "settings.json"
    digests = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(digests | {"../settings.json": "0" * 32}))
    with pytest.raises(hw.errors.DataError, match=r"names the file '\.\./settings\.json'"):
        verify_checkpoint(checkpoint)
    assert outside.exists()
