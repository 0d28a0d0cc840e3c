"""What the commands of the library are given: a field is an option."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from headwise.cli.options import TextColumn, TrustRemoteCode
from headwise.texts.tables import Columns


@dataclass(frozen=True, kw_only=True)
class Shrink:
    """A model to make smaller, the text for it, and the training after the cut."""

    model: Annotated[Path, Argument(help="A folder of save_pretrained() with its tokenizer, or a finished run.")]
    text: Annotated[
        Path, Option(help="File with one text per line, or a table; every fifth text is held out for the scores.")
    ]
    out: Annotated[Path, Option(help="New folder for the smaller model, its tokenizer and the page.")]
    text_column: TextColumn = ()
    lines: Annotated[int, Option(help="Lines to choose heads by and to calibrate on.", min=1)] = 500
    recover: Annotated[int, Option(help="Steps of training after the cut.", min=0)] = 0
    recover_from: Annotated[
        str, Option(help="What it learns from: logits or hidden states of the whole model, both (mixed), or the text.")
    ] = "mixed"
    rate: Annotated[float, Option(help="First learning rate of that training; it falls to 0.", min=1e-8)] = 1e-4
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True, kw_only=True)
class Prune:
    """A share of the heads to keep, and how they are chosen."""

    shrink: Shrink
    keep: Annotated[float, Option(help="Share of the heads that each attention keeps.", min=0.01, max=0.99)] = 0.5
    by: Annotated[str, Option(help="How heads are chosen: exact (removed one by one), first-order or random.")] = (
        "exact"
    )


@dataclass(frozen=True, kw_only=True)
class Merge:
    """A number of key/value heads."""

    shrink: Shrink
    kv_heads: Annotated[int, Option(help="Key/value heads of each attention afterwards.", min=1)]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A size to reach with fewer heads and fewer neurons."""

    shrink: Shrink
    params: Annotated[
        float | None, Option(help="Share of the parameters of attentions and MLPs that stays.", min=0.05, max=0.99)
    ] = None
    time: Annotated[
        float | None, Option(help="Instead: share of the time of a forward pass on this machine.", min=0.05, max=0.99)
    ] = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A model that generates, a text, and the share of its cache that is kept whole."""

    model: Annotated[Path, Argument(help="A folder of save_pretrained() with its tokenizer, or a finished run.")]
    text: Annotated[Path, Option(help="File with one text per line, or a table; lines are joined to long rows.")]
    out: Annotated[Path, Option(help="New file for the budget, JSON; a map is drawn beside it.")]
    text_column: TextColumn = ()
    keep: Annotated[float, Option(help="Share of the key/value heads that keep all positions.", min=0, max=1)] = 0.25
    sink: Annotated[int, Option(help="First positions that the others keep.", min=0)] = 4
    window: Annotated[int, Option(help="Last positions that the others keep.", min=1)] = 256
    rows: Annotated[int, Option(help="Rows of text to score heads by, of twice the window.", min=1)] = 2
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True, kw_only=True)
class ShowRoles:
    """A sentence, its parser, and where rare words are counted."""

    sentence: Annotated[str, Argument(help="A sentence.")]
    pipeline: Annotated[str, Option(help="spaCy pipeline with a parser: a folder or an installed package.")]
    corpus: Annotated[Path | None, Option(help="Training text, one text per line, to count rare words in.")] = None
    idf: Annotated[Path | None, Option(help="Counts written by IDF.save, instead of --corpus.")] = None
    released: Annotated[bool, Option("--released", help="Use the roles of the paper's released code.")] = False
    out: Annotated[Path | None, Option(help="Folder for picture and page (default: runs/roles/...).")] = None


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """A model to look at, a text, and a model to compare it with."""

    model: Annotated[Path, Argument(help="A folder of save_pretrained(), a name on the Hub, or a finished run.")]
    text: Annotated[Path, Option(help="File, one sentence per line (logic: formula, graph2text: graph), or a table.")]
    against: Annotated[Path | None, Option(help="Another model of the same shape to compare with.")] = None
    pipeline: Annotated[str | None, Option(help="spaCy pipeline with a parser; also finds the roles of each head.")] = (
        None
    )
    text_column: TextColumn = ()
    exact: Annotated[bool, Option("--exact", help="Remove each head in turn; without it costs are estimated.")] = False
    everything: Annotated[bool, Option("--all", help="Print all columns of the table of layers.")] = False
    shown: Annotated[int, Option(help="Number of sentences on the page.", min=0)] = 6
    trust_remote_code: TrustRemoteCode = False
    out: Annotated[Path | None, Option(help="Folder for report and page (default: runs/inspect/...).")] = None

    @property
    def columns(self) -> Columns:
        """The columns of a table that hold the texts."""
        return Columns(self.text_column)
