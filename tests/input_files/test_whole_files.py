"""What is written is on the disk before it has its name, belongs to one writer, and of a part of it readers tell."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cases import cases
from headwise import atomic
from headwise.atomic import (
    FILES,
    SEAL,
    hold,
    new_folder,
    require_folder_unchanged,
    seal_folder,
    sweep,
    undisturbed,
    write_whole,
)
from headwise.errors import DataError

NAMES = ("a.txt", "deep/b.txt")


def write_folder(place: Path, content: str = "new") -> None:
    with new_folder(place, replaced={*NAMES, "deep", SEAL}) as temporary:
        for name in NAMES:
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_text(content)
        seal_folder(temporary)


def make_old(place: Path) -> None:
    write_folder(place, "old")


def make_mixed(place: Path) -> None:
    make_old(place)
    (place / "mine.txt").write_text("mine")


def make_nothing(_place: Path) -> None:
    pass


WAYS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "file": (make_nothing, lambda place: write_whole(place, b"new")),
    "file again": (lambda place: place.write_bytes(b"old"), lambda place: write_whole(place, b"new")),
    "folder": (make_nothing, write_folder),
    "folder again": (make_old, write_folder),
    "beside others": (make_mixed, write_folder),
}


def identify(path: Path) -> int:
    return path.stat().st_ino


def record_renames(monkeypatch: pytest.MonkeyPatch, before: Callable[[Path, Path], object]) -> None:
    """Have each change of a name be told before it is made."""

    def change(own: Callable[..., None], source: Path, target: Path) -> None:
        before(Path(source), Path(target))
        own(source, target)

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, partial(change, getattr(os, name)))


@cases("exchanges", [True, False])
@cases("way", WAYS)
def test_everything_is_on_the_disk_before_it_has_its_name_and_its_name_then(
    way: str, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place, (prepare, write) = tmp_path / "out", WAYS[way]
    prepare(place)
    sync, exchange = os.fsync, atomic._exchange
    synced: set[int] = set()
    waiting: set[int] = set()

    def see_sync(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        waiting.discard(os.fstat(handle).st_ino)
        sync(handle)

    def see_name(source: Path, target: Path) -> None:
        if source.name.endswith(".old") or target.name.endswith(".old"):
            return
        assert {identify(path) for path in (source, *source.rglob("*"))} <= synced
        waiting.add(identify(target.parent))

    def see_exchange(one: Path, other: Path) -> bool:
        see_name(one, other)
        return exchanges and exchange(one, other)

    monkeypatch.setattr(os, "fsync", see_sync)
    monkeypatch.setattr(atomic, "_exchange", see_exchange)
    record_renames(monkeypatch, see_name)
    write(place)
    assert synced
    assert not waiting
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_of_a_folder_that_was_filled_in_part_the_seal_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place, seen = tmp_path / "out", tmp_path / "seen"
    make_old(place)
    # what is no part of the folder is not replaced with it
    (place / ".mine").write_text("mine")
    parts = 0

    def look(_source: Path, _target: Path) -> None:
        nonlocal parts
        shutil.copytree(place, seen, dirs_exist_ok=False)
        if (seen / SEAL).exists():
            parts += 1
            with pytest.raises(DataError):
                require_folder_unchanged(seen)
        else:
            assert all((seen / name).read_text() == "old" for name in NAMES)
        shutil.rmtree(seen)

    with monkeypatch.context() as patch:
        record_renames(patch, look)
        write_folder(place)
    require_folder_unchanged(place)
    assert parts == 2
    assert (place / ".mine").exists()


def drop_digest(place: Path) -> None:
    record = json.loads((place / SEAL).read_text())
    del record[FILES]["a.txt"]
    (place / SEAL).write_text(json.dumps(record))


@cases(
    ("change", "message"),
    [
        (lambda place: (place / "a.txt").write_text("other"), r"a\.txt was changed since it was written"),
        (lambda place: (place / "a.txt").unlink(), r"a\.txt is missing"),
        (lambda place: (place / "deep" / "c.txt").touch(), r"c\.txt was added to the folder"),
        (drop_digest, rf"{SEAL} was changed since it was written"),
        (lambda place: (place / SEAL).write_text("{"), rf"{SEAL} is not readable as JSON"),
    ],
)
def test_what_was_changed_in_a_sealed_folder_is_named(change: Callable[[Path], object], message: str, tmp_path: Path):
    make_old(tmp_path / "out")
    require_folder_unchanged(tmp_path / "out")
    change(tmp_path / "out")
    with pytest.raises(DataError, match=message):
        require_folder_unchanged(tmp_path / "out")


def test_a_folder_that_is_not_empty_is_refused_and_one_that_cannot_be_filled_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place, left = tmp_path / "out", 1
    place.mkdir()
    (place / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match="is not an empty folder"), new_folder(place):
        pass

    def fail(_source: Path, _target: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")

    record_renames(monkeypatch, fail)
    with pytest.raises(DataError, match="No space left"):
        write_folder(place)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_place_has_one_writer_also_where_another_waits(tmp_path: Path):
    place, held, end, refused = tmp_path / "out", threading.Event(), threading.Event(), []

    def refuse() -> None:
        try:
            with hold(place):
                pass
        except DataError as error:
            refused.append(str(error))

    def wait() -> None:
        with hold(place, wait=True):
            held.set()
            end.wait(20)

    # what a process that was killed has left is no lock
    (tmp_path / ".out.lock").touch()
    with hold(place), hold(place):
        in_thread(refuse).join(20)
        waiting = in_thread(wait)
        assert not held.wait(0.2)
    assert held.wait(20)
    # the first holder has removed the file that it locked
    refuse()
    end.set()
    waiting.join(20)
    assert len(refused) == 2
    assert "is being written by another command" in refused[0]
    refuse()
    assert len(refused) == 2
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_has_left_is_taken_over(tmp_path: Path):
    place = tmp_path / "out"
    for name in (".out.partial", ".out.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "left.txt").write_text("left")

    def fail() -> None:
        with new_folder(place, replaced=None) as temporary:
            assert list(temporary.iterdir()) == []
            raise ZeroDivisionError

    # it had moved the folder aside
    with pytest.raises(ZeroDivisionError):
        fail()
    assert [path.name for path in place.iterdir()] == ["left.txt"]
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".file.partial").touch()
    with hold(place):
        in_thread(lambda: sweep(tmp_path)).join(20)
        assert {path.name for path in tmp_path.glob("*.partial")} == {".out.partial"}
    sweep(tmp_path)
    assert list(tmp_path.glob("*.partial")) == []
    with new_folder(place, replaced=None) as temporary:
        (temporary / "new.txt").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "new.txt"]


def test_a_signal_waits_until_a_name_is_given_and_is_handled_as_before_then():
    before, done = signal.getsignal(signal.SIGINT), []
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def write() -> None:
        with undisturbed("it is written"):
            signal.raise_signal(signal.SIGINT)
            done.append("written")

    try:
        with pytest.raises(KeyboardInterrupt, match="it is written"):
            write()
        assert done
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
