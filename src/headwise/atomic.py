"""Atomic file writes."""

import os
from pathlib import Path

from headwise.errors import DataError


def write_whole(path: Path, content: bytes) -> None:
    """Write a file by rename, so that a reader sees the old file or the new one, never a part.

    Raises:
        DataError: It cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise DataError(f"{path} cannot be written ({reason}); choose a folder that can.") from None
