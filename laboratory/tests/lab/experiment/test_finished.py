"""Files of finished runs are compared with digests, and odd names in run folders are no runs or checkpoints."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from headwise.errors import DataError
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.run_folder import require_intact, require_intact_export, write_result
from headwise_lab.frozen.open import open_frozen
from headwise_lab.results.runs import read_results
from headwise_lab.training.checkpoints import verify_checkpoint
from lab.sealing import resealing, seal_again
from lab.trained_runs import LOGIC as RUN
from lab.trained_runs import STOPPED


@pytest.fixture
def saved(trained_runs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained_runs, tmp_path / "saved")


@pytest.mark.full
def test_one_flipped_bit_is_noticed_in_every_file_of_a_finished_run(saved: Path):
    run, draw = saved / RUN, random.Random(0)
    open_frozen(run)
    names = json.loads((run / "result.json").read_text())["file_digests"]
    assert {"model.safetensors", "vocabulary.json", "settings.json", "predictions.npz", "epochs.jsonl"} <= set(names)
    assert "log.txt" not in names
    for name in (*names, "result.json"):
        content = (run / name).read_bytes()
        for _ in range(50):
            changed = bytearray(content)
            place = draw.randrange(8 * len(content))
            changed[place // 8] ^= 1 << place % 8
            if name == "result.json" and changed[place // 8] in b" \n\t\r":
                continue
            (run / name).write_bytes(changed)
            with pytest.raises(DataError, match=name):
                open_frozen(run)
        (run / name).write_bytes(content)
    open_frozen(run)


@pytest.mark.full
def test_a_result_that_was_emptied_does_not_pass_as_one_without_digests(saved: Path):
    for content in ("{}", "[]", "null", '"x"', "3"):
        (saved / RUN / "result.json").write_text(content)
        with pytest.raises(DataError, match=r"result\.json holds no result of a run"):
            open_frozen(saved / RUN)


@pytest.mark.full
def test_a_table_names_the_changed_file(saved: Path):
    read_results(saved / "logic")
    with (saved / RUN / "vocabulary.json").open("a") as file:
        file.write(" ")
    with pytest.raises(DataError, match=r"vocabulary\.json was changed .* redoes only this run"):
        read_results(saved / "logic")


def test_a_model_inside_a_run_is_compared_too(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"1234")
    require_intact_export(tmp_path / "model")
    write_result(tmp_path, {"score": 1})
    require_intact_export(tmp_path / "model")
    (tmp_path / "model" / "weights").write_bytes(b"1235")
    with pytest.raises(DataError, match=r"model/weights was changed"):
        require_intact_export(tmp_path / "model")
    (tmp_path / "model" / "weights").unlink()
    with pytest.raises(DataError, match=r"model/weights is missing"):
        require_intact_export(tmp_path / "model")
    # what a run no longer needs may be deleted
    require_intact(tmp_path)


@pytest.mark.full
def test_a_checkpoint_is_only_what_its_manifest_lists(saved: Path):
    (checkpoint,) = (saved / STOPPED).glob("checkpoint-*")
    verify_checkpoint(checkpoint)
    content = (checkpoint / "manifest.json").read_text()
    (checkpoint / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match=r"has no digest in manifest\.json, .* to start that run again"):
        verify_checkpoint(checkpoint)
    (checkpoint / "manifest.json").write_text(content)
    (checkpoint / "more.pt").write_bytes(b"")
    with pytest.raises(DataError, match=r"more\.pt has no digest"):
        verify_checkpoint(checkpoint)


def test_only_folders_with_a_decimal_step_are_checkpoints(tmp_path: Path):
    for name in ("checkpoint-²", "checkpoint-", "checkpoint-1x", "checkpoint-7", "checkpoint-12"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-99").touch()
    assert run_folder.latest_checkpoint(tmp_path) == tmp_path / "checkpoint-12"


@pytest.mark.full
def test_a_run_of_an_odd_seed_is_read(saved: Path):
    shutil.copytree(saved / RUN, saved / "logic" / "svgd" / "seed-²")
    with pytest.raises(DataError, match="holds two runs of"):
        read_results(saved / "logic")


KINDS = ("missing", "empty", "garbage", "deep", "digits", "list", "folder", "pipe", "device")


@pytest.mark.full
@pytest.mark.parametrize("name", ["settings.json", "result.json", "vocabulary.json", "model.safetensors"])
def test_a_hostile_file_of_a_run_is_refused_in_a_sentence(name: str, saved: Path, tmp_path: Path):
    contents = {
        "empty": b"",
        "garbage": bytes(range(256)),
        "deep": b"[" * 10**5,
        "list": b"[1]",
        "digits": b'{"task": ' + b"9" * 5000 + b"}",
    }
    for kind in KINDS:
        run = shutil.copytree(saved / RUN, tmp_path / kind / RUN)
        path, read = run / name, resealing(run / "result.json", lambda run=run: open_frozen(run))
        path.unlink()
        if kind in contents:
            path.write_bytes(contents[kind])
        elif kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        with pytest.raises(DataError) as refused:
            read()
        assert str(run) in str(refused.value), kind
        assert "\n" not in str(refused.value), kind


@pytest.mark.full
def test_hostile_sizes_of_a_run_are_refused_in_a_sentence(saved: Path):
    path = saved / RUN / "settings.json"
    kept = path.read_text()
    for key, value in (
        ("width", 2**40),
        ("width", -8),
        ("heads", 2**30),
        ("heads", 3),
        ("layers", 2**31),
        ("layers", "two"),
        ("classifier_width", 10**15),
    ):
        record = json.loads(kept)
        record["scale"][key] = value
        path.write_text(json.dumps(record))
        seal_again(saved / RUN)
        with pytest.raises(DataError, match=r"settings\.json (has|does not say) "):
            open_frozen(saved / RUN)
