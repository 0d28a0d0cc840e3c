"""The record of a saved model, `headwise.json`, read and checked value by value: what a folder says is not trusted."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.atomic import PARTIAL
from headwise.digests import require_folder_unchanged, require_unchanged
from headwise.errors import DataError
from headwise.input_files import is_file, read_whole
from headwise.stock_folders import LARGEST, RECORD
from headwise.strict_json import parse_json

FORMAT = 1
CONFIG = "config.json"
REMEDY = "copy the folder again, or save the model again."
FILE = re.compile(r"headwise-[\w-]+\.pt")
SIZES = ("num_heads", "head_size", "width")
KINDS = {dict: "an object", list: "a list", str: "a text"}


@dataclass(frozen=True)
class Identity:
    """What a model of transformers is rebuilt from.

    Attributes:
        path: The file that says so.
        module: Name of the module of its class.
        name: Name of its class.
        config: Its configuration, as JSON data.
        attention: Its attention implementations, by name of the part of the configuration.
        generation: Its generation configuration, as JSON data, if it has one.
    """

    path: Path
    module: str
    name: str
    config: dict[str, Any]
    attention: dict[str, Any]
    generation: dict[str, Any] | None


@dataclass(frozen=True)
class Saved:
    """The content of a `headwise.json`.

    Attributes:
        path: The file.
        model: What the model is rebuilt from; None for a class that is not from transformers.
        aggregators: Setting and sizes of each aggregator, as JSON data, by name of the module.
        adopted: Names of the modules that are `headwise.nn.MultiheadAttention`.
        sizes: Sizes of modules that the model's configuration does not give, by name of the module.
        tied: For each tied tensor, the name that it is stored under.
        files: Names of the tensors of each file.
    """

    path: Path
    model: Identity | None
    aggregators: Mapping[str, Mapping[str, Any]]
    adopted: tuple[str, ...]
    sizes: Mapping[str, Mapping[str, int]]
    tied: Mapping[str, str]
    files: Mapping[str, tuple[str, ...]]

    @property
    def folder(self) -> Path:
        """The folder of the saved model."""
        return self.path.parent


def read_saved(folder: Path) -> Saved:
    """Return the record of a folder, after comparing its files with their digests.

    Raises:
        DataError: There is none, it is damaged or of another version, or a file was changed since.
    """
    path = folder / RECORD
    require_folder_unchanged(folder)
    if not is_file(path):
        raise DataError(
            f"{folder} holds no {RECORD}; expected a folder written by save_pretrained after aggregate() or "
            "prune(), or by headwise.save. Load a model that headwise did not change as it was saved (from_pretrained)."
        )
    try:
        written = parse_json(read_whole(path))
        version = written["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a record of headwise ({error}); save the model again.") from None
    if version != FORMAT:
        raise DataError(
            f"{path} has format {str(version)[:60]}; expected {FORMAT}, so use the version of headwise that wrote it."
        )
    files = _read_files(path, written)
    require_unchanged(path, written, [*files, CONFIG], remedy=REMEDY)
    _require_no_others(path, files)
    saved = Saved(
        path,
        _read_identity(path, written),
        {name: _read_aggregator(path, name, one) for name, one in _take(path, written, "aggregators", dict).items()},
        tuple(_require_name(path, "adopted", name) for name in _take(path, written, "adopted", list)),
        {name: _read_sizes(path, name, one) for name, one in _take_sizes(path, written).items()},
        {name: _require_name(path, "tied", other) for name, other in _take(path, written, "tied", dict).items()},
        files,
    )
    stored = {name for names in files.values() for name in names}
    wrong = [name for name, other in saved.tied.items() if other not in stored or name in stored]
    if wrong:
        raise _fault(path, "tied", wrong[0], "tensors that are tied to stored ones, and not stored themselves")
    return saved


def _require_no_others(path: Path, files: Mapping[str, Any]) -> None:
    others = sorted(other.name for other in path.parent.glob("headwise-*.pt") if other.name not in files)
    # a `save` into this folder that was killed has left both
    if others and not path.parent.resolve().with_name(f".{path.parent.resolve().name}{PARTIAL}").exists():
        raise DataError(f"{path.parent / others[0]} is no file of the model that was saved here; {REMEDY}")


def _fault(path: Path, name: str, value: Any, expected: str) -> DataError:
    return DataError(f"{path}: {name} is {str(value)[:60]!r}; expected {expected}; {REMEDY}")


def _take(path: Path, record: Mapping[str, Any], name: str, kind: type) -> Any:
    value = record.get(name)
    if type(value) is not kind:
        raise _fault(path, name, value, KINDS[kind])
    return value


def _require_name(path: Path, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _fault(path, key, value, "names of modules or tensors")
    return value


def _read_files(path: Path, written: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    files: dict[str, tuple[str, ...]] = {}
    seen: set[str] = set()
    for file, names in _take(path, written, "files", dict).items():
        if not FILE.fullmatch(file) or not isinstance(names, list):
            raise _fault(path, "files", file, "names of files beside it, such as headwise-1a2b-00001-of-00001.pt")
        for name in names:
            if _require_name(path, file, name) in seen:
                raise _fault(path, "files", name, "each tensor in one file")
            seen.add(name)
        files[file] = tuple(names)
    return files


def _read_aggregator(path: Path, name: str, described: Any) -> dict[str, Any]:
    if not isinstance(described, dict) or described.keys() != {"setting", *SIZES}:
        raise _fault(path, name, described, f"a setting, {', '.join(SIZES)}")
    for size in SIZES:
        value = described[size]
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise _fault(path, f"{size} of {name}", value, "a positive integer")
    return described


def _take_sizes(path: Path, written: Mapping[str, Any]) -> dict[str, Any]:
    # a folder of version 0.1 has none
    return _take(path, written, "sizes", dict) if "sizes" in written else {}


def _read_sizes(path: Path, name: str, sizes: Any) -> dict[str, int]:
    if not isinstance(sizes, dict):
        raise _fault(path, f"sizes of {name}", sizes, "numbers by attribute")
    for attribute, value in sizes.items():
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise _fault(path, f"{attribute} of {name}", value, "a positive integer")
    return sizes


def _read_identity(path: Path, written: Mapping[str, Any]) -> Identity | None:
    if written.get("model", "") is None:
        return None
    model = _take(path, written, "model", dict)
    module, _, name = _take(path, model, "class", str).partition(":")
    generation = model.get("generation")
    return Identity(
        path,
        module,
        name,
        _take(path, model, "config", dict),
        _take(path, model, "attention", dict),
        None if generation is None else _take(path, model, "generation", dict),
    )
