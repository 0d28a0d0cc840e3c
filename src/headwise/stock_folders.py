"""Folders of transformers, loaded so that nothing grows beyond what the folder holds and no foreign code runs.

The numbers of a `config.json` may be anything: they are compared with the tensors beside it, whose headers are read
before any tensor is loaded, and a model that grows far beyond its tensors is stopped. A file of tensors may be packed
small, or hold a pickle that makes something else; it is refused. `config.json` may name Python files as "auto_map", and
kernels, which transformers fetches from the Hub and runs, as "attn_implementation"; `adapter_config.json` names modules
to import. None of that runs unless it was asked for.
"""

from __future__ import annotations

import math
import pickletools
import re
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from headwise.errors import DataError
from headwise.input_files import find_inside, is_file, read_json, refuse_failures, refuse_panics

CONFIG, ADAPTER, RECORD = "config.json", "adapter_config.json", "headwise.json"
REMEDY = "copy the folder again, or save the model again."
FLAG = "if you trust it, give --trust-remote-code, or trust_remote_code=True in Python"

# A new model may have float32 numbers for bytes, projections that are replaced later, and buffers that are not kept;
# packed weights are stored with as little as two bits for each.
GROWTH, PACKED_GROWTH, SPARE_BYTES, SPARE_TENSORS = 8, 32, 64 << 20, 64

# In the order in which transformers looks for them; and of a model that several processes saved.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
PARTS = "shard-*-model-*.safetensors"
# What a pickle of tensors is made of; whatever else torch allows may make objects of any size.
MAKERS = re.compile(
    r"collections OrderedDict|_codecs encode|(builtins|__builtin__) set|torch\._utils _rebuild_\w+"
    r"|torch\._tensor _rebuild_from_type_v2|torch\.nn\.parameter Parameter|torch\.storage \w+|torch \w+Storage"
    r"|torch (device|Size|dtype|[a-z]+\d+\w*)|torch\.serialization _get_layout"
)
# How a file of torch begins that is no archive: with four pickles, of which the last names the tensors.
LEGACY, PICKLES = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", 4

# What transformers and torch have themselves, by the key that names it; a key of a private attribute begins with _.
LOCAL: Mapping[str, frozenset[str]] = {
    "attn_implementation": frozenset({"eager", "sdpa", "flex_attention", "paged|eager"}),
    "experts_implementation": frozenset({"eager", "batched_mm", "grouped_mm"}),
}
KERNELS = ("use_kernels", "kernel_config")

# No size of a model is larger.
LARGEST = 1 << 30
# Words of keys whose number is counted to: layer by layer, or name by name.
LAYERS = re.compile(r"layer(s|$)|blocks|depth|stages|indices|tpu_")
NAMES = re.compile(r"labels|^id2label|^label2id|^(num|n)_(?!positions|ctx)|window(?<!sliding_window)$")
MOST_LAYERS, MOST_NAMES = 1000, 1 << 16
WINDOWS = ("sliding_window", "text_config.sliding_window")
# Sizes that no model has below 0; others may have -1 for none.
SIZES = re.compile(r"heads|head_dim$|d_model$|(hidden|intermediate|vocab)_size$|num_hidden_layers$")
# What rotary embeddings divide by or take the logarithm of.
ROTARY = re.compile(r"rope_theta$|rope\w*\.(.*\.)?(?!partial)\w*factor$")
# Keys whose number is no size of a model.
NO_SIZE = re.compile(r"theta|base$|_ids?$|_index$|rate$|seed")
# What transformers reads beside the weights, and the most bytes of it.
READ = ("*config.json", "*token*", "vocab.*", "merges.txt", "*.index.json", "*.model", "*.jinja")
MOST_READ = 1 << 28

Model = TypeVar("Model", bound=nn.Module)


