"""Files that others made, read within bounds: a pipe does not block, and a line or depth of any size is refused.

JSON is written and read as its standard has it, without NaN and infinity. Python's own module has both, and most other
programs then refuse the file.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, NoReturn

from headwise.errors import DataError, HeadwiseError

# Most bytes of a line, so that a file without line ends, or one packed small, does not fill the memory.
LONGEST_LINE = 1 << 24
# What files that hold no plain text begin with, and what to do with them.
FORMATS = {
    b"\xff\xfe": 'is not UTF-8 but UTF-16, as Excel\'s "Unicode Text"; save it as CSV UTF-8, or convert it',
    b"\xfe\xff": "is not UTF-8 but UTF-16; convert it",
    b"PK\x03\x04": "is an archive (.zip), perhaps a spreadsheet (.xlsx); unpack it, or save the sheet as CSV UTF-8",
    b"\xd0\xcf\x11\xe0": "is a file of an old Office (.xls, .doc); save it as CSV UTF-8 or as text",
    b"\x1f\x8b": "is packed by gzip; add .gz to its name",
    b"BZh91AY&SY": "is packed by bzip2; unpack it, or pack it by gzip",
    b"\xfd7zXZ": "is packed by xz; unpack it, or pack it by gzip",
    b"\x28\xb5\x2f\xfd": "is packed by Zstandard; unpack it, or pack it by gzip",
    b"PAR1": "is Parquet; write it as JSON Lines or CSV",
    b"ARROW1": "is Arrow; write it as JSON Lines or CSV",
    b"SQLite format 3": "is a database; export the table as CSV",
    b"%PDF": "is a PDF; save its text",
}
SPECIAL = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def is_file(path: Path) -> bool:
    """Return whether a path is a file; False where there is nothing, or a folder.

    Raises:
        DataError: Something else is there, such as a pipe, or the folder may not be read.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); name another file or folder.") from None
    _require_no_special(path, mode)
    return stat.S_ISREG(mode)


def describe_place(path: Path) -> str:
    """Return what is at a path, as the predicate of a sentence."""
    return "is a folder" if path.is_dir() else "is a file" if is_file(path) else "does not exist"


def find_inside(folder: Path, name: object, by: str, remedy: str = "copy the folder again.") -> Path:
    """Return the file of a folder with the `name` that was read from the file `by` of the folder.

    It may be a link to another file of the folder, and in the Hub's cache to one of the blobs beside the snapshots.

    Raises:
        DataError: It is no relative name, leads out of the folder, or is no file.
    """
    parts = PurePath(name).parts if isinstance(name, str) and "\0" not in name else ()
    if not parts or ".." in parts or PurePath(*parts).is_absolute():
        raise DataError(f"{folder / by} names the file {str(name)[:60]!r}; expected one in {folder}; {remedy}")
    path = folder.joinpath(*parts)
    if not is_file(path):
        found = "is a folder" if path.is_dir() else "is missing: the folder was copied or saved incompletely"
        raise DataError(f"{path} {found}, and {by} names it; {remedy}")
    inside, target = folder.resolve(), path.resolve()
    snapshots = next((place for place in (inside, *inside.parents) if place.name == "snapshots"), None)
    kept = [inside] if snapshots is None else [inside, (snapshots.parent / "blobs").resolve()]
    if not any(target.is_relative_to(place) for place in kept):
        raise DataError(f"{path} is a link out of {folder}, to {target}; put the file itself there, or {remedy}")
    return path


@contextmanager
def name_in_errors(place: Path) -> Iterator[None]:
    """Begin the message of a `DataError` of the block with a place, unless it names it."""
    try:
        yield
    except DataError as error:
        if str(place) in str(error):
            raise
        raise DataError(f"{place}: {error}") from None


@contextmanager
def open_input(path: Path, *, unpack: bool = True) -> Iterator[io.BufferedIOBase]:
    """Open a file to read its bytes, unpacked if its name ends in `.gz`; never waits for a pipe.

    Raises:
        DataError: It cannot be opened, or is no file.
    """
    # opening a pipe waits for its writer, unless asked not to
    flag = getattr(os, "O_NONBLOCK", 0)
    try:
        opened = io.BufferedReader(io.FileIO(path, opener=lambda name, flags: os.open(name, flags | flag)))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read ({reason}); expected a file.") from None
    with opened:
        _require_no_special(path, os.fstat(opened.fileno()).st_mode)
        if not (unpack and path.suffix.lower() == ".gz"):
            yield opened
            return
        with gzip.open(opened) as unpacked:
            yield unpacked


