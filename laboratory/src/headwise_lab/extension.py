"""What the laboratory adds to the `headwise` command; see `headwise.cli.extensions`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.errors import DataError

if TYPE_CHECKING:
    from headwise.texts.frozen import Frozen


def list_commands() -> Sequence[Callable[..., None]]:
    """Return the commands of the laboratory and of its tasks."""
    from headwise_lab.cli import commands, comparing
    from headwise_lab.experiment.registry import find_commands

    return (*comparing.COMMANDS, *commands.COMMANDS, *find_commands())


def run(command: Callable[[], None]) -> None:
    """Run a command; of several processes that a launcher started, the first runs it and the others train with it."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        command()
        return
    from headwise_lab.jobs import torchrun

    if int(os.environ["RANK"]) > 0:
        torchrun.follow()
        return
    with torchrun.leading():
        command()


def open_model(folder: Path, pipeline: Path | None, *, trust_remote_code: bool) -> Frozen | None:
    """Return the model of a run's folder, or None for any other folder."""
    from headwise_lab.experiment.run_folder import SETTINGS, require_intact_in_run

    if not (folder / SETTINGS).is_file():
        require_intact_in_run(folder)
        return None
    from headwise_lab.frozen.open import open_frozen

    return open_frozen(folder, pipeline, trust_remote_code=trust_remote_code)


def find_stock_folder(folder: Path) -> Path | None:
    """Return the folder of Hugging Face that a finished run keeps, or None for any other folder.

    Raises:
        DataError: The run keeps none.
    """
    from headwise_lab.experiment.run_folder import SETTINGS

    if not (folder / SETTINGS).is_file():
        return None
    from headwise_lab.training.start import find_model_folder

    kept = find_model_folder(folder)
    if kept is None:
        raise DataError(
            f"{folder} is a run that keeps no model in the format of Hugging Face, which this command reads; in a "
            "script, hw.prune and hw.merge take any model."
        )
    return kept
