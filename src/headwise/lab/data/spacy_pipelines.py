"""Where a pipeline of spaCy lies, so that what it parsed can be told from what another one did.

Owns the finding of a pipeline's files. Must not load spaCy.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from headwise.errors import DataError
from headwise.lab.data.arrays import digest


def pipeline_files(pipeline: Path) -> list[Path]:
    """Return the files of a pipeline: a folder, or the name of an installed package.

    Raises:
        DataError: There is neither.
    """
    folder = pipeline
    if not folder.is_dir():
        name = str(pipeline)
        package = importlib.util.find_spec(name) if name.isidentifier() else None
        if package is None or package.origin is None:
            raise DataError(
                f"{pipeline} does not exist; expected a spaCy pipeline with a parser: its folder, or the name of an "
                "installed package, as en_core_web_sm."
            )
        folder = Path(package.origin).parent
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def pipeline_digest(pipeline: Path) -> str:
    """Return a digest of everything a pipeline's parses follow from.

    Raises:
        DataError: There is no such pipeline.
    """
    return digest("parsed", pipeline_files(pipeline))
