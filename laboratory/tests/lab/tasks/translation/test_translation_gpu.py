"""The recipe for one GPU: its arms fit the model, and a run starts on real data, stops and goes on."""

from __future__ import annotations

import os
import shlex
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


def test_the_documented_command_compares_arms_that_fit_the_model(tmp_path):
    page = (ROOT / "docs" / "translation.md").read_text(encoding="utf-8")
    command = next(
        block for block in page.split("```console\n$ ") if block.startswith("headwise compare translation --scale gpu")
    ).partition("```")[0]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["headwise", "compare", "translation"]
    arms = parse_arms(words[words.index("--arms") + 1])
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
