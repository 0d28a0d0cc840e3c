"""The standard streams of a command that answers lines, with a counter of lines on the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import IO, TYPE_CHECKING, NamedTuple

import typer

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from headwise_lab.data.line_streams import TextLine

STANDARD_INPUT = "standard input"
# Exit code of a program whose output nobody reads any more, as a shell reports it: 128 and SIGPIPE.
READER_GONE = 141


class StandardStreams(NamedTuple):
    """Lines of standard input, standard output, and what to tell of lines written and of warnings."""

    lines: Iterator[TextLine]
    output: IO[bytes]
    done: Callable[[int], None]
    warn: Callable[[str], None]


def choose_window(lines: int) -> int:
    """Return the number of lines to read before the first is written: `lines`, or 1 if they are typed."""
    return 1 if sys.stdin.isatty() else lines


@contextmanager
def standard_streams(counted: str) -> Iterator[StandardStreams]:
    """Yield the streams; lines are counted on the terminal while answers go elsewhere.

    Args:
        counted: What is counted, as "lines translated".

    Raises:
        typer.Exit: Nobody reads the output any more.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from headwise_lab.data.line_streams import read_lines

    console = Console(stderr=True)
    shown = console.is_terminal and not sys.stdout.isatty()
    columns = SpinnerColumn(), TextColumn(f"{{task.completed:,}} {counted}"), TimeElapsedColumn()
    bars = Progress(*columns, console=console, transient=True) if shown else None
    task = bars.add_task("") if bars else None

    def done(lines: int) -> None:
        if bars is not None and task is not None:
            bars.update(task, completed=lines)

    def warn(sentence: str) -> None:
        console.print(f"headwise: {sentence}", highlight=False, markup=False, soft_wrap=True)

    context: AbstractContextManager[object] = bars or nullcontext()
    try:
        with context:
            yield StandardStreams(read_lines(sys.stdin.buffer, STANDARD_INPUT), sys.stdout.buffer, done, warn)
    except BrokenPipeError:
        # the interpreter flushes the stream once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(READER_GONE) from None
