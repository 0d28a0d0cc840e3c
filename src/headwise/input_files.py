"""Files that others made, read within bounds: a pipe does not block, and a line or depth of any size is refused."""

import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from headwise.errors import DataError

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
    """Return what is at a path, as the predicate of a sentence.

    >>> describe_place(Path("nowhere"))
    'does not exist'
    """
    return "is a folder" if path.is_dir() else "is a file" if is_file(path) else "does not exist"


def find_inside(folder: Path, name: object, by: str, remedy: str = "copy the folder again.") -> Path:
    """Return the file of a folder that a file of the folder names.

    It may be a link to another file of the folder, and in the Hub's cache to one of the blobs beside the snapshots.

    Args:
        folder: The folder.
        name: What was read.
        by: Name of the file that it was read from.
        remedy: What to do, as the end of a sentence.

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
    try:
        opened = io.BufferedReader(io.FileIO(path, opener=_open_without_waiting))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read ({reason}); expected a file.") from None
    with opened:
        _require_no_special(path, os.fstat(opened.fileno()).st_mode)
        if not (unpack and path.suffix == ".gz"):
            yield opened
            return
        with gzip.open(opened) as unpacked:
            yield unpacked


def read_numbered_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its end) of a UTF-8 text file, unpacked when it ends in `.gz`.

    Args:
        path: The file.
        longest: Most bytes of a line.

    Raises:
        DataError: The file cannot be read, unpacked or decoded, or a line is longer; the message names the line.
    """
    number = 0
    try:
        with open_input(path) as stream:
            while line := stream.readline(longest + 1):
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


def _open_without_waiting(path: str, flags: int) -> int:
    # opening a pipe waits for its writer, unless asked not to
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _require_no_special(path: Path, mode: int) -> None:
    kind = SPECIAL.get(stat.S_IFMT(mode))
    if kind is not None:
        raise DataError(f"{path} is {kind}; expected a file: save what it gives to one, and name that.")
