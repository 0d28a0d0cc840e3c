"""Files and folders that appear whole: written under another name beside their place, flushed to the disk, renamed.

Whoever reads, or comes after a crash, sees what was there before or all of what is there now. A temporary file or
folder is `.NAME.partial` and belongs to the one process that holds its lock, which ends with the process: what a
process that was killed left behind is taken over by the next that writes the same place.

Digests of files are kept in a JSON record that is written last, with a digest of its own values: later changes are
noticed and named. A folder without a record, such as one that transformers loads, is sealed by a file of digests.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headwise.errors import DataError
from headwise.input_files import encode_json, find_inside, is_file, open_input, parse_json, read_json

if sys.platform != "win32":
    import fcntl

# The file of a sealed folder, and the keys of a record: the digests of files, and of the record itself.
SEAL, FILES, OWN = "digests.json", "file_digests", "record_digest"
PARTIAL, LOCK, OLD = ".partial", ".lock", ".old"
# Signals that ask a process to end.
STOPS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGTERM") if hasattr(signal, name))
# renameat2 of Linux: relative to the working folder, and both names change places.
WORKING_FOLDER, EXCHANGE = -100, 2
# How torch's and safetensors' errors of a disk begin or are called; neither is an OSError.
OF_WRITERS = "PytorchStreamWriter", "unexpected pos", "SafetensorError"

# The thread that holds each lock, and what goes when the process ends inside a block.
_held: dict[Path, int] = {}
_temporary: set[Path] = set()


def write_whole(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file by rename; unless it is `durable`, a power cut may leave it empty.

    Raises:
        DataError: It cannot be written.
    """
    with name_write_errors(path), new_file(path, durable=durable) as temporary:
        temporary.write_bytes(content)


