"""The command `headwise roles`: parses a sentence and shows its roles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headwise.errors import DataError, SettingError
from headwise.lab.cli.role_grids import choose_roles, name_folder, show_roles
from headwise.lab.data.encoded import read_sentences
from headwise.roles.idf import IDF, idf

if TYPE_CHECKING:
    from rich.console import Console

    from headwise.roles.spacy import Parser


def show(
    sentence: str,
    pipeline: str,
    corpus: Path | None,
    counts: Path | None,
    released: bool,
    out: Path | None,
    console: Console,
    command: str,
) -> None:
    """Parse the sentence and show its roles.

    Args:
        sentence: The sentence.
        pipeline: Folder or package of a spaCy pipeline.
        corpus: Training text to count words in, one text per line, or None.
        counts: Counts written by `IDF.save` instead, or None.
        released: Whether to use the roles of the paper's code.
        out: Folder of picture and page; by default in runs/roles.
        console: Where the masks are printed.
        command: The command as typed.

    Raises:
        DataError: The sentence is empty, spaCy or the pipeline is missing, or a file cannot be read.
        SettingError: Both a corpus and counts were named.
    """
    if corpus is not None and counts is not None:
        raise SettingError("--corpus and --idf were both given; expected one of them.")
    if not sentence.strip():
        raise DataError("the sentence is empty; expected some words.")
    parse = load_parser(pipeline)
    (table,) = parse([sentence])
    rarities = None if counts is None else IDF.load(counts)
    if corpus is not None:
        rarities = _count(corpus, parse)
    folder = out or Path("runs") / "roles" / name_folder(sentence)
    show_roles(table, choose_roles(table, rarities, released=released), folder, console, command=command)


def load_parser(pipeline: str) -> Parser:
    """Return a parser with a spaCy pipeline; raises DataError if spaCy or the pipeline is missing."""
    try:
        from headwise.roles.spacy import Parser
    except ModuleNotFoundError as error:
        raise DataError(
            f"{error.name} is not installed, and parsing needs it; install the extra: pip install 'headwise[spacy]'."
        ) from None
    return Parser(pipeline)


def _count(corpus: Path, parse: Parser) -> IDF:
    # the corpus must be tokenized like the sentence
    return idf([token.text for token in parse.nlp.make_doc(line)] for line in read_sentences(corpus))
