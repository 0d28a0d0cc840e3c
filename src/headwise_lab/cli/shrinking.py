"""The commands `headwise prune` and `headwise merge`; whatever is slow to import is imported inside them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from headwise_lab.data.tables import Columns
from headwise_lab.options import TextColumn, TrustRemoteCode, require_known
from headwise_lab.output import print_record, printing_record, standard_console
from headwise_lab.stopping import stoppable

Model = Annotated[Path, typer.Argument(help="A folder of save_pretrained() with its tokenizer, or a finished run.")]
Text = Annotated[
    Path, typer.Option(help="File with one text per line, or a table; every fifth text is held out for the scores.")
]
Out = Annotated[Path, typer.Option(help="New folder for the smaller model, its tokenizer and the page.")]
Lines = Annotated[int, typer.Option(help="Lines to choose heads by and to calibrate on.", min=1)]
Recover = Annotated[int, typer.Option(help="Steps of training after the cut.", min=0)]
Rate = Annotated[float, typer.Option(help="First learning rate of that training; it falls to 0.", min=1e-8)]
STOPPED = "stopped; nothing was written."


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
    from headwise_lab.cli.shrink_run import Request, prune_model, show_shrunk
    from headwise_lab.cli.shrink_ways import WAYS

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
    from headwise_lab.cli.shrink_run import Request, merge_model, show_shrunk

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


COMMANDS = (prune, merge)
