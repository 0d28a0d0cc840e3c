"""Sealed files that a test changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headwise.atomic import FILES, seal
from headwise.errors import HeadwiseError
from headwise.input_files import parse_json, read_whole
from headwise_lab.experiment.run_folder import RESULT, read_json, write_result


def seal_again(folder: Path) -> None:
    """Give a finished run the digests of what its folder holds now."""
    write_result(folder, read_json(folder / RESULT))


def resealing(record: Path, read: Callable[[], object]) -> Callable[[], object]:
    """Return `read` after a renewal of the digests in `record`, so that what was changed is read and not refused."""
    names = json.loads(record.read_text(encoding="utf-8"))[FILES]

    def read_resealed() -> object:
        # what is no JSON, or is gone, cannot be sealed
        with suppress(HeadwiseError, OSError, ValueError):
            found = parse_json(read_whole(record))
            if isinstance(found, dict):
                record.write_text(json.dumps(seal(found, record.parent, names)), encoding="utf-8")
        return read()

    return read_resealed
