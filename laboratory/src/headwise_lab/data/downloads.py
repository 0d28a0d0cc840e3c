"""Downloading files with pinned URL, size and checksum.

A file appears under its name only when it is complete and has the expected checksum.
"""

import hashlib
import re
import shutil
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Container, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import urlsplit

from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

from headwise.atomic import PARTIAL, follow, new_file, put
from headwise.errors import DataError, SettingError, require_integer
from headwise.texts.progress import make_bars

CHUNK = 1 << 20
SILENCE = 60.0  # timeout of a transfer in seconds without data


@dataclass(frozen=True)
class Download:
    """A file to download.

    Attributes:
        url: Its http, https or ftp URL.
        sha256: Its checksum, 64 hexadecimal digits.
        size: Its size in bytes.
        members: Files to extract from a tar or zip archive, as (name inside, file name to save as). Empty for a file
            that is used as it is.

    Example:
        >>> Download("https://example.org/corpora/train.tgz", "0" * 64, 12).name
        'train.tgz'
    """

    url: str
    sha256: str
    size: int
    members: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        require_integer("size", self.size, low=1)
        if re.fullmatch("[0-9a-f]{64}", self.sha256) is None:
            raise SettingError(f"sha256 is {self.sha256!r}; expected 64 hexadecimal digits.")
        for _, kept in self.members:
            if kept in ("", ".", "..") or PurePosixPath(kept).name != kept or "\\" in kept:
                raise SettingError(f"members keeps {kept!r}; expected a file name without a folder.")

    @property
    def name(self) -> str:
        """Name of the file in the URL."""
        return PurePosixPath(urlsplit(self.url).path).name


def fetch(download: Download, folder: Path, *, progress: bool = False) -> tuple[Path, ...]:
    """Return the files of a download in `folder`, fetching those that are missing.

    An interrupted transfer resumes. Without a network, put the file into `folder` under its own name: it is checked
    and unpacked just the same. An archive fetched here is removed once it is unpacked.
    """
    archive = folder / download.name
    wanted = tuple(folder / kept for _, kept in download.members) or (archive,)
    partial = folder / f".{download.name}{PARTIAL}"
    if download.members and all(path.is_file() for path in wanted):
        partial.unlink(missing_ok=True)  # of a process that was killed after it had unpacked it
        return wanted
    try:
        follow(folder).mkdir(parents=True, exist_ok=True)
        if archive.is_file():
            _require_checksum(archive, download, f"{archive} is another file; take it away and run again.")
            _unpack(archive, download)
        else:
            _transfer(download, partial, progress)
            _unpack(partial, download)
            if download.members:
                partial.unlink()
            else:
                put(partial, archive)
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error}); name another folder.") from error
    return wanted


def _transfer(download: Download, partial: Path, progress: bool) -> None:
    """Complete the file under its temporary name, and check it."""
    present = partial.stat().st_size if partial.is_file() else 0
    if present > download.size:
        partial.unlink()
        present = 0
    if present < download.size:
        present = _receive(download, partial, present, progress)
    if present < download.size:
        raise DataError(f"{download.url} stopped after {present:,} of {download.size:,} bytes; run again to resume.")
    try:
        _require_checksum(partial, download, f"what {download.url} gives has changed or was damaged.")
    except DataError:
        partial.unlink()
        raise


def _receive(download: Download, partial: Path, present: int, progress: bool) -> int:
    """Append the missing bytes to `partial`, or restart if the server cannot resume; return its size."""
    # some servers refuse Python's own name
    headers = {"User-Agent": "headwise"} | ({"Range": f"bytes={present}-"} if present else {})
    request = urllib.request.Request(download.url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=SILENCE)
    except (OSError, HTTPException) as error:
        raise _explain_unreachable(download, partial.parent, error) from error
    with response:
        resumed = present > 0 and getattr(response, "status", None) == 206
        received = present if resumed else 0
        columns = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        bars = make_bars(*columns, shown=progress, transient=False)
        with partial.open("ab" if resumed else "wb") as stream, bars:
            task = bars.add_task(download.name, total=download.size, completed=received)
            # a larger file is a different one: the checksum will differ
            while received <= download.size:
                try:
                    piece = response.read(CHUNK)
                except (OSError, HTTPException) as error:
                    raise _explain_unreachable(download, partial.parent, error) from error
                if not piece:
                    break
                received += stream.write(piece)
                bars.update(task, completed=received)
    return received


def _explain_unreachable(download: Download, folder: Path, error: Exception) -> DataError:
    reason = getattr(error, "reason", None) or error
    return DataError(
        f"{download.url} cannot be fetched ({reason}); run again where there is a network, or put the file as "
        f"{download.name} into {folder} (sha256 {download.sha256})."
    )


def _require_checksum(path: Path, download: Download, otherwise: str) -> None:
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != download.sha256:
        raise DataError(
            f"{download.name} has sha256 {found} ({path.stat().st_size:,} bytes); expected {download.sha256} "
            f"({download.size:,} bytes): {otherwise}"
        )


def _unpack(archive: Path, download: Download) -> None:
    """Extract the named members next to the archive, and nothing else; without any it may be no archive."""
    missing = dict(download.members)
    if not missing:
        return
    try:
        for name, stream in (
            _open_zip_members(archive, {**missing}) if zipfile.is_zipfile(archive) else _open_tar_members(archive)
        ):
            kept = missing.pop(name, None)
            if kept is not None:
                with new_file(archive.with_name(kept)) as temporary, temporary.open("wb") as unpacked:
                    shutil.copyfileobj(stream, unpacked, CHUNK)
            if not missing:
                return
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise DataError(f"{archive.parent / download.name} cannot be unpacked ({error}); fetch it again.") from error
    raise DataError(f"{archive.parent / download.name} lacks {', '.join(missing)}; was it unpacked and packed anew?")


def _open_tar_members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(archive) as packed:
        for member in packed:
            stream = packed.extractfile(member) if member.isreg() else None
            if stream is not None:
                yield member.name.removeprefix("./"), stream


def _open_zip_members(archive: Path, names: Container[str]) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as packed:
        for name in packed.namelist():
            if name in names:
                with packed.open(name) as stream:
                    yield name, stream
