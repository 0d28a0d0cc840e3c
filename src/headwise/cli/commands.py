"""The commands of the library and their options; whatever is slow to import is imported inside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.options import TextColumn, TrustRemoteCode, require_known
from headwise.cli.output import asked_output, print_file, print_record, printing_record, standard_console
from headwise.cli.stopping import stoppable
from headwise.texts.tables import Columns

if TYPE_CHECKING:
    from headwise.cli.shrink_run import Request, Shrunk

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
    from headwise.cli.shrink_run import Request, prune_model
    from headwise.cli.shrink_ways import WAYS

    require_known("--by", by, WAYS)
    columns = Columns(tuple(text_column or ()))
    request = Request(model, text, out, lines, recover, rate, columns, trust_remote_code)
    _shrink(request, lambda: prune_model(request, keep, by))


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
    from headwise.cli.shrink_run import Request, merge_model

    columns = Columns(tuple(text_column or ()))
    request = Request(model, text, out, lines, recover, rate, columns, trust_remote_code)
    _shrink(request, lambda: merge_model(request, kv_heads))


def _shrink(request: Request, shrink: Callable[[], Shrunk]) -> None:
    with stoppable(STOPPED, [request.out]):
        shrunk = shrink()
    shrunk.show(request.out)
    print_record(shrunk.record())


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

    with stoppable("stopped.", [out or RUNS]):
        show(sentence, pipeline, corpus, idf, released, out, standard_console(), asked_output().command)


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
    with stoppable(STOPPED, [out or RUNS]):
        print_file(inspect_models(model, text, columns, against, pipeline, shown, out, trust=trust_remote_code))


COMMANDS = (inspect, roles, prune, merge)
