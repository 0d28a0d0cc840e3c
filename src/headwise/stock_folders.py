"""Folders of transformers, loaded so that nothing grows beyond what the folder holds and no foreign code runs.

The numbers of a `config.json` may be anything: they are compared with the tensors beside it before a model is built.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwise.errors import DataError
from headwise.foreign_code import CONFIG, read_config, refuse_foreign_code
from headwise.input_files import is_file
from headwise.native_code import refuse_panics
from headwise.nn.bounds import TooLarge, limit_size
from headwise.stored_tensors import REMEDY, Stored, read_stored

RECORD = "headwise.json"
# No size of a model is larger.
LARGEST = 1 << 30
# Words of keys whose number is counted to: layer by layer, or name by name.
LAYERS = re.compile(r"layer(s|$)|blocks|depth|stages|indices|tpu_")
NAMES = re.compile(r"labels|^id2label|^label2id|^(num|n)_(?!positions|ctx)|window(?<!sliding_window)$")
MOST_LAYERS, MOST_NAMES = 1000, 1 << 16
# Keys whose number is no size of a model.
NO_SIZE = re.compile(r"theta|base$|_ids?$|_index$|rate$|seed")
# What transformers reads beside the weights, and the most bytes of it.
READ = ("*config.json", "*token*", "vocab.*", "merges.txt", "*.index.json", "*.model", "*.jinja")
MOST_READ = 1 << 28


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
    _require_files(folder)
    path = folder / CONFIG
    config = read_config(path) if is_file(path) else {}
    # a folder of headwise.save is loaded by headwise.load, which compares it itself
    stored = None if is_file(folder / RECORD) else read_stored(folder, config)
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


def require_countable(path: Path, config: Any, stored: Stored) -> None:
    """Refuse a configuration with a number that building a model would count to for minutes, or negative heads.

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
        if value > most or (value < 0 and "heads" in key):
            held = f", as {path.parent} holds {stored}" if stored.tensors else ""
            raise DataError(f"{path}: {name[-80:]} is {str(value)[:20]}; expected 0 to {most:,}{held}; {REMEDY}")


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
        inner: Mapping[str, Any] = value if isinstance(value, dict) else {}
        waiting += ((f"{name}.{key}" if name else key, item) for key, item in inner.items())
        if isinstance(value, list):
            waiting += ((name, item) for item in value)
        if isinstance(value, dict | list):
            yield name, len(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def _require_files(folder: Path) -> None:
    """Refuse a folder with a pipe or device, which reading would wait for, or a text that fills the memory."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if is_file(path) and path.stat().st_size > MOST_READ and any(path.match(pattern) for pattern in READ):
            raise DataError(f"{path} has {path.stat().st_size:,} bytes; expected at most {MOST_READ:,}; {REMEDY}")
