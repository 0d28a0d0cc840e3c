"""Mutated files that a command is told of or that another left: options, a tuning, probes, a folder of Hugging Face."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from fuzz.mutate import INPUTS, Mutation, fuzz, mutate_bytes, mutate_json, mutate_text
from headwise.errors import SettingError
from headwise.texts.transformer import open_folder
from headwise_lab.cli.comparing import format_config, merge_sizes, read_config
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.probing.figures import make_heads_grid, make_layers_grid, make_sets_grid
from headwise_lab.probing.run import _read_finished
from headwise_lab.results.runs import read_head_drops
from headwise_lab.tasks.lm.tokens import learn_tokens, read_tokens
from headwise_lab.tasks.logic.scales import LOGIC_SCALES
from headwise_lab.tune import TUNED, TUNING, read_tuned
from lab.sealing import resealing
from lab.tasks.glue.glue_toy import write_model
from lab.tasks.pretraining.pretraining_toy import document
from lab.trained_runs import LOGIC

Reader = tuple[Path, Callable[[], object], Mutation]
SLOW = pytest.param(INPUTS, marks=pytest.mark.slow)


def options(place: Path) -> Reader:
    path = place / "run.toml"
    path.write_text(format_config({"task": "logic", "seeds": 3, "set": ["layers=4", "width=8"]}), encoding="utf-8")

    def read() -> object:
        try:
            return read_config(path), merge_sizes(path, ["layers=2"])
        except typer.BadParameter as error:
            raise SettingError(str(error)) from None

    return path, read, mutate_text


def tuning(place: Path, file: str = TUNING) -> Reader:
    arm = parse_arm("em")
    scale = LOGIC_SCALES["demo"]
    record = {"task": "logic", "sizes": run_folder.as_record(scale), "draws": 2, "seed": 0, "seeds": 1}
    run_folder.write_json(place / TUNING, record)
    (place / arm.folder).mkdir()
    best = "em:capsules=4,learning_rate=0.01"
    tried = [{"arm": "em", "dev_score": 0.61}, {"arm": best, "dev_score": 0.64}]
    run_folder.write_json(place / arm.folder / TUNED, {"arm": best, "tried": tried, "seeds": 2})
    path = place / TUNING if file == TUNING else place / arm.folder / TUNED
    return path, lambda: read_tuned(place, [arm], "logic", scale), mutate_json


def tuned(place: Path) -> Reader:
    return tuning(place, TUNED)


def probes(place: Path, runs: Path) -> Reader:
    path = Path(shutil.copy(runs / "probed" / "past_present.json", place))

    def read() -> object:
        found = _read_finished(place, "past_present", runs / "past_present.txt")
        assert found is not None
        return make_layers_grid([found]), make_heads_grid([found]), make_sets_grid([found])

    return path, read, mutate_json


def costs_of_heads(place: Path, runs: Path) -> Reader:
    path = Path(shutil.copy(runs / LOGIC / "analysis-redundancy.json", place))
    return path, resealing(path, lambda: read_head_drops(place)), mutate_json


@pytest.mark.parametrize("inputs", [300, SLOW])
@pytest.mark.parametrize("maker", [options, tuning, tuned])
def test_a_mutated_file_that_a_command_is_told_of(maker: Callable[[Path], Reader], inputs: int, tmp_path: Path):
    fuzz_named(*maker(tmp_path), inputs)


@pytest.mark.parametrize("inputs", [300, SLOW])
@pytest.mark.parametrize("maker", [probes, costs_of_heads])
def test_a_mutated_file_that_a_command_left(
    maker: Callable[[Path, Path], Reader], inputs: int, trained_runs: Path, tmp_path: Path
):
    fuzz_named(*maker(tmp_path, trained_runs), inputs)


def fuzz_named(path: Path, read: Callable[[], object], mutate: Mutation, inputs: int) -> None:
    """Fuzz a file, of which every refusal must name it or its folder."""
    tally = fuzz(read, path, mutate=mutate, inputs=inputs)
    assert all(str(path) in message or str(path.parent) in message for message in tally.messages.values())


@pytest.mark.parametrize("inputs", [40, SLOW])
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_mutated_file_of_a_folder_of_hugging_face(file: str, inputs: int, tmp_path: Path):
    folder = write_model(tmp_path / "electra")
    mutate = mutate_bytes if file.endswith(".safetensors") else mutate_json
    tally = fuzz(lambda: open_folder(folder), folder / file, mutate=mutate, inputs=inputs // 4)
    assert all(str(folder) in message for message in tally.messages.values())


@pytest.mark.parametrize("inputs", [100, SLOW])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_mutated_tokenizer_of_a_language_model(file: str, inputs: int, tmp_path: Path):
    for name, text in learn_tokens(lambda: [document(number) for number in range(8)], 280).files(32).items():
        (tmp_path / name).write_text(text, encoding="utf-8")

    def read() -> object:
        found = read_tokens(tmp_path)
        return found.decode(found.encode_batch(["a small bird"])[0])

    tally = fuzz(read, tmp_path / file, mutate=mutate_json, inputs=inputs // 2)
    assert all(str(tmp_path) in message for message in tally.messages.values())
