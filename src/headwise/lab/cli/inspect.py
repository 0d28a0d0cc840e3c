"""What is typed to inspect a model; everything slow is imported inside."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from headwise.lab.cli.options import standard_console, stoppable


def inspect(
    model: Annotated[Path, typer.Argument(help="A folder of save_pretrained(), or a finished run of any task.")],
    text: Annotated[Path, typer.Option(help="A file: a sentence a line; of logic a formula, of graph2text a graph.")],
    against: Annotated[Path | None, typer.Option(help="Another model of the same shape, shown beside it.")] = None,
    pipeline: Annotated[
        str | None, typer.Option(help="A pipeline of spaCy that parses: then the roles of each head are looked for.")
    ] = None,
    shown: Annotated[int, typer.Option("--shown", help="How many sentences the page shows.", min=0)] = 12,
    out: Annotated[Path | None, typer.Option(help="Folder for report and page; runs/inspect/... by default.")] = None,
) -> None:
    """Show what the heads of a model do on a text and what each is worth, in the terminal and as a page to click."""
    from headwise.lab.cli.inspect_command import inspect_models

    options = {"--text": text, "--against": against, "--pipeline": pipeline, "--shown": shown, "--out": out}
    command = shlex.join(
        ["headwise", "inspect", str(model)]
        + [part for name, value in options.items() if value is not None for part in (name, str(value))]
    )
    with stoppable("stopped; nothing was written."):
        inspect_models(model, text, against, pipeline, shown, out, standard_console(), command)
