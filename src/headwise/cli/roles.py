"""The command `headwise roles`: the mask of each role over one sentence, in the terminal, as picture and as page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.atomic import new_folder, write_whole
from headwise.cli.output import asked_output, standard_console
from headwise.cli.settings import ShowRoles
from headwise.errors import DataError, SettingError
from headwise.plots.style import drawing_panels, to_png
from headwise.report.html import Page
from headwise.roles.build import Roles
from headwise.roles.idf import IDF, idf
from headwise.roles.roles import Rare
from headwise.roles.word_table import WordTable
from headwise.texts.batching import read_sentences

if TYPE_CHECKING:
    from headwise.roles.spacy import Parser


# Maximum side of a panel in inches, and maximum number of readable words along it.
LARGEST, READABLE = 8.0, 32
PAGE, PICTURE = "roles.html", "roles.png"
ALLOWED, FALLEN_BACK, FORBIDDEN = 2, 1, 0
SIGNS = {ALLOWED: "■", FALLEN_BACK: "□", FORBIDDEN: "·"}
STYLES = {ALLOWED: "bold cyan", FALLEN_BACK: "dim", FORBIDDEN: "dim"}
COLORS = ("#eef0f2", "#b9d4e8", "#0072B2")
LABELS = ("not allowed", "nothing allowed by the role: as in a regular head", "allowed by the role")
NO_RARITIES = (
    "rare: not shown. Which words are rare is counted on training text; name it with --corpus FILE (one text a line) "
    "or with --idf FILE (what IDF.save wrote)."
)
LEGEND = (
    "A row is the word that attends, a column the word it may attend to. ■ the role allows it; □ the role leaves that "
    "word nothing, so it attends as in a regular head."
)


@dataclass(frozen=True)
class RoleCells:
    """A role, and for each word a row with 2 where the role allows, 1 where the fallback does, and 0."""

    name: str
    cells: tuple[tuple[int, ...], ...]

    @property
    def share(self) -> float:
        """Share of the cells that the role allows."""
        return sum(cell == ALLOWED for row in self.cells for cell in row) / max(1, len(self.cells) ** 2)


def choose_roles(table: WordTable, counts: IDF | None, *, released: bool) -> Roles:
    """Return the roles of the paper or of its code; without the rare words if there are no counts."""
    if counts is not None:
        return Roles.released(counts) if released else Roles.paper(counts)
    # the other roles do not use the counts
    every = (Roles.released if released else Roles.paper)(idf([table]))
    return Roles(*(role for role in every.roles if not isinstance(role, Rare)))


def find_cells(table: WordTable, roles: Roles) -> list[RoleCells]:
    """Return the mask of each role between the words of the sentence."""
    mask = roles(table, num_heads=len(roles.roles))
    allowed = mask.allowed()[0]
    cells = allowed.int() + (allowed & mask.roles[0]).int()
    return [RoleCells(name, tuple(map(tuple, cells[number].tolist()))) for number, name in enumerate(mask.names)]


def name_folder(sentence: str) -> str:
    """Return a name for the folder of a sentence: its first words."""
    return "-".join(re.findall(r"\w+", sentence.lower())[:6]) or "sentence"


def show_roles(table: WordTable, roles: Roles, folder: Path, console: Console, *, command: str) -> None:
    """Print the masks of a parsed sentence, and write roles.png and roles.html into a folder."""
    shown = find_cells(table, roles)
    console.print(Columns([_draw_grid(table, one, console.width) for one in shown], padding=(1, 4)))
    console.print(f"\n{LEGEND}", markup=False)
    if not _counts_words(roles):
        console.print(NO_RARITIES)
    picture = _draw_picture(table, shown)
    with new_folder(folder, replaced=(PAGE, PICTURE)) as made:
        write_whole(made / PICTURE, picture)
        _make_page(table, roles, shown, picture, command).write(made / PAGE)
    console.print(f"written to {folder / PAGE} and {folder / PICTURE}", soft_wrap=True, markup=False)


def _counts_words(roles: Roles) -> bool:
    return any(isinstance(role, Rare) for role in roles.roles)


def _draw_grid(table: WordTable, one: RoleCells, width: int) -> Table | Text:
    size, numbers = len(table), len(str(len(table) - 1))
    margin = max(map(len, table.words)) + 1 + numbers + 1
    title = f"{one.name}: {100 * one.share:.0f} %"
    if margin + size > width:
        return Text(f"{title}; too wide for this terminal, the picture has it.\n")
    spaced = 2 if margin + 2 * size <= width else 1
    grid = Table(
        box=None, padding=(0, 1, 0, 0), show_header=False, title=Text(title), title_justify="left", min_width=len(title)
    )
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True, style="dim")
    grid.add_column(no_wrap=True)
    for line in range(numbers):
        digits = "".join(f"{word:>{numbers}}"[line].ljust(spaced) for word in range(size))
        grid.add_row("", "", Text(digits.rstrip(), style="dim"))
    for word, row in enumerate(one.cells):
        cells = Text("" if spaced == 1 else " ").join(Text(SIGNS[cell], style=STYLES[cell]) for cell in row)
        grid.add_row(Text(table.words[word]), str(word), cells)
    return grid


def _draw_picture(table: WordTable, shown: Sequence[RoleCells]) -> bytes:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    size = len(table)
    named = range(0, size, math.ceil(size / READABLE))
    words = [table.words[place] for place in named]
    # beyond a size the words are unreadable; the page has them
    side = min(max(2.6, 0.24 * size + 1.0), LARGEST)
    with drawing_panels(len(shown), 3, panel=(side, side + 0.35), margin=(0.0, 0.0)) as (figure, places):
        for axes, one in zip(places, shown, strict=True):
            axes.imshow(one.cells, cmap=ListedColormap(COLORS), vmin=0, vmax=2, interpolation="nearest")
            axes.grid(visible=False)
            axes.set_title(f"{one.name}, {100 * one.share:.0f} %", fontsize=11, loc="left")
            axes.set_xticks(named, words, rotation=90, fontsize=8)
            axes.set_yticks(named, words, fontsize=8)
            axes.tick_params(length=0)
            if size <= READABLE:
                # white lines between the cells
                axes.set_xticks([place - 0.5 for place in range(size)], minor=True)
                axes.set_yticks([place - 0.5 for place in range(size)], minor=True)
                axes.grid(visible=True, which="minor", color="white", linewidth=1.2)
                axes.tick_params(which="minor", length=0)
            for spine in axes.spines.values():
                spine.set_visible(False)
        patches = [Patch(color=color, label=label) for color, label in zip(COLORS, LABELS, strict=True)]
        figure.legend(handles=patches[::-1], loc="outside lower left", ncols=3, frameon=False)
        return to_png(figure)


def _make_page(table: WordTable, roles: Roles, shown: Sequence[RoleCells], picture: bytes, command: str) -> Page:
    page = Page("Roles of a sentence")
    page.paragraph(table.text or "", kind="lead")
    shares = ", ".join(f"{one.name} {100 * one.share:.0f} %" for one in shown)
    page.figure(
        picture,
        caption=(
            "A row is the word that attends, a column the word it may attend to. Dark: the role allows it. Pale: the "
            "role leaves that word nothing, so it attends as in a regular head. The share of dark cells follows the "
            "name."
        ),
        alt=f"Masks of {len(shown)} roles over the words of the sentence; allowed cells: {shares}.",
    )
    if not _counts_words(roles):
        page.paragraph(NO_RARITIES, kind="note")
    page.heading("Words")
    idf, (heads, relations) = roles.idf, table.parse()
    rows = []
    for word, text in enumerate(table.words):
        head = "root" if heads[word] == word else f"{table.words[heads[word]]} {heads[word]}"
        rows.append([text, str(word), relations[word], head, *([] if idf is None else [f"{idf(text):.2f}"])])
    header = ["word", "number", "relation", "head", *([] if idf is None else ["idf"])]
    page.table(header, rows, align="lrlrr"[: len(header)])
    page.heading("Settings")
    page.code("\n".join([f"$ {command}", "", *map(repr, roles.roles), *([] if idf is None else [repr(idf)])]))
    page.paragraph(
        "The roles are those of Wang et al. 2021, Multi-Head Self-Attention with Role-Guided Masks.", kind="note"
    )
    return page


def show(given: ShowRoles) -> None:
    """Parse a sentence with a spaCy pipeline and show its roles.

    Raises:
        DataError: The sentence is empty, spaCy or the pipeline is missing, or a file cannot be read.
        SettingError: Both a corpus and counts were named.
    """
    if given.corpus is not None and given.idf is not None:
        raise SettingError("--corpus and --idf were both given; expected one of them.")
    if not given.sentence.strip():
        raise DataError("the sentence is empty; expected some words.")
    parse = load_parser(given.pipeline)
    (table,) = parse([given.sentence])
    counts = None if given.idf is None else IDF.load(given.idf)
    if given.corpus is not None:
        # the corpus must be tokenized like the sentence
        counts = idf([token.text for token in parse.nlp.make_doc(line)] for line in read_sentences(given.corpus))
    chosen = choose_roles(table, counts, released=given.released)
    folder = given.out or Path("runs") / "roles" / name_folder(given.sentence)
    show_roles(table, chosen, folder, standard_console(), command=asked_output().command)


def load_parser(pipeline: str) -> Parser:
    """Return a parser with a spaCy pipeline; raises DataError if spaCy or the pipeline is missing."""
    try:
        from headwise.roles.spacy import Parser
    except ModuleNotFoundError as error:
        raise DataError(
            f"{error.name} is not installed, and parsing needs it; install the extra: pip install 'headwise[spacy]'."
        ) from None
    return Parser(pipeline)
