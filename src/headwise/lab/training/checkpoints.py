"""Checkpoints that are whole or refused: digests of every file, written before the checkpoint gets its name.

Owns the manifest of a checkpoint. Must not know what its files hold.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from headwise.errors import DataError
from headwise.lab.experiment.run_folder import write_json

MANIFEST = "manifest.json"


def seal(checkpoint: Path) -> None:
    """Write the digests of all files of a checkpoint into its manifest."""
    files = sorted(path for path in checkpoint.iterdir() if path.is_file() and path.name != MANIFEST)
    write_json(checkpoint / MANIFEST, {path.name: _digest(path) for path in files})


def verify(checkpoint: Path) -> None:
    """Make sure that a checkpoint holds what was written.

    Raises:
        DataError: A file is missing or has changed; the message names it and says what to do.
    """
    manifest = checkpoint / MANIFEST
    try:
        digests = json.loads(manifest.read_text(encoding="utf-8"))
        expected = {str(name): str(digest) for name, digest in digests.items()}
    except (OSError, ValueError, AttributeError):
        raise DataError(_corrupt(manifest, "it is missing or not readable")) from None
    for name, digest in expected.items():
        path = checkpoint / name
        if not path.is_file():
            raise DataError(_corrupt(path, "it is missing"))
        if _digest(path) != digest:
            raise DataError(_corrupt(path, "its content is not what was written"))


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()[:32]


def _corrupt(path: Path, reason: str) -> str:
    return f"the checkpoint file {path} is corrupt ({reason}); delete {path.parent} to start that run again."
