"""What files of tensors hold, read from their headers: numbers and sizes, before any tensor is loaded.

A file may be made to fill the memory when it is loaded: packed small, or by a pickle that makes something large.
"""

import pickletools
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import DataError
from headwise.input_files import find_inside, is_file, read_whole
from headwise.strict_json import parse_json

# In the order in which transformers looks for them.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Of a model that several processes saved.
PARTS = "shard-*-model-*.safetensors"
REMEDY = "copy the folder again, or save the model again."
# What a pickle of tensors is made of; whatever else torch allows may make objects of any size.
MAKERS = re.compile(
    r"collections OrderedDict|_codecs encode|(builtins|__builtin__) set|torch\._utils _rebuild_\w+"
    r"|torch\._tensor _rebuild_from_type_v2|torch\.nn\.parameter Parameter|torch\.storage \w+|torch \w+Storage"
    r"|torch (device|Size|dtype|[a-z]+\d+\w*)|torch\.serialization _get_layout"
)
# How a file of torch begins that is no archive: with four pickles, of which the last names the tensors.
LEGACY, PICKLES = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", 4


@dataclass(frozen=True)
class Stored:
    """What tensors are stored.

    Attributes:
        tensors: How many.
        size: Bytes of their files.
        dimensions: Their sizes along any dimension.
    """

    tensors: int = 0
    size: int = 0
    dimensions: frozenset[int] = frozenset()

    @property
    def largest(self) -> int:
        """The largest dimension; no more than bytes, as a tensor without numbers may have any."""
        return min(self.size, max(self.dimensions, default=0))

    def __str__(self) -> str:
        return f"{self.tensors} tensors of {self.size:,} bytes, the largest dimension {self.largest:,}"


def read_stored(folder: Path, config: Mapping[str, Any]) -> Stored:
    """Return what tensors transformers would load from a folder; no tensors where it holds none.

    Args:
        folder: The folder.
        config: Its configuration, which may name the file.

    Raises:
        DataError: A file is missing or damaged, leads out of the folder, or would make something other than tensors.
    """
    named = config.get("transformers_weights")
    if named is not None:
        files = [find_inside(folder, named, "config.json", REMEDY)]
    else:
        files = sorted(path for path in folder.glob(PARTS) if is_file(path))
        files = files or [folder / name for name in WEIGHTS if is_file(folder / name)][:1]
    if files and files[0].name.endswith(".index.json"):
        files = _read_index(files[0])
    # each process saved its parts of the same tensors
    apart = not any(path.match(PARTS) for path in files)
    tensors: dict[str, Path] = {}
    dimensions: set[int] = set()
    count = 0
    for path in files:
        if path.suffix == ".safetensors":
            shapes = _read_shapes(path)
            twice = next((name for name in shapes if name in tensors), None)
            if twice is not None and apart:
                raise DataError(f"{path} and {tensors[twice].name} both hold the tensor {twice[:60]!r}; {REMEDY}")
            tensors |= dict.fromkeys(shapes, path)
            found, numbers = len(shapes), {size for shape in shapes.values() for size in shape}
        else:
            found, numbers = require_tensors_alone(path)
        count += found
        dimensions |= numbers
    return Stored(count, sum(path.stat().st_size for path in files), frozenset(dimensions))


def _read_index(path: Path) -> list[Path]:
    """Return the files that an index names."""
    try:
        index = parse_json(read_whole(path))
    except ValueError as error:
        raise DataError(f"{path} is not readable as JSON ({error}); {REMEDY}") from None
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise DataError(f"{path} has no weight_map, which names the file of each tensor; {REMEDY}")
    # only text can be looked up in a set
    names = dict.fromkeys(name if isinstance(name, str) else str(name) for name in places.values())
    return [find_inside(path.parent, name, path.name, REMEDY) for name in names]


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a file of safetensors by name."""
    from safetensors import safe_open

    try:
        with safe_open(str(path), "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in list(opened.keys())}
    except Exception as error:
        # whatever safetensors raises for a damaged file
        reason = " ".join(str(error).split())[:120]
        raise DataError(f"{path} cannot be read as tensors ({reason}); {REMEDY}") from None


def require_tensors_alone(path: Path) -> tuple[int, set[int]]:
    """Refuse a file of `torch.save` that becomes larger when it is loaded.

    Returns:
        The number of its tensors, and all numbers in their description.

    Raises:
        DataError: It is packed, or makes something else than tensors of the numbers that it holds.
    """
    try:
        return _count(_read_pickles(path))
    except DataError:
        raise
    except Exception as error:
        # whatever is raised for a damaged file
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise DataError(f"{path} cannot be read as tensors, and nothing in it was run ({reason}); {REMEDY}") from None


def require_unpacked(path: Path, archive: zipfile.ZipFile, remedy: str) -> None:
    """Refuse an archive that is smaller than what it holds: neither torch nor numpy packs what it saves.

    Args:
        path: Its file.
        archive: The archive.
        remedy: What to do, as the end of a sentence.

    Raises:
        DataError: As above.
    """
    parts = archive.infolist()
    if any(part.compress_type for part in parts) or sum(part.file_size for part in parts) > path.stat().st_size:
        raise DataError(f"{path} is packed, so that loading it may fill the memory; {remedy}")


def _read_pickles(path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield (path, operation) of the pickles of a file of torch."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            if file.read(len(LEGACY)) != LEGACY:
                raise DataError(f"{path} is no file of torch.save; {REMEDY}")
            file.seek(0)
            for _ in range(PICKLES):
                yield from ((path, operation) for operation in pickletools.genops(file))
        return
    with zipfile.ZipFile(path) as archive:
        require_unpacked(path, archive, REMEDY)
        for part in archive.infolist():
            if part.filename.endswith("/data.pkl"):
                yield from ((path, operation) for operation in pickletools.genops(archive.read(part)))


def _count(operations: Iterable[tuple[Path, Any]]) -> tuple[int, set[int]]:
    tensors, numbers = 0, set()
    for path, (operation, argument, _) in operations:
        if operation.name == "STACK_GLOBAL" or (operation.name == "GLOBAL" and not MAKERS.fullmatch(argument)):
            named = str(argument or operation.name)[:60]
            raise DataError(f"{path} holds {named!r}, which is no tensor, and nothing in it was run; {REMEDY}")
        tensors += operation.name == "BINPERSID"
        if isinstance(argument, int):
            numbers.add(argument)
    return tensors, numbers
