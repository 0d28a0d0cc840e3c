"""Files and digest of a spaCy pipeline, found without loading spaCy."""

import importlib.util
from pathlib import Path

from headwise.errors import DataError
from headwise.input_files import is_file
from headwise.lab.data.arrays import digest

# What every saved pipeline holds: of another folder nothing is read, however large it is.
CONFIG = "config.cfg"


def list_pipeline_files(pipeline: Path) -> list[Path]:
    """Return the files of a pipeline, given by its folder or the name of an installed package.

    Raises:
        DataError: Neither exists, or the folder is none of a pipeline.
    """
    folder = pipeline
    if folder.is_dir():
        if not is_file(folder / CONFIG):
            raise DataError(f"{pipeline} holds no {CONFIG}; expected the folder of a spaCy pipeline with a parser.")
    else:
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
