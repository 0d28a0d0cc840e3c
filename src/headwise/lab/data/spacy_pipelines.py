"""Files and digest of a spaCy pipeline, found without loading spaCy."""

import importlib.util
from pathlib import Path

from headwise.errors import DataError
from headwise.lab.data.arrays import digest


def list_pipeline_files(pipeline: Path) -> list[Path]:
    """Return the files of a pipeline, given by its folder or the name of an installed package.

    Raises:
        DataError: Neither exists.
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


def hash_pipeline(pipeline: Path) -> str:
    """Return a digest of everything a pipeline's parses depend on.

    Raises:
        DataError: There is no such pipeline.
    """
    return digest("parsed", list_pipeline_files(pipeline))
