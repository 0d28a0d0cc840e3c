"""The commands of the library and their options; whatever is slow to import is imported inside them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.options import TextColumn, TrustRemoteCode, require_known
from headwise.cli.output import print_file, print_record, printing_record, standard_console
from headwise.cli.stopping import stoppable
from headwise.texts.tables import Columns

Model = Annotated[Path, typer.Argument(help="A folder of save_pretrained() with its tokenizer, or a finished run.")]
Text = Annotated[
    Path, typer.Option(help="File with one text per line, or a table; every fifth text is held out for the scores.")
]
Out = Annotated[Path, typer.Option(help="New folder for the smaller model, its tokenizer and the page.")]
Lines = Annotated[int, typer.Option(help="Lines to choose heads by and to calibrate on.", min=1)]
Recover = Annotated[int, typer.Option(help="Steps of training after the cut.", min=0)]
Rate = Annotated[float, typer.Option(help="First learning rate of that training; it falls to 0.", min=1e-8)]
STOPPED = "stopped; nothing was written."
RUNS = Path("runs")


@printing_record
def prune(
    model: Model,
    text: Text,
    out: Out,
    keep: Annotated[
        float, typer.Option(help="Share of the heads that each attention keeps.", min=0.01, max=0.99)
    ] = 0.5,
    by: Annotated[str, typer.Option(help="How heads are chosen: exact, first-order, redundancy or random.")] = "exact",
    text_column: TextColumn = None,
    lines: Lines = 500,
    recover: Recover = 0,
    rate: Rate = 1e-4,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Remove heads from the weights of a model, and compare the ways to choose them."""
    from headwise.cli.shrink_run import Request, prune_model, show_shrunk
    from headwise.cli.shrink_ways import WAYS

    require_known("--by", by, WAYS)
    columns = Columns(tuple(text_column or ()))
    words = ["headwise", "prune", str(model), "--keep", f"{keep:g}", "--by", by]
    command = _join([*words, *columns.words()], text, out, lines, recover, rate, trust_remote_code=trust_remote_code)
    with stoppable(STOPPED, [out]):
        request = Request(model, text, out, lines, recover, rate, command, trust_remote_code, columns)
        shrunk = prune_model(request, keep, by, standard_console())
    show_shrunk(shrunk, out, standard_console())
    print_record(shrunk.record())


@printing_record
def merge(
    model: Model,
    text: Text,
    out: Out,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads of each attention afterwards.", min=1)],
    text_column: TextColumn = None,
    lines: Lines = 500,
    recover: Recover = 0,
    rate: Rate = 1e-4,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Merge key/value heads into fewer ones, so that the cache is smaller, and tell what each step costs."""
    from headwise.cli.shrink_run import Request, merge_model, show_shrunk

    columns = Columns(tuple(text_column or ()))
    words = ["headwise", "merge", str(model), "--kv-heads", str(kv_heads)]
    command = _join([*words, *columns.words()], text, out, lines, recover, rate, trust_remote_code=trust_remote_code)
    with stoppable(STOPPED, [out]):
        request = Request(model, text, out, lines, recover, rate, command, trust_remote_code, columns)
        shrunk = merge_model(request, kv_heads, standard_console())
    show_shrunk(shrunk, out, standard_console())
    print_record(shrunk.record())


def _join(
    words: list[str], text: Path, out: Path, lines: int, recover: int, rate: float, *, trust_remote_code: bool
) -> str:
    """Return the command as typed."""
    words += ["--text", str(text), "--out", str(out), "--lines", str(lines)]
    words += ["--recover", str(recover), "--rate", f"{rate:g}"] if recover else []
    words += ["--trust-remote-code"] if trust_remote_code else []
    return shlex.join(words)


def roles(
    sentence: Annotated[str, typer.Argument(help="A sentence.")],
    pipeline: Annotated[str, typer.Option(help="spaCy pipeline with a parser: a folder or an installed package.")],
    corpus: Annotated[
        Path | None, typer.Option(help="Training text, one text per line, to count rare words in.")
    ] = None,
    idf: Annotated[Path | None, typer.Option("--idf", help="Counts written by IDF.save, instead of --corpus.")] = None,
    released: Annotated[bool, typer.Option("--released", help="Use the roles of the paper's released code.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for picture and page (default: runs/roles/...).")] = None,
) -> None:
    """Show where each role lets the words of a sentence attend: in the terminal, as a picture and as a page."""
    from headwise.cli.roles import show

    options = {"--corpus": corpus, "--idf": idf, "--out": out}
    command = shlex.join(
        ["headwise", "roles", sentence, "--pipeline", pipeline]
        + [part for name, value in options.items() if value is not None for part in (name, str(value))]
        + (["--released"] if released else [])
    )
    with stoppable("stopped.", [out or RUNS]):
        show(sentence, pipeline, corpus, idf, released, out, standard_console(), command)


@printing_record
def inspect(
    model: Annotated[Path, typer.Argument(help="A folder of save_pretrained(), or a finished run of any task.")],
    text: Annotated[
        Path, typer.Option(help="File, one sentence per line (logic: formula, graph2text: graph), or a table.")
    ],
    against: Annotated[Path | None, typer.Option(help="Another model of the same shape to compare with.")] = None,
    pipeline: Annotated[
        str | None, typer.Option(help="spaCy pipeline with a parser; also finds the roles of each head.")
    ] = None,
    text_column: TextColumn = None,
    shown: Annotated[int, typer.Option("--shown", help="Number of sentences on the page.", min=0)] = 12,
    trust_remote_code: TrustRemoteCode = False,
    out: Annotated[Path | None, typer.Option(help="Folder for report and page (default: runs/inspect/...).")] = None,
) -> None:
    """Show what the heads of a model do on a text and what each contributes: in the terminal and as a page."""
    from headwise.cli.inspection import inspect_models

    columns = Columns(tuple(text_column or ()))
    options = {"--text": text, "--against": against, "--pipeline": pipeline, "--shown": shown, "--out": out}
    command = shlex.join(
        ["headwise", "inspect", str(model)]
        + [part for name, value in options.items() if value is not None for part in (name, str(value))]
        + columns.words()
        + (["--trust-remote-code"] if trust_remote_code else [])
    )
    with stoppable("stopped; nothing was written.", [out or RUNS]):
        report = inspect_models(
            model,
            text,
            columns,
            against,
            pipeline,
            shown,
            out,
            standard_console(),
            command,
            trust_remote_code=trust_remote_code,
        )
    print_file(report)


COMMANDS = (inspect, roles, prune, merge)
