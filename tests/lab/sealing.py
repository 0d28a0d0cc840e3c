"""Finished runs that a test changes."""

from __future__ import annotations

from pathlib import Path

from headwise_lab.experiment.run_folder import RESULT, read_json, write_result


def seal_again(folder: Path) -> None:
    """Give a finished run the digests of what its folder holds now."""
    write_result(folder, read_json(folder / RESULT))