class TooLarge(BaseException):
    """A model became far larger than its tensors, with one of this `shape`; no constructor catches it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(f"a tensor of the shape {shape} is one too many")
        self.shape = shape


def build_within(make: Callable[[], Model], *, tensors: int, size: int) -> Model:
    """Return the new model that `make` makes, unless it is far larger than so many tensors of so many bytes.

    Raises:
        TooLarge: As of `limit_size`.
    """
    # first without memory: a size may be anything. Some models need memory to be built at all.
    with limit_size(tensors, size), torch.device("meta"), suppress(Exception):
        make()
    with limit_size(tensors, size):
        return make()


@contextmanager
def limit_size(tensors: int, size: int, *, packed: bool = False) -> Iterator[None]:
    """Stop building a model in the block when its parameters and buffers are far larger than its tensors.

    Args:
        tensors: Number of its tensors.
        size: Their bytes.
        packed: Whether weights are stored in fewer bits than a byte.

    Raises:
        TooLarge: It has more than twice as many, or more than 8 times the bytes (packed: 32 times), and some.
    """
    most_tensors, most_bytes = 2 * tensors + SPARE_TENSORS, (PACKED_GROWTH if packed else GROWTH) * size + SPARE_BYTES
    thread, total = threading.get_ident(), 0
    # a parameter that takes the place of another is no further one
    counted: dict[tuple[int, str], int] = {}

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal total
        if tensor is None or threading.get_ident() != thread:
            return
        place, own = (id(module), name), tensor.numel() * tensor.element_size()
        total += own - counted.get(place, 0)
        counted[place] = own
        if len(counted) > most_tensors or total > most_bytes:
            raise TooLarge(tuple(tensor.shape))

    hooks = [register_module_parameter_registration_hook(count), register_module_buffer_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Stored:
    """The number of stored tensors, the bytes of their files, and their sizes along any dimension."""

    tensors: int = 0
    size: int = 0
    dimensions: frozenset[int] = frozenset()

    @property
    def largest(self) -> int:
        """The largest dimension; no more than bytes, as a tensor without numbers may have any."""
        return min(self.size, max(self.dimensions, default=0))

    def __str__(self) -> str:
        return f"{self.tensors} tensors of {self.size:,} bytes, the largest dimension {self.largest:,}"


@contextmanager
def open_within(folder: Path, *, trusted: bool) -> Iterator[None]:
    """Let transformers load a folder in the block, within the size of what the folder holds.

    Args:
        folder: The folder.
        trusted: Whether code that the folder names may run; it is not asked for otherwise.

    Raises:
        DataError: A file is none, or leads out of the folder; the folder cannot be loaded without running code that it
            names; its configuration is that of a model far larger than its tensors; or native code panics.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        # reading would wait for a pipe, and a text may fill the memory
        if is_file(path) and path.stat().st_size > MOST_READ and any(path.match(pattern) for pattern in READ):
            raise DataError(f"{path} has {path.stat().st_size:,} bytes; expected at most {MOST_READ:,}; {REMEDY}")
    path = folder / CONFIG
    config = read_config(path) if is_file(path) else {}
    # a folder of headwise.save is loaded by headwise.load, which compares it itself
    stored = None if is_file(folder / RECORD) else _read_stored(folder, config)
    require_countable(path, config, stored or Stored())
    try:
        with refuse_panics(f"{folder} cannot be read", REMEDY), refuse_foreign_code(folder, trusted=trusted):
            if stored is None:
                yield
                return
            with limit_size(stored.tensors, stored.size, packed="quantization_config" in config):
                yield
    except TooLarge as error:
        raise DataError(describe_excess(path, config, stored or Stored(), error)) from None


def _read_stored(folder: Path, config: Mapping[str, Any]) -> Stored:
    """Return what tensors transformers would load from a folder, of which `config` may name the file."""
    named = config.get("transformers_weights")
    files = sorted(path for path in folder.glob(PARTS) if is_file(path))
    found = [name for name in WEIGHTS if is_file(folder / name)][:1] if named is None else [named]
    if named is not None or not files:
        files = [path for name in found for path in list_named_weights(folder, name, CONFIG)]
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


