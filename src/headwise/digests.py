"""Digests of files, kept in a JSON record that is written last: what changes later is noticed and named.

A record holds the digests of the files beside it, and its own, which is computed from its values. Records of earlier
versions hold none, and nothing is compared with those. A folder that has no record of its own, such as one that
transformers load, is sealed by a file with nothing but digests.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headwise.atomic import SEAL
from headwise.errors import DataError
from headwise.input_files import find_inside, is_file, open_input, read_whole
from headwise.strict_json import encode_json, parse_json

FILES, OWN = "file_digests", "record_digest"


# Of earlier versions: as many digits of another hash.
EARLIER = 32


def digest_file(path: Path, like: str = "") -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits, or the digest of an earlier version, `like` another one.

    Raises:
        DataError: It cannot be read, or is no file.
    """
    with open_input(path, unpack=False) as stream:
        try:
            if len(like) == EARLIER:
                return hashlib.file_digest(stream, "blake2b").hexdigest()[:EARLIER]
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
    try:
        record = parse_json(read_whole(path))
    except ValueError as error:
        raise DataError(f"{path} is not readable as JSON ({error}); {remedy}") from None
    # another program's file of that name
    if is_sealed(record):
        require_unchanged(path, record, remedy=remedy)
        require_no_others(path, record, remedy=remedy)


def require_no_others(path: Path, record: Mapping[str, Any], *, remedy: str) -> None:
    """Make sure that the folder of a sealed record holds no files without a digest, besides hidden ones.

    Raises:
        DataError: There is one, for example of a copy that was not finished.
    """
    for name in _list_files(path.parent):
        if name not in record[FILES] and name != path.name:
            raise DataError(f"{path.parent / name} was added to the folder since it was written; {remedy}")


def is_sealed(record: Any) -> bool:
    """Return whether a record holds digests; one of an earlier version does not."""
    return isinstance(record, Mapping) and (FILES in record or OWN in record)


def require_unchanged(path: Path, record: Any, names: Iterable[str] | None = None, *, remedy: str) -> None:
    """Compare a record and the files beside it with its digests; a record of an earlier version has none.

    Args:
        path: The file of the record.
        record: What it holds.
        names: Names of the files to compare, which must have a digest; None for all that have one.
        remedy: What to do about a change, as the end of a sentence.

    Raises:
        DataError: The record or a file is not as it was when the record was sealed; the message names it.
    """
    if not is_sealed(record):
        return
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
        if digest_file(file, str(digests[name])) != digests[name]:
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
