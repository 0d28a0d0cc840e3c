"""Files that a command is told of, each with its reader: options, a tuning, a folder of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from fuzz.made_files import Reader
from fuzz.mutate import mutate_bytes, mutate_json, mutate_text
from headwise.errors import SettingError
from headwise.texts.transformer import open_folder
from headwise_lab.cli.comparing import format_config, merge_sizes, read_config
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.tasks.lm.tokens import learn_tokens, read_tokens
from headwise_lab.tasks.logic.scales import LOGIC_SCALES
from headwise_lab.tune import TUNED, TUNING, read_tuned
from lab.tasks.glue.glue_toy import write_model
from lab.tasks.pretraining.pretraining_toy import document


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


def of_hugging_face(file: str) -> Callable[[Path], Reader]:
    def make(place: Path) -> Reader:
        folder = write_model(place / "electra")
        return (
            folder / file,
            lambda: open_folder(folder),
            mutate_bytes if file.endswith(".safetensors") else mutate_json,
        )

    return make


def language_tokens(file: str) -> Callable[[Path], Reader]:
    def make(place: Path) -> Reader:
        for name, text in learn_tokens(lambda: [document(number) for number in range(8)], 280).files(32).items():
            (place / name).write_text(text, encoding="utf-8")

        def read() -> object:
            found = read_tokens(place)
            return found.decode(found.encode_batch(["a small bird"])[0])

        return place / file, read, mutate_json

    return make
