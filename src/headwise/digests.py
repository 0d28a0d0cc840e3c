"""Digests of files, kept in a JSON record that is written last: what changes later is noticed and named.

A record holds the digests of the files beside it, and its own, which is computed from its values. Records of earlier
versions hold none, and nothing is compared with those.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headwise.errors import DataError
from headwise.input_files import find_inside, open_input
from headwise.strict_json import encode_json, parse_json

FILES, OWN = "file_digests", "record_digest"


def digest_file(path: Path) -> str:
    """Return 32 hexadecimal digits that identify the content of a file.

    Raises:
        DataError: It cannot be read, or is no file.
    """
    with open_input(path, unpack=False) as stream:
        try:
            return hashlib.file_digest(stream, "blake2b").hexdigest()[:32]
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
        if digest_file(file) != digests[name]:
            raise DataError(f"{file} was changed since it was written: its digest is another; {remedy}")


def _digest_record(record: Mapping[str, Any]) -> str:
    try:
        # as it is read again: keys are strings then, and tuples lists
        content = encode_json(parse_json(encode_json(record)), sort_keys=True, compact=True)
    except (RecursionError, ValueError):
        return ""
    return hashlib.blake2b(content.encode()).hexdigest()[:32]
