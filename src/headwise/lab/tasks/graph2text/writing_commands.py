"""The command that writes texts about a user's own graphs with a run of the graph-to-text task.

Owns its options. Everything slow is imported inside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.lab.cli.options import Beams, LengthPenalty, stoppable
from headwise.lab.cli.streams import STANDARD_INPUT, standard_streams, window_of

# Graphs written about together: sorting by size inside pays, and the first text does not wait long.
WINDOW = 128


def write(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a finished run of the task graph2text.")],
    beams: Beams = None,
    length_penalty: LengthPenalty = None,
    window: Annotated[
        int | None,
        typer.Option(help=f"Lines read before the first is written; {WINDOW} by default, 1 from a terminal."),
    ] = None,
) -> None:
    """Write a text for each line of standard input, a title and triples (head | relation | tail ; ...) after a tab."""
    with stoppable("stopped."):
        from headwise.lab.tasks.graph2text.writer import open_writer, read_asked, write_lines

        writer = open_writer(run, beams=beams, length_penalty=length_penalty)
        window = window_of(WINDOW) if window is None else window
        with standard_streams("texts written") as (lines, output, done, warn):
            write_lines(writer, read_asked(lines, STANDARD_INPUT), output, window=window, warn=warn, done=done)
