"""How a command is stopped: by Ctrl-C, by a closed terminal or by a request to end, without a traceback or loss."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from headwise.atomic import discard_temporary, follow

RESUME = "stopped; give the same command again to resume."
# The terminal was closed, or a scheduler or service manager ends the command.
ENDING = tuple(getattr(signal, name) for name in ("SIGHUP", "SIGTERM") if hasattr(signal, name))
# Exit code of a program that a signal ended, as a shell reports it.
BY_SIGNAL = 128
# Seconds after which a command that was asked to end is ended, whatever it does: a call of torch may take longer.
GRACE_SECONDS = 1.5


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

    The message is the sentence, unless the interrupt brings one. Of the folders that the block may make, what it made
    and left empty is removed if it fails.
    """
    remove_empty = _list_made(folders)
    with _interrupt_on_signals() as numbers, _ending_in_time(numbers, sentence, remove_empty):
        try:
            yield
        except KeyboardInterrupt as error:
            remove_empty()
            number = error.number if isinstance(error, Ended) else signal.SIGINT
            raise Stopped(str(error) or sentence, BY_SIGNAL + number) from None
        except BaseException:
            remove_empty()
            raise


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


def end_children() -> None:
    """Kill the processes that this one has started, before it ends without waiting for them."""
    found = {process.pid for process in multiprocessing.active_children()}
    # others than of multiprocessing, where the system lists them
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found |= {int(child) for child in listed.read_text().split()}
    for child in found - {None}:
        with suppress(OSError):
            command = Path("/proc", str(child), "cmdline")
            # a tracker ends by itself, after it has removed what the others shared
            if not command.exists() or b"resource_tracker" not in command.read_bytes():
                os.kill(int(child or 0), getattr(signal, "SIGKILL", signal.SIGTERM))


@contextmanager
def _interrupt_on_signals() -> Iterator[Sequence[int]]:
    """Raise `Ended` when the process is asked to end, and yield which signals interrupt.

    What nohup or a caller decided about a signal stays.
    """
    # torchrun ends its processes by signals itself, and they may be waiting for one another
    if threading.current_thread() is not threading.main_thread() or "RANK" in os.environ:
        yield ()
        return
    changed = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, _raise_ended)
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        yield (*changed, signal.SIGINT) if own else changed
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _raise_ended(number: int, _frame: FrameType | None) -> NoReturn:
    raise Ended(number)


@contextmanager
def _ending_in_time(numbers: Sequence[int], sentence: str, leave: Callable[[], object]) -> Iterator[None]:
    """End the process if the block does not end in time after a signal.

    A signal interrupts Python code alone, and one call of torch may take minutes: of it a thread hears at once.
    """
    if not numbers:
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    done = threading.Event()

    def watch() -> None:
        while came := os.read(heard, 1):
            if came[0] in numbers and not done.wait(GRACE_SECONDS):
                os.write(2, f"headwise: {sentence}\n".encode())
                end_children()
                discard_temporary()
                leave()
                os._exit(BY_SIGNAL + came[0])
        os.close(heard)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        done.set()
        os.close(told)


def _list_made(folders: Sequence[Path]) -> Callable[[], None]:
    """Return a function that removes folders which are made from now on and are empty then."""
    # a link may lead to one that is yet to be made; the root, which takes minutes to walk, is refused
    folders = [*folders, *map(follow, folders)]

    def find() -> set[Path]:
        inside = (Path(root) for folder in folders for root, _, _ in os.walk(folder))
        above = (place for folder in folders for place in (folder, *folder.parents) if place.exists())
        return {*inside, *above}

    before = find()

    def remove() -> None:
        for place in sorted(find() - before, key=lambda path: len(path.parts), reverse=True):
            # one that holds something stays
            with suppress(OSError):
                place.rmdir()

    return remove
