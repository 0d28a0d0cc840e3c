"""The recipe for one GPU: what `make translation-gpu` runs fits its model, starts on real data, stops and goes on."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headwise.cli import main
from headwise_lab.compare import require_fits
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm_text import parse_arm, parse_arms
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.tasks.translation.data import prepare_translation
from headwise_lab.tasks.translation.files import find_corpus
from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES
from headwise_lab.tasks.translation.task import TranslationTask
from headwise_lab.training.train import train_run
from lab.stopping import stop_after
from lab.tasks.translation.translation_text import write_corpus

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[5]
PUBLISHED = Path(os.environ.get("HEADWISE_DATA", "")) / "mt"
GPU = TRANSLATION_SCALES["gpu"]


def words_of(*arguments: str) -> list[str]:
    """The command that the target would run."""
    made = subprocess.run(
        ["make", "-s", "-n", "translation-gpu", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return shlex.split(made.stdout.replace("\\\n", " ").splitlines()[-1])


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_target_compares_arms_that_fit_the_model_on_the_folder_it_is_given(tmp_path):
    command = words_of("DATA=some folder", "OUT=there", "SEEDS=2", "ARGS=--workers 1")
    assert command[0] == "PYTHONPATH=src:laboratory/src"
    assert command[2:6] == ["-m", "headwise_lab", "compare", "translation"]
    given = dict(zip(command[6::2], command[7::2], strict=True))
    expected = {"--scale": "gpu", "--seeds": "2", "--data": "some folder", "--out": "there", "--workers": "1"}
    assert {name: given[name] for name in expected} == expected
    arms = parse_arms(given["--arms"])
    assert [arm.name for arm in arms] == [
        *("plain", "smooth", "svgd", "svgd-relative", "output"),
        *(f"{arm}:layers=0/1,kinds=self" for arm in ("trunk", "em", "output+em")),
    ]
    assert {arm.control for arm in arms} <= {None, "scaled", *(arm.name for arm in arms)}
    corpus, folder = find_corpus(Path(f"{write_corpus(tmp_path / 'own')}:de-en"))
    prepare_translation(corpus, folder, tmp_path / "prepared", vocabulary_size=GPU.vocabulary_size)
    data = TranslationTask().load(tmp_path / "prepared", GPU, None)
    for arm in arms:
        require_fits(arm, TranslationTask(), data, GPU)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_variables_of_the_environment_do_not_move_the_results(monkeypatch):
    monkeypatch.setenv("OUT", "elsewhere")
    monkeypatch.setenv("SEEDS", "9")
    command = words_of("DATA=prepared")
    assert command[command.index("--out") + 1] == "runs/translation-gpu"
    assert command[command.index("--seeds") + 1] == "5"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_target_without_data_says_what_to_name():
    done = subprocess.run(["make", "translation-gpu", "DATA="], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "give the prepared folder: make translation-gpu DATA=FOLDER" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif("HEADWISE_DATA" not in os.environ, reason="HEADWISE_DATA names no folder with the published files")
def test_the_recipe_starts_on_the_whole_of_multi30k_stops_and_goes_on_to_the_same_bits(tmp_path):
    place = tmp_path / "prepared"
    data = str(PUBLISHED / "multi30k")
    with pytest.raises(SystemExit) as ended:
        main.main(["prepare", "translation", "--data", data, "--scale", "gpu", "--out", str(place)])
    assert ended.value.code == 0
    settings = RunSettings("translation", GPU, parse_arm("svgd+output"), seed=1, data=place)

    def stopped(folder: Path, steps: int) -> Path:
        train_run(settings, folder, stop_after(steps))
        checkpoint = run_folder.latest_checkpoint(folder)
        assert checkpoint is not None
        assert not run_folder.is_finished(folder)
        return checkpoint

    whole = stopped(tmp_path / "whole", 2)
    assert stopped(tmp_path / "parts", 1).name == "checkpoint-2"
    parts = stopped(tmp_path / "parts", 0)
    assert whole.name == parts.name == "checkpoint-3"
    progress = run_folder.read_progress(tmp_path / "parts")
    assert progress is not None
    assert (progress.step, progress.steps) == (3, 40 * len(TranslationTask().batches(*_loaded(place), 0)))
    one, other = (load_file(checkpoint / run_folder.WEIGHTS) for checkpoint in (whole, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def _loaded(place: Path):
    return TranslationTask().load(place, GPU, None), GPU
