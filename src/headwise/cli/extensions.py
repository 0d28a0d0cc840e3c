"""What installed packages add to the command: more commands, and more kinds of folders that hold a model.

A package names its extension under the entry points of the group `headwise.extensions`; the laboratory does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headwise.errors import DataError
from headwise.input_files import describe_place

if TYPE_CHECKING:
    from headwise.texts.frozen import Frozen

GROUP = "headwise.extensions"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Extension(Protocol):
    """What a package adds; a module with these functions is one."""

    def list_commands(self) -> Sequence[Callable[..., None]]:
        """Return functions that typer makes commands of."""
        ...

    def run(self, command: Callable[[], None]) -> None:
        """Run a command, or have this process do another part of it."""
        ...

    def open_model(self, folder: Path, pipeline: Path | None, *, trust_remote_code: bool) -> Frozen | None:
        """Return the model of a folder, or None where the folder is of no kind that the package knows."""
        ...

    def find_stock_folder(self, folder: Path) -> Path | None:
        """Return where such a folder keeps its model in the format of Hugging Face, or None where it is not known.

        Raises:
            DataError: The folder is known, and keeps none.
        """
        ...


@cache
def _list_extensions() -> list[Extension]:
    return [found.load() for found in entry_points(group=GROUP)]


def add_extension(extension: Extension) -> None:
    """Add an extension of a package that is imported and not installed."""
    _list_extensions().insert(0, extension)


def find_extensions() -> tuple[Extension, ...]:
    """Return the extensions that were added and the extensions of all installed packages."""
    return tuple(dict.fromkeys(_list_extensions()))


def open_model(folder: Path, pipeline: Path | None = None, *, trust_remote_code: bool = False) -> Frozen:
    """Return the model of a folder or of a name on the Hub of Hugging Face, or of a kind that an extension knows.

    A spaCy pipeline parses texts for heads with roles; None means the model's own.

    Raises:
        DataError: The folder holds no such model, or it cannot be read.
        LayoutError: The heads of the model cannot be found.
    """
    from headwise.texts.transformer import open_folder

    folder = _convert_gguf(folder)
    if not folder.is_dir():
        return open_folder(_find_on_hub(folder), folder.name, trust_remote_code=trust_remote_code)
    for extension in find_extensions():
        if (found := extension.open_model(folder, pipeline, trust_remote_code=trust_remote_code)) is not None:
            return found
    return open_folder(folder, trust_remote_code=trust_remote_code)


def _find_on_hub(name: Path) -> Path:
    """Return the folder of a model on the Hub, from its cache where that has it."""
    place, shown = describe_place(name), name.as_posix()
    if place != "does not exist" or not HUB_NAME.fullmatch(shown):
        raise DataError(f"{name} {place}; expected a folder of save_pretrained(), or a finished run.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(shown, allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"]))
    except Exception as error:
        # whatever the network, the Hub or its cache has against it
        raise DataError(
            f"{name} does not exist, and the Hub gives no model of that name ({type(error).__name__}). Make a folder "
            f"where it can be reached, with AutoModel and AutoTokenizer of transformers: "
            f"AutoModel.from_pretrained({shown!r}).save_pretrained('FOLDER'); "
            f"AutoTokenizer.from_pretrained({shown!r}).save_pretrained('FOLDER')"
        ) from error


def _convert_gguf(place: Path) -> Path:
    """Return the folder made of a GGUF file, or of a folder that holds one and nothing else to load."""
    files = [place] if place.is_file() else sorted(place.glob("*.gguf")) if place.is_dir() else []
    if [file.suffix for file in files] != [".gguf"] or (place / "config.json").exists():
        return place
    from headwise.texts.pretrained import convert_gguf

    return convert_gguf(files[0].resolve())


def find_stock_folder(folder: Path) -> Path:
    """Return the folder of Hugging Face that is meant: the one named, or one that an extension finds in it.

    Of a GGUF file it is a temporary one.

    Raises:
        DataError: An extension knows the folder, and it keeps no such model.
    """
    folder = _convert_gguf(folder)
    known = (extension.find_stock_folder(folder) for extension in find_extensions())
    return next((found for found in known if found is not None), folder)
