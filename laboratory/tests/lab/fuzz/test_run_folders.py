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
from headwise_lab.probing.figures import make_heads_grid, make_layers_grid, make_sets_grid
from headwise_lab.probing.run import _read_finished
from headwise_lab.results.evidence import read_numbers
from headwise_lab.results.runs import read_head_drops, read_results
from headwise_lab.tasks.translation.data import open_prepared
from headwise_lab.training.checkpoints import seal_checkpoint, verify_checkpoint
from headwise_lab.training.train import read_state
from lab.sealing import resealing
from lab.trained_runs import CLASSIFICATION, LOGIC, STOPPED, TRANSLATION
from routing.hostile import Large, pack

SLOW = pytest.param(INPUTS, marks=pytest.mark.slow)
# the runs take half a minute to train
pytestmark = pytest.mark.full


class Reading(NamedTuple):
    """A file, how it is read, the record that holds its digest, if any, and how it is mutated."""

    file: str
    read: Callable[[Path], object]
    record: str | None
    mutate: Mutation = mutate_json


def find(saved: Path, pattern: str) -> Path:
    (found,) = saved.glob(pattern)
    return found


def frozen(run: str) -> Callable[[Path], object]:
    return lambda saved: open_frozen(saved / run)


def table(task: str) -> Callable[[Path], object]:
    return lambda saved: read_results(saved / task)


def read_checkpoint(saved: Path, *, seal: bool = False) -> Any:
    checkpoint = find(saved, f"{STOPPED}/checkpoint-*")
    # its maker can seal it
    if seal:
        seal_checkpoint(checkpoint)
    verify_checkpoint(checkpoint)
    return read_state(checkpoint)


def read_probes(saved: Path) -> object:
    found = _read_finished(saved / "probed", "past_present", saved / "past_present.txt")
    assert found is not None
    return make_layers_grid([found]), make_heads_grid([found]), make_sets_grid([found])


PREPARED = "translation/data/translation-*"
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
    "probes": Reading("probed/past_present.json", read_probes, None),
    "costs of heads": Reading(REDUNDANCY, lambda saved: read_head_drops(saved / LOGIC), REDUNDANCY),
    "checkpoint: manifest": Reading(f"{STOPPED}/checkpoint-*/manifest.json", read_checkpoint, None),
    "checkpoint: state": Reading(
        f"{STOPPED}/checkpoint-*/run.pt", lambda saved: read_checkpoint(saved, seal=True), None, mutate_bytes
    ),
    **{
        f"prepared: {name}": Reading(
            f"{PREPARED}/{name}",
            lambda saved: list(open_prepared(find(saved, PREPARED)).dev),
            f"{PREPARED}/record.json",
            mutate_json if name.endswith(".json") else mutate_bytes,
        )
        for name in ("record.json", "tokenizer.json", "dev.source.ids.npy", "dev.source.offsets.npy")
    },
}


@pytest.fixture
def saved(trained_runs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained_runs, tmp_path / "saved")


def fuzz_reading(name: str, saved: Path, inputs: int) -> None:
    reading = READINGS[name]

    def read() -> object:
        return reading.read(saved)

    checked = read if reading.record is None else resealing(find(saved, reading.record), read)
    tally = fuzz(checked, find(saved, reading.file), mutate=reading.mutate, inputs=inputs)
    assert tally.read + tally.refused == inputs
    # the reader was reached; a checkpoint is sealed by its manifest alone
    if not name.startswith("checkpoint"):
        assert not any("digest is another" in message for message in tally.messages.values()), name
    if name in ("probes", "costs of heads"):
        assert all(str(saved) in message for message in tally.messages.values())


@pytest.mark.slow
def test_a_mutated_file_of_a_run(trained_runs: Path, tmp_path: Path):
    for number, name in enumerate(READINGS):
        fuzz_reading(name, shutil.copytree(trained_runs, tmp_path / str(number)), 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", READINGS)
def test_a_file_of_a_run_that_is_mutated_often(name: str, saved: Path):
    # the files of one reader share its inputs
    files = sum(other.partition(":")[0] == name.partition(":")[0] for other in READINGS)
    fuzz_reading(name, saved, INPUTS // files)


def test_a_sealed_run_is_read_only_as_it_was_written(saved: Path):
    run = saved / LOGIC
    for name in ("settings.json", "vocabulary.json", "model.safetensors", "predictions.npz", "epochs.jsonl"):
        tally = fuzz(lambda: require_intact(run), run / name, inputs=200)
        # some mutations leave a file as it is
        assert tally.read < 10
        assert all(name in message for message in tally.messages.values())


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


@pytest.mark.parametrize("inputs", [20, pytest.param(INPUTS // 3, marks=pytest.mark.slow)])
def test_a_damaged_cache_of_encodings_is_made_again(inputs: int, saved: Path, tmp_path: Path):
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

    for name, mutate in (("layers.npy", mutate_bytes), ("heads-0.npy", mutate_bytes), ("shapes.json", mutate_json)):
        assert fuzz(compare, place / name, mutate=mutate, inputs=inputs).read == inputs


@pytest.mark.parametrize("change", [pack, lambda path: torch.save({"run": Large(), "methods": {}}, path)])
def test_a_checkpoint_that_becomes_larger_when_it_is_loaded(change: Callable[[Path], object], saved: Path):
    checkpoint = find(saved, f"{STOPPED}/checkpoint-*")
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
    checkpoint = find(saved, f"{STOPPED}/checkpoint-*")
    outside = checkpoint.parent / "settings.json"
    digests = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(digests | {"../settings.json": "0" * 32}))
    with pytest.raises(hw.errors.DataError, match=r"names the file '\.\./settings\.json'"):
        verify_checkpoint(checkpoint)
    assert outside.exists()