def read_numbered_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its end) of a UTF-8 text file, unpacked when it ends in `.gz`.

    Raises:
        DataError: The file cannot be read, unpacked or decoded, or a line is longer; the message names the line.
    """
    number = 0
    try:
        with open_input(path) as stream:
            for line in split_lines(stream, longest + 1):
                number += 1
                if len(line) > longest and not line.endswith(b"\n"):
                    raise DataError(
                        f"{path}, line {number}: longer than {longest:,} bytes; expected a text file of shorter lines: "
                        "break the line, or name another file."
                    )
                require_text(path, number, line)
                # spreadsheets and some editors begin a file with a mark that is no text
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, text.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 ({error.reason}); convert the file.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}, after line {number}: cannot be read ({error}); fetch the file again.") from error


def split_lines(stream: io.BufferedIOBase, longest: int) -> Iterator[bytes]:
    """Yield the lines of a file with their ends, LF or CRLF, and pieces of `longest` bytes where a line is longer.

    CR, as of an old Mac, becomes LF where the first line would have no other end; elsewhere it is text.
    """
    chunk = stream.readline(longest)
    # the last byte may be half of CRLF
    alone, held = b"\r" in chunk[:-1] and not chunk.endswith(b"\n"), b""
    while chunk:
        lines = (held + chunk).splitlines(keepends=True) if alone else [chunk]
        unfinished = alone and not lines[-1].endswith((b"\r", b"\n")) and len(lines[-1]) < longest
        held = lines.pop() if unfinished else b""
        yield from (line[:-1] + b"\n" if alone and line.endswith(b"\r") else line for line in lines)
        chunk = stream.readline(longest)
    if held:
        yield held


def require_text(path: Path, number: int, line: bytes, *, begins: bool = True) -> None:
    """Refuse a line of a file that holds no text, by what the file is.

    Raises:
        DataError: The first line begins as files of another format do, or a line holds a NUL byte.
    """
    if number == 1 and begins and line.startswith(tuple(FORMATS)):
        known = next(advice for begin, advice in FORMATS.items() if line.startswith(begin))
        raise DataError(f"{path} {known}.")
    if b"\0" in line:
        raise DataError(
            f"{path}, line {number}: a NUL byte, which no text has; the file is damaged, binary or UTF-16 without its "
            "mark: convert it to UTF-8."
        )


def read_whole(path: Path) -> bytes:
    """Return the bytes of a file as they are.

    Raises:
        DataError: It cannot be read, or is no file.
    """
    with open_input(path, unpack=False) as opened:
        try:
            return opened.read()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); fetch the file again.") from None


def _require_no_special(path: Path, mode: int) -> None:
    kind = SPECIAL.get(stat.S_IFMT(mode))
    if kind is not None:
        raise DataError(f"{path} is {kind}; expected a file: save what it gives to one, and name that.")


# What may be half of a character beyond U+FFFF, written as two.
HALF = re.compile(r"\\u[dD][89a-fA-F]")


def encode_json(
    value: Any, *, indent: int | None = None, compact: bool = False, ascii_only: bool = True, sort_keys: bool = False
) -> str:
    """Return a value as a JSON text; `compact` leaves out the spaces after commas and colons.

    Raises:
        HeadwiseError: A number is not finite; the message names its place.

    Example:
        >>> encode_json({"score": {"pooled": float("inf")}})
        Traceback (most recent call last):
            ...
        headwise.errors.HeadwiseError: score.pooled is inf; expected finite numbers, since JSON has no others.
    """
    separators = (",", ":") if compact else None
    try:
        return json.dumps(
            value, indent=indent, separators=separators, ensure_ascii=ascii_only, sort_keys=sort_keys, allow_nan=False
        )
    except ValueError:
        found = find_not_finite(value)
        if found is None:
            raise
        name, number = found
        raise HeadwiseError(
            f"{name or 'the value'} is {number}; expected finite numbers, since JSON has no others."
        ) from None


def find_not_finite(value: Any, name: str = "") -> tuple[str, float] | None:
    """Return the place and value of the first number in JSON data that is NaN or infinite, or None.

    >>> find_not_finite({"heads": [{"drop": 0.5}, {"drop": float("nan")}]})
    ('heads.1.drop', nan)
    """
    if isinstance(value, float):
        return None if math.isfinite(value) else (name, value)
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    inner = (find_not_finite(part, f"{name}.{key}" if name else str(key)) for key, part in parts)
    return next((found for found in inner if found is not None), None)


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is not JSON, holds NaN or a number beyond the range of floats, is nested more deeply than Python
            can follow, or holds half of a surrogate pair, which no file can be written with.

    Example:
        >>> parse_json('{"loss": NaN}')
        Traceback (most recent call last):
            ...
        ValueError: NaN is no number of JSON
        >>> parse_json("[" * 100_000)
        Traceback (most recent call last):
            ...
        ValueError: brackets are nested too deeply
    """
    try:
        # Python's own reading of bytes lets half pairs pass
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_parse_float, parse_int=_parse_int)
        if HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"{error.object[error.start]!r} is half of a surrogate pair; take it out") from None
    return value


def read_json(path: Path, remedy: str) -> Any:
    """Return the value of a JSON file; `remedy` is the end of the sentence where it is none.

    Raises:
        DataError: It cannot be read, or is not JSON.
    """
    try:
        return parse_json(read_whole(path))
    except ValueError as error:
        raise DataError(f"{path} is not readable as JSON ({error}); {remedy}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _parse_int(text: str) -> int:
    # longer ones are beyond the range of floats, with which all numbers are compared
    if len(text) > 300:
        raise ValueError(f"{text[:60]}... is beyond the range of numbers")
    return int(text)


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:60]} is beyond the range of numbers")
    return number


@contextmanager
def refuse_panics(what: str, remedy: str) -> Iterator[None]:
    """Turn a panic of native code in the block, which is no `Exception`, into "`what` (the panic); `remedy`".

    Raises:
        DataError: Native code of the block panicked; every other exception stays as it is.
    """
    try:
        yield
    except BaseException as error:
        # the name that pyo3 gives it, of which there is no class to import
        if isinstance(error, Exception) or type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what} ({' '.join(str(error).split())[:200]}); {remedy}") from None


@contextmanager
def refuse_failures(what: str, remedy: str) -> Iterator[None]:
    """Turn whatever a library raises in the block for a damaged file into "`what` (the error); `remedy`".

    Raises:
        DataError: The block raised an exception that is not one of headwise's.
    """
    try:
        yield
    except HeadwiseError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(f"{what} ({reason}); {remedy}") from None