def list_named_weights(folder: Path, name: object, by: str) -> list[Path]:
    """Return the file of tensors with the name that the file `by` holds, or if it is an index, the files that it names.

    Raises:
        DataError: A file is missing or leads out of the folder, or the index is damaged.
    """
    path = find_inside(folder, name, by, REMEDY)
    if not path.name.endswith(".index.json"):
        return [path]
    index = read_json(path, REMEDY)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise DataError(f"{path} has no weight_map, which names the file of each tensor; {REMEDY}")
    # only text can be looked up in a set
    names = dict.fromkeys(name if isinstance(name, str) else str(name) for name in places.values())
    return [find_inside(path.parent, name, path.name, REMEDY) for name in names]


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    with refuse_failures(f"{path} cannot be read as tensors", REMEDY), safe_open(str(path), "pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in list(opened.keys())}


def require_tensors_alone(path: Path) -> tuple[int, set[int]]:
    """Refuse a file of `torch.save` that becomes larger when it is loaded.

    Returns:
        The number of its tensors, and all numbers in their description.

    Raises:
        DataError: It is packed, or makes something else than tensors of the numbers that it holds.
    """
    tensors, numbers = 0, set()
    with refuse_failures(f"{path} cannot be read as tensors, and nothing in it was run", REMEDY):
        for operation, argument, _ in _read_pickles(path):
            if operation.name == "STACK_GLOBAL" or (operation.name == "GLOBAL" and not MAKERS.fullmatch(argument)):
                named = str(argument or operation.name)[:60]
                raise DataError(f"{path} holds {named!r}, which is no tensor, and nothing in it was run; {REMEDY}")
            tensors += operation.name == "BINPERSID"
            if isinstance(argument, int):
                numbers.add(argument)
    return tensors, numbers


def _read_pickles(path: Path) -> Iterator[Any]:
    """Yield the operations of the pickles of a file of torch."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            if file.read(len(LEGACY)) != LEGACY:
                raise DataError(f"{path} is no file of torch.save; {REMEDY}")
            file.seek(0)
            for _ in range(PICKLES):
                yield from pickletools.genops(file)
        return
    with zipfile.ZipFile(path) as archive:
        require_unpacked(path, archive, REMEDY)
        for part in archive.infolist():
            if part.filename.endswith("/data.pkl"):
                yield from pickletools.genops(archive.read(part))


def require_unpacked(path: Path, archive: zipfile.ZipFile, remedy: str) -> None:
    """Refuse an archive that is smaller than what it holds: neither torch nor numpy packs what it saves.

    Raises:
        DataError: It is; the message ends with `remedy`.
    """
    parts = archive.infolist()
    if any(part.compress_type for part in parts) or sum(part.file_size for part in parts) > path.stat().st_size:
        raise DataError(f"{path} is packed, so that loading it may fill the memory; {remedy}")


@contextmanager
def refuse_foreign_code(folder: Path, *, trusted: bool) -> Iterator[None]:
    """Let transformers load a folder in the block, without asking whether to run code that the folder names.

    Args:
        folder: The folder.
        trusted: Whether that code may run; the block then does nothing.

    Raises:
        DataError: The folder cannot be loaded without running code that it names.
    """
    if trusted:
        yield
        return
    if is_file(folder / ADAPTER):
        raise DataError(
            f"{folder / ADAPTER} names a base model and modules that transformers would import; merge the adapter into "
            f"its model (merge_and_unload) and save that, or {FLAG}."
        )
    if is_file(folder / CONFIG):
        require_local_kernels(folder / CONFIG, read_config(folder / CONFIG))
    from transformers import dynamic_module_utils

    # with a time of 0 it refuses, where some of its classes do not pass trust_remote_code on to those they load
    before, dynamic_module_utils.TIME_OUT_REMOTE_CODE = dynamic_module_utils.TIME_OUT_REMOTE_CODE, 0
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise DataError(
            f"{folder} holds Python code of its own (auto_map), without which transformers cannot load it, and which "
            f"was not run; {FLAG}."
        ) from None
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the content of a `config.json`.

    Raises:
        DataError: It cannot be read, or is no JSON object.
    """
    config = read_json(path, "save the model again.")
    if not isinstance(config, dict):
        raise DataError(f"{path} holds a {type(config).__name__}; expected the configuration of a model.")
    return config


def require_local_kernels(path: Path, config: Any) -> None:
    """Refuse a configuration, read from `path`, that names a kernel at any depth.

    Raises:
        DataError: It names a kernel that transformers would fetch from the Hub.
    """
    waiting = [config]
    while waiting:
        value = waiting.pop()
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for key, item in value.items() if isinstance(value, dict) else ():
            kind = key.removeprefix("_").removesuffix("_internal")
            if kind in LOCAL:
                named = item.values() if isinstance(item, dict) else (item,)
                strange = next((name for name in named if not _is_local(kind, name)), None)
            else:
                strange = item if key in KERNELS and item else None
            if strange is not None:
                raise DataError(
                    f"{path} has {key} {str(strange)[:60]!r}, code that transformers would fetch from the Hub and run; "
                    f"delete that line, or {FLAG}."
                )


def _is_local(kind: str, name: Any) -> bool:
    """Return whether an implementation needs no code but that of installed packages."""
    if not isinstance(name, str):
        return name is None
    # without flash_attn, transformers takes its kernel from the Hub
    if name in LOCAL[kind] or (name.startswith("flash_attention") and "/" not in name and find_spec("flash_attn")):
        return True
    from transformers import AttentionInterface

    # the user's own attentions are registered beside the kernels of transformers
    return kind == "attn_implementation" and name in {
        name for name in AttentionInterface().valid_keys() if not re.match(r"flash_|.*/", name)
    }


def require_countable(path: Path, config: Any, stored: Stored) -> None:
    """Refuse a configuration with a number that building a model would count to for minutes, or that no model has.

    Args:
        path: The file that holds it, for the message.
        config: JSON data.
        stored: The tensors beside it. A model has no more layers than tensors, or than 1,000, and no more labels than
            the largest dimension, or than 65,536.

    Raises:
        DataError: As above; the message names the number.
    """
    for name, value in _list_numbers(config):
        key = name.rpartition(".")[2]
        if LAYERS.search(key):
            most = max(stored.tensors, MOST_LAYERS)
        elif NAMES.search(key):
            most = max(stored.largest, stored.tensors, MOST_NAMES)
        else:
            # a fraction is no size
            most = LARGEST if isinstance(value, int) else math.inf
        expected = None
        if name in WINDOWS and value < 1:
            # no token would attend
            expected = "at least 1, or null"
        elif ROTARY.search(name) and value <= 0:
            expected = "a number above 0"
        elif value > most or (value < 0 and SIZES.search(key)):
            held = f", as {path.parent} holds {stored}" if stored.tensors else ""
            expected = f"0 to {most:,}{held}"
        if expected is not None:
            raise DataError(f"{path}: {name[-80:]} is {str(value)[:20]}; expected {expected}; {REMEDY}")


def describe_excess(path: Path, config: Any, stored: Stored, error: TooLarge) -> str:
    """Return a sentence about a model that is far larger than its tensors, with the number that makes it so."""
    numbers = [
        (value, name)
        for name, value in _list_numbers(config)
        if value > 1 and value not in stored.dimensions and not NO_SIZE.search(name)
    ]
    strange = [size for size in error.shape if size not in stored.dimensions]
    found = (
        [number for number in numbers if number[0] in strange]
        or [number for number in numbers if any(size % number[0] == 0 for size in strange)]
        or [number for number in numbers if LAYERS.search(number[1]) and number[0] > stored.tensors // 4]
        or numbers
    )
    blamed = "its numbers are" if not found else "{1} is {0:,}, which is".format(*max(found))
    return (
        f"{path}: {blamed} of a model far larger than the tensors that are saved, {stored}: it has one of the shape "
        f"{error.shape}; {REMEDY}"
    )


def _list_numbers(config: Any) -> Iterator[tuple[str, float]]:
    """Yield (name, number) of JSON data at any depth, and of each list or object how many it holds."""
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += ((f"{name}.{key}" if name else key, item) for key, item in value.items())
        elif isinstance(value, list):
            waiting += ((name, item) for item in value)
        if isinstance(value, dict | list):
            yield name, len(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