@contextmanager
def new_file(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield the temporary file that replaces a file at the end of the block; nothing changes if that fails.

    Raises:
        OSError: It cannot be written.

    Example:
        >>> with new_file(Path("numbers.txt")) as temporary:
        ...     _ = temporary.write_text("1 2 3")
        >>> Path("numbers.txt").read_text()
        '1 2 3'
        >>> Path("numbers.txt").unlink()
    """
    temporary = path.with_name(f".{path.name}{PARTIAL}")
    handle = _claim(temporary, wait=True)
    try:
        yield temporary
        put(temporary, path, durable=durable)
    finally:
        _remove(temporary)
        _release(handle)


@contextmanager
def new_folder(place: Path, *, replaced: Container[str] | None = (), wait: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `place` at the end of the block; nothing changes if that fails.

    Nobody else writes `place` in the meantime.

    Args:
        place: The folder.
        replaced: Names of what may be in `place` and is replaced; None for all that is there. Without any, a folder
            that is not empty is refused. Where there is something else too, it stays, and the new files are moved in
            one by one.
        wait: Whether to wait while another process writes `place`, after saying so.

    Raises:
        DataError: `place` is no folder or not empty, is written by another process, or cannot be written.

    Example:
        >>> with new_folder(Path("numbers")) as temporary:
        ...     _ = (temporary / "one.txt").write_text("1")
        >>> [path.name for path in Path("numbers").iterdir()]
        ['one.txt']
        >>> shutil.rmtree("numbers")
    """
    # the folder that a link leads to is replaced, and not the link
    given, place = place, follow(place)
    with hold(place, wait=wait):
        temporary, old = (_name_beside(place, kind) for kind in (PARTIAL, OLD))
        with name_write_errors(given):
            # a process that was killed had moved it aside
            if old.exists() and not place.exists():
                old.rename(place)
            _remove(old)
            if place.exists() and not place.is_dir():
                raise DataError(f"{given} is no folder; choose another.")
            if replaced == () and _list_present(place):
                raise DataError(f"{given} exists and is not an empty folder; choose another.")
            _remove(temporary)
            temporary.mkdir(parents=True)
        _temporary.add(temporary)
        try:
            yield temporary
            with name_write_errors(given):
                _sync(temporary)
                with undisturbed(f"stopped; {given} is written."):
                    _put_folder(temporary, place, replaced)
        except DataError as error:
            # the temporary folder is ours, and its name tells nobody anything
            raise DataError(str(error).replace(str(temporary), str(given))) from None
        finally:
            _remove(temporary)
            _temporary.discard(temporary)


def follow(place: Path) -> Path:
    """Return the place that a path leads to, beside which others can be made.

    Raises:
        DataError: It leads nowhere, or to the root of all folders.
    """
    try:
        with name_write_errors(place):
            found = place.resolve()
    except RuntimeError:
        # what Python raised before 3.13
        raise DataError(f"{place} is a link to itself; choose another folder.") from None
    if not found.name:
        raise DataError(f"{place} is the root of all folders; choose one inside it.")
    return found


@contextmanager
def hold(place: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a file or folder, which need not exist: nobody else holds it in the block, but this thread may again.

    Args:
        place: The file or folder.
        wait: Whether to wait while another process holds it, after saying so on stderr.

    Raises:
        DataError: Another process or thread holds it.
    """
    lock = _name_beside(follow(place), LOCK)
    if _held.get(lock) == threading.get_ident():
        yield
        return
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = _claim(lock)
        if handle is None and not wait:
            raise DataError(
                f"{place} is being written by another command; wait until that has ended, or choose another place."
            )
        if handle is None:
            sys.stderr.write(f"headwise: {place} is being written by another command; waiting until that has ended.\n")
            handle = _claim(lock, wait=True)
    except OSError:
        # nothing can be written there either, which is told by whoever tries
        handle = None
    _held[lock] = threading.get_ident()
    _temporary.add(lock)
    try:
        yield
    finally:
        del _held[lock]
        # while it is ours: the next holder makes another
        _remove(lock)
        _temporary.discard(lock)
        _release(handle)


def put(temporary: Path, place: Path, *, durable: bool = True) -> None:
    """Give a complete file or folder its name; what had the name is gone afterwards, and never before.

    Raises:
        OSError: It cannot be moved or flushed to the disk.
    """
    if durable:
        _sync(temporary)
    if temporary.is_dir():
        _put_folder(temporary, place, None)
        _remove(temporary)
        return
    temporary.replace(place)
    if durable:
        _sync_one(place.parent)


def sweep(folder: Path) -> None:
    """Remove the temporary files in a folder that processes which were killed have left."""
    for path in folder.glob(f".*{PARTIAL}"):
        owned = path if path.is_file() else path.with_name(path.name.removesuffix(PARTIAL) + LOCK)
        with suppress(OSError):
            handle = _claim(owned)
            if handle is not None:
                _remove(path)
                _remove(owned)
                _release(handle)


def discard_temporary() -> None:
    """Remove the temporary folders of this process, which ends without ending their blocks."""
    for path in [*_temporary]:
        _remove(path)


@contextmanager
def name_write_errors(place: Path) -> Iterator[None]:
    """Turn what a full or read-only disk makes the block raise into a sentence about `place`.

    Raises:
        DataError: It cannot be written.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        of_writer = f"{type(error).__name__}: {error}"
        if not isinstance(error, OSError) and not any(sign in of_writer for sign in OF_WRITERS):
            raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise DataError(f"{place} cannot be written ({reason}); choose a folder that can.") from None


@contextmanager
def undisturbed(sentence: str) -> Iterator[None]:
    """Have signals to end wait until the block is done; an interrupt then tells `sentence`."""
    came: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in STOPS} if main else {}
    handlers = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in handlers:
        signal.signal(number, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        try:
            for number in came[:1]:
                signal.raise_signal(number)
        except KeyboardInterrupt as interrupt:
            interrupt.args = (sentence,)
            raise


def _put_folder(temporary: Path, place: Path, replaced: Container[str] | None) -> None:
    present = _list_present(place)
    before = [name for name in present if replaced is None or name in replaced]
    # a folder that is mounted, or that this process is in, stays the same folder
    if before != present or temporary.parent == place or os.path.ismount(place) or Path.cwd().is_relative_to(place):
        _move_in(temporary, place, before)
    elif not present:
        temporary.rename(place)
    elif not _exchange(temporary, place):
        old = _name_beside(place, OLD)
        _remove(old)
        place.rename(old)
        temporary.rename(place)
        _remove(old)
    _sync_one(place.parent)


def _move_in(temporary: Path, place: Path, before: list[str]) -> None:
    """Move the files of one folder into another, in the order of names, and remove the `before` ones there."""
    # files that a seal names and that are missing are noticed, so it is moved first
    moved = sorted((path.name for path in temporary.iterdir()), key=lambda name: (name != SEAL, name))
    if SEAL in before:
        _remove(place / SEAL)
    done: set[str] = set()
    try:
        for name in moved:
            if (place / name).is_dir():
                _remove(place / name)
            (temporary / name).replace(place / name)
            done.add(name)
    except BaseException:
        for name in done.difference(before):
            _remove(place / name)
        raise
    for name in set(before).difference(moved):
        _remove(place / name)
    _sync_one(place)


def _list_present(place: Path) -> list[str]:
    return [path.name for path in place.iterdir() if path.name not in (PARTIAL, LOCK)] if place.is_dir() else []


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change their names at once; return whether the system can."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    names = os.fsencode(one), os.fsencode(other)
    return rename is not None and rename(WORKING_FOLDER, names[0], WORKING_FOLDER, names[1], EXCHANGE) == 0


def _claim(path: Path, *, wait: bool = False) -> int | None:
    """Open and lock a file, made if missing; None while another has it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            locked = _lock(handle, wait=wait)
            # who had it before may have renamed or removed it
            if locked and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except FileNotFoundError:
            locked = True
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        if not locked:
            return None


def _lock(handle: int, *, wait: bool) -> bool:
    # a file system without locks is not locked
    with suppress(OSError):
        try:
            if sys.platform != "win32":
                fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _release(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)


def _sync(place: Path) -> None:
    """Flush a file, or a folder with all that is in it, to the disk."""
    for path in sorted(place.rglob("*")) if place.is_dir() else ():
        _sync_one(path)
    _sync_one(place)


def _sync_one(path: Path) -> None:
    folder = path.is_dir()
    if folder and sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _name_beside(place: Path, kind: str) -> Path:
    # a mounted folder lies in one that may not be writable
    inside = place.is_dir() and not os.access(place.parent, os.W_OK)
    return place / kind if inside else place.with_name(f".{place.name}{kind}")


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits.

    Raises:
        DataError: It cannot be read, or is no file.
    """
    with open_input(path, unpack=False) as stream:
        try:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); fetch the file again.") from None


def seal(record: Mapping[str, Any], folder: Path, names: Iterable[str] = ()) -> dict[str, Any]:
    """Return a record with the digests of files in `folder`, and its own; earlier ones are replaced.

    Example:
        >>> seal({"steps": 3}, Path())
        {'steps': 3, 'file_digests': {}, 'record_digest': '4bf403939942bb7e52c8f3fb30842d47'}
    """
    sealed = {name: value for name, value in record.items() if name not in (FILES, OWN)}
    sealed[FILES] = {name: digest_file(folder / name) for name in names}
    return sealed | {OWN: _digest_record(sealed)}


def seal_folder(folder: Path) -> None:
    """Write the digests of all files of a folder into it."""
    names = [name for name in _list_files(folder) if name != SEAL]
    (folder / SEAL).write_text(encode_json(seal({}, folder, names), indent=1) + "\n", encoding="utf-8")


def require_folder_unchanged(folder: Path) -> None:
    """Compare a folder that `seal_folder` has sealed with its digests; one without a seal is not looked at.

    Raises:
        DataError: A file was changed, is missing or was added; the message names it.
    """
    path = folder / SEAL
    if not is_file(path):
        return
    remedy = f"copy the folder again, or delete {SEAL} if you changed it yourself."
    record = read_json(path, remedy)
    # another program's file of that name
    if is_sealed(record):
        require_unchanged(path, record, remedy=remedy)
        require_no_others(path, record, remedy=remedy)


def require_no_others(path: Path, record: Mapping[str, Any], *, remedy: str) -> None:
    """Refuse a file without a digest beside a sealed record, as in a copy that was not finished; hidden ones may be.

    Raises:
        DataError: There is one.
    """
    for name in _list_files(path.parent):
        if name not in record[FILES] and name != path.name:
            raise DataError(f"{path.parent / name} was added to the folder since it was written; {remedy}")


def is_sealed(record: Any) -> bool:
    """Return whether a record holds digests."""
    return isinstance(record, Mapping) and (FILES in record or OWN in record)


def require_unchanged(path: Path, record: Any, names: Iterable[str] | None = None, *, remedy: str) -> None:
    """Compare a record and the files beside it with its digests.

    Args:
        path: The file of the record.
        record: What it holds.
        names: Names of the files to compare, which must have a digest; None for all that have one.
        remedy: What to do about a change, as the end of a sentence.

    Raises:
        DataError: The record has no digests, or it or a file is not as it was when it was sealed; the message names it.
    """
    if not is_sealed(record):
        raise DataError(f"{path} holds no digests, so that a change would not be noticed; {remedy}")
    digests = record.get(FILES)
    unsealed = {name: value for name, value in record.items() if name != OWN}
    if not isinstance(digests, Mapping) or record.get(OWN) != _digest_record(unsealed):
        raise DataError(f"{path} was changed since it was written: its digest is another; {remedy}")
    require_files_unchanged(path, digests, digests if names is None else names, remedy=remedy)


def require_files_unchanged(path: Path, digests: Mapping[str, Any], names: Iterable[str], *, remedy: str) -> None:
    """Compare the files beside `path` with the digests that it holds.

    Raises:
        DataError: A file has no digest, is missing, or is not as it was; the message names it.
    """
    for name in names:
        file = path.parent / name
        if name not in digests:
            raise DataError(f"{file} has no digest in {path.name}, so that a change would not be noticed; {remedy}")
        find_inside(path.parent, name, path.name, remedy)
        if digest_file(file) != digests[name]:
            raise DataError(f"{file} was changed since it was written: its digest is another; {remedy}")


def _list_files(folder: Path) -> list[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts))


def _digest_record(record: Mapping[str, Any]) -> str:
    try:
        # as it is read again: keys are strings then, and tuples lists
        content = encode_json(parse_json(encode_json(record)), sort_keys=True, compact=True)
    except (RecursionError, ValueError):
        return ""
    return hashlib.blake2b(content.encode()).hexdigest()[:32]
