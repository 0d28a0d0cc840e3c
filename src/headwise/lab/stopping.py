"""How a command is stopped: by Ctrl-C, by a closed terminal or by a request to end, without a traceback or loss."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

RESUME = "stopped; give the same command again to resume."
# The terminal was closed, or a scheduler or service manager ends the command.
ENDING = tuple(getattr(signal, name) for name in ("SIGHUP", "SIGTERM") if hasattr(signal, name))
# Exit code of a program that a signal ended, as a shell reports it.
BY_SIGNAL = 128


class Stopped(Exception):
    """Ctrl-C or a signal, on its way past typer, with the message to show and the exit code."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.code = code


class Ended(KeyboardInterrupt):
    """A signal other than that of Ctrl-C, which is treated likewise."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def stoppable(sentence: str = RESUME, folders: Sequence[Path] = ()) -> Iterator[None]:
    """Turn Ctrl-C and signals to end into `Stopped`: typer would end the process before a message is shown.

    An interrupt may bring a sentence of its own, which is then shown.

    Args:
        sentence: The message.
        folders: Folders that the block may make; what it made of them and left empty is removed if it fails.
    """
    with _remove_empty(folders), _interrupt_on_signals():
        try:
            yield
        except KeyboardInterrupt as error:
            number = error.number if isinstance(error, Ended) else signal.SIGINT
            raise Stopped(str(error) or sentence, BY_SIGNAL + number) from None


@contextmanager
def ignoring_stops() -> Iterator[None]:
    """Ignore Ctrl-C and signals to end in the block, which ends soon anyway."""
    before = ignore_stops()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_stops() -> dict[signal.Signals, Any]:
    """Ignore Ctrl-C and signals to end from here on, which would show a traceback; return what handled them."""
    numbers = (signal.SIGINT, *ENDING) if threading.current_thread() is threading.main_thread() else ()
    return {number: signal.signal(number, signal.SIG_IGN) for number in numbers}


@contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """Raise `Ended` when the process is asked to end; what nohup or a caller decided about a signal stays."""
    # torchrun ends its processes by signals itself, and they may be waiting for one another
    if threading.current_thread() is not threading.main_thread() or "RANK" in os.environ:
        yield
        return
    changed = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, _raise_ended)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _raise_ended(number: int, _frame: FrameType | None) -> NoReturn:
    raise Ended(number)


@contextmanager
def _remove_empty(folders: Sequence[Path]) -> Iterator[None]:
    before = {place for folder in folders for place in (*_list_folders(folder), *folder.parents) if place.exists()}
    try:
        yield
    except BaseException:
        made = {place for folder in folders for place in (*_list_folders(folder), *folder.parents)} - before
        for place in sorted(made, key=lambda path: len(path.parts), reverse=True):
            # one that holds something stays
            with suppress(OSError):
                place.rmdir()
        raise


def _list_folders(folder: Path) -> list[Path]:
    return [folder, *(Path(root) for root, _, _ in os.walk(folder) if Path(root) != folder)]
