"""The commands around the translation task: fetch a corpus, prepare it, translate with a run.

Owns their options and what they say on the terminal. Everything slow is imported inside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.lab.cli.options import (
    Beams,
    DataFolder,
    LengthPenalty,
    ScaleName,
    TaskName,
    require_known,
    require_task,
    scale_of,
    stoppable,
)
from headwise.lab.cli.streams import standard_streams, window_of

# Batches of a window: sorting by length inside it pays, and the first line does not wait long.
WINDOW_BATCHES = 8


def translate(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a finished run of the translation task.")],
    beams: Beams = None,
    length_penalty: LengthPenalty = None,
    batch: Annotated[int, typer.Option(help="Most lines decoded together.")] = 32,
    pipeline: Annotated[
        Path | None,
        typer.Option(help="The pipeline that parsed a run with roles; where it lay then by default."),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Lines read before the first is written; 8 batches by default, 1 from a terminal."),
    ] = None,
) -> None:
    """Translate standard input to standard output, a line for each line, as it comes."""
    with stoppable("stopped."):
        from headwise.errors import DataError
        from headwise.lab.tasks.translation.translate import translate_lines
        from headwise.lab.tasks.translation.translator import open_translator

        translator = open_translator(run, beams=beams, length_penalty=length_penalty, batch=batch, pipeline=pipeline)
        if pipeline is not None and not translator.parsed:
            raise DataError(f"the sources of {run} were not parsed; leave --pipeline out.")
        window = window_of(WINDOW_BATCHES * batch) if window is None else window
        with standard_streams("lines translated") as (lines, output, done, warn):
            translate_lines(translator, lines, output, window=window, warn=warn, done=done)


def prepare(
    task: TaskName,
    out: Annotated[Path, typer.Option(help="Folder to write; compare --data takes it, here or elsewhere.")],
    data: DataFolder = None,
    scale: ScaleName = "demo",
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json to use instead of learning subwords.")
    ] = None,
) -> None:
    """Prepare a task's data for a scale once, into a folder to keep or to take to another machine."""
    require_task(task)
    from headwise.lab.experiment.registry import named_task

    chosen = named_task(task)
    if not chosen.prepares:
        raise typer.BadParameter(f"{task} needs no preparation; give its data to headwise compare {task} --data.")
    if data is None:
        raise typer.BadParameter("prepare needs --data.")
    size = scale_of(task, scale)
    with stoppable("stopped; nothing was written."):
        prepared = chosen.prepare(data, size, out, tokenizer=tokenizer, progress=True)
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    typer.echo(prepared.summary())
    typer.echo(f"{out}: {written / 2**20:.1f} MiB, for headwise compare {task} --scale {scale} --data {out}")


def download(
    corpus: Annotated[str, typer.Argument(help="multi30k, iwslt14, wmt14, wmt16 or wmt17.")],
    out: Annotated[Path, typer.Option(help="Folder for its files; what is there already is kept.")],
) -> None:
    """Fetch a corpus of the translation task: its files are pinned, checked and, where packed, unpacked."""
    from headwise.lab.tasks.translation.corpora import CORPORA, fetch_corpus

    require_known("corpus", corpus, CORPORA)
    with stoppable("stopped; give the same command again to go on."):
        fetch_corpus(CORPORA[corpus], out, progress=True)
    typer.echo(f"{corpus} is in {out}, for headwise compare translation --data {out}")
