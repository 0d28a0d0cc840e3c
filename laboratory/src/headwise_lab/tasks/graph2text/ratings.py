"""Reads the files that raters saved and counts wins, losses and ties.

Texts of two runs: a page to read, and a blind rating form for raters with its key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from headwise.atomic import new_folder, seal
from headwise.errors import DataError, require_integer
from headwise.input_files import read_numbered_lines
from headwise.report.html import Page
from headwise_lab.data.arrays import digest
from headwise_lab.experiment import run_folder
from headwise_lab.experiment import run_folder as runs
from headwise_lab.experiment.run_folder import require_intact
from headwise_lab.experiment.seeding import derive_key
from headwise_lab.results.cells import NONE, Grid, Number
from headwise_lab.results.runs import REFERENCES
from headwise_lab.results.statistics import Estimate, estimate
from headwise_lab.tasks.graph2text.data import test_graphs
from headwise_lab.tasks.graph2text.files import Graph

# An et al. 2020, Table 5.
CRITERIA: tuple[tuple[str, str], ...] = (
    ("structure", "Structure: which is built better, without repeating itself?"),
    ("informativeness", "Informativeness: which says more of the knowledge?"),
    ("grammar", "Grammar: which is written more correctly?"),
    ("overall", "Overall: which is better?"),
)
FORM, KEY, OUTPUTS = "rating.html", "rating-key.json", "outputs.html"
SIDES = ("A", "B")


@dataclass(frozen=True)
class Item:
    """A test graph and what two runs wrote about it."""

    number: int
    title: str
    triples: tuple[str, ...]
    entities: tuple[str, ...]
    reference: str
    texts: tuple[str, str]


def read_items(one: Path, other: Path, data: Path) -> list[Item]:
    """Return every test graph with the texts of two finished runs of one comparison or of two on the same data."""
    pair = [_read_texts(folder) for folder in (one, other)]
    graphs = test_graphs(data)[: len(pair[0])]
    for folder, texts in zip((one, other), pair, strict=True):
        references = [line for _, line in read_numbered_lines(_find_references(folder))]
        if len(texts) != len(graphs) or references != [graph.reference for graph in graphs]:
            raise DataError(
                f"{folder} was tested on other graphs than the first {len(graphs):,} of {data}'s test split."
            )
    found = zip(graphs, *pair, strict=True)
    return [_make_item(number, graph, one, other) for number, (graph, one, other) in enumerate(found)]


def make_outputs_page(items: Sequence[Item], names: tuple[str, str], *, title: str) -> Page:
    """Return a page of what two runs wrote about graphs, with the graph and the authors' text."""
    page = Page(title)
    page.paragraph(f"What {names[0]} and {names[1]} wrote about {len(items)} graphs of the test split.", kind="lead")
    for item in items:
        page.heading(f"{item.number + 1}: {item.title}")
        page.table(("", "text"), [(name, text) for name, text in rows(item, names)], align="ll")
    return page


def rows(item: Item, names: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """Return an item as rows of a name and a text, as Figure 9 of An et al. 2020 has it."""
    return (
        ("Title", item.title),
        ("Knowledge", "; ".join(item.triples) or "no triples"),
        *zip(names, item.texts, strict=True),
        ("Gold", item.reference),
    )


def write_rating(
    place: Path,
    items: Sequence[Item],
    runs_: tuple[Path, Path],
    names: tuple[str, str],
    *,
    count: int,
    seed: int,
    outputs: Page | None = None,
) -> tuple[Path, Path]:
    """Write the form for raters, its key and perhaps a page of all texts into a folder; return form and key.

    Items, their order and the side of each run are drawn from `seed`, with each run on either side equally often. Only
    the key tells the runs apart, and raters must not have it.
    """
    require_integer("items", count, low=1)
    chosen = sorted(items, key=lambda item: derive_key(seed, "rated", item.number))[:count]
    drawn = sorted(chosen, key=lambda item: derive_key(seed, "side", item.number))
    flipped = {item.number: place < len(chosen) // 2 for place, item in enumerate(drawn)}
    records = [_make_record(item, flipped[item.number]) for item in chosen]
    named = digest(repr([sorted(item.items(), key=str) for item in records]))
    path = place / KEY
    if path.exists() and run_folder.read_json(path).get("set") != named:
        raise DataError(f"{path} belongs to other texts, perhaps already rated; choose another folder, or remove it.")
    sides = {str(number): "BA" if flip else "AB" for number, flip in flipped.items()}
    page = Page("Which text is better?")
    page.paragraph(
        "Two programs wrote an abstract from a title and a list of facts. For each pair say which text is better in "
        "four respects, or that there is no difference. Which program stands on which side changes from pair to pair.",
        kind="lead",
    )
    page.view(
        "rating",
        {"set": named, "criteria": [list(one) for one in CRITERIA], "items": records},
        script=_read_asset("rating_view.js"),
        style=_read_asset("rating_view.css"),
    )
    folders = [str(folder.resolve()) for folder in runs_]
    with new_folder(place, replaced=(FORM, KEY, OUTPUTS)) as made:
        page.write(made / FORM)
        run_folder.write_json(made / KEY, {"set": named, "names": list(names), "runs": folders, "sides": sides})
        if outputs is not None:
            outputs.write(made / OUTPUTS)
    return place / FORM, path


def _make_record(item: Item, flipped: bool) -> dict[str, Any]:
    texts = item.texts[::-1] if flipped else item.texts
    return {
        "id": item.number,
        "title": item.title,
        "triples": list(item.triples) or ["no triples"],
        "entities": list(item.entities),
        "reference": item.reference,
        **dict(zip(SIDES, texts, strict=True)),
    }


def _make_item(number: int, graph: Graph, one: str, other: str) -> Item:
    entities = [" ".join(entity) for entity in graph.entities]
    return Item(
        number,
        " ".join(graph.title),
        tuple(f"({entities[head]}, {relation}, {entities[tail]})" for head, relation, tail in graph.triples),
        tuple(f"{entity} ({kind})" for entity, kind in zip(entities, graph.types, strict=True)),
        graph.reference,
        (one, other),
    )


def _read_texts(folder: Path) -> list[str]:
    if not run_folder.is_finished(folder) or not (folder / run_folder.TEXT).exists():
        raise DataError(f"{folder} holds no finished run of graph2text; expected OUT/ARM/seed-N of a comparison.")
    require_intact(folder, run_folder.TEXT)
    return [line for _, line in read_numbered_lines(folder / run_folder.TEXT)]


def _find_references(folder: Path) -> Path:
    path = folder.resolve().parent.parent / REFERENCES
    if not path.exists():
        raise DataError(f"{path} does not exist; expected {folder} to be OUT/ARM/seed-N of a comparison.")
    return path


def _read_asset(name: str) -> str:
    return resources.files("headwise_lab.tasks.graph2text").joinpath(name).read_text(encoding="utf-8")


ANALYSIS = "ratings"
VALUES: Mapping[str, int] = {"win": 1, "lose": -1, "tie": 0}


@dataclass(frozen=True)
class Ratings:
    """The ratings of one form.

    Attributes:
        names: The rated run and the one it is compared with.
        runs: Their folders.
        values: By rater and item, for each criterion 1, -1 or 0: the rated run wins, loses, or neither.
    """

    names: tuple[str, str]
    runs: tuple[Path, Path]
    values: Mapping[tuple[str, int], Mapping[str, int]]

    @property
    def raters(self) -> tuple[str, ...]:
        """The raters."""
        return tuple(dict.fromkeys(rater for rater, _ in self.values))

    def shares(self, criterion: str) -> dict[str, float]:
        """Return the shares of "win", "lose" and "tie" among all ratings of a criterion."""
        found = [one[criterion] for one in self.values.values()]
        return {name: found.count(value) / len(found) for name, value in VALUES.items()}

    def lead(self, criterion: str) -> Estimate | None:
        """Return wins less losses as a share, over raters and items; None if no item has all raters."""
        items = [
            item
            for item in dict.fromkeys(i for _, i in self.values)
            if all((r, item) in self.values for r in self.raters)
        ]
        if not items:
            return None
        scores = [[self.values[rater, item][criterion] for item in items] for rater in self.raters]
        return estimate(np.array(scores, dtype=np.float64), least=-1.0, most=1.0)

    def agreement(self, criterion: str) -> float | None:
        """Return how often two raters of an item agree; None if no item has two."""
        pairs = [
            self.values[one, item][criterion] == self.values[other, item][criterion]
            for one, other in combinations(self.raters, 2)
            for item in {i for _, i in self.values}
            if (one, item) in self.values and (other, item) in self.values
        ]
        return sum(pairs) / len(pairs) if pairs else None


def read_ratings(path: Path, files: Sequence[Path]) -> Ratings:
    """Return the ratings in files that raters saved; items that a rater left unfinished are left out."""
    found = runs.read_json(path, "give the rating-key.json that headwise rate wrote.")
    try:
        names, folders = (tuple(map(str, found[name])) for name in ("names", "runs"))
        named, sides = str(found["set"]), {int(item): str(side) for item, side in found["sides"].items()}
        (one, other), (run, against) = names, map(Path, folders)
        if not set(sides.values()) <= {"AB", "BA"}:
            raise ValueError("a side is neither AB nor BA")
    except (LookupError, TypeError, ValueError, AttributeError):
        raise DataError(f"{path} is not the key of a rating form; expected what headwise rate wrote.") from None
    values: dict[tuple[str, int], dict[str, int]] = {}
    for file in files:
        rater, answers = _read_answers(file, named)
        if any(rater == known for known, _ in values):
            raise DataError(f"{file} is a second file of rater {rater}; leave one of them out.")
        for answer in answers:
            item, rating = _read_rating(file, answer, sides)
            if rating is not None:
                values[rater, item] = rating
    if not values:
        named_files = ", ".join(map(str, files))
        raise DataError(f"no item is rated in all respects in {named_files}; expected at least one in any of them.")
    return Ratings((one, other), (run, against), values)


def draw_ratings(ratings: Ratings) -> Grid:
    """Return wins, losses and ties by criterion, with the lead and how far raters agree."""
    found = []
    for name, _ in CRITERIA:
        shares, lead, agreed = ratings.shares(name), ratings.lead(name), ratings.agreement(name)
        cells = [f"{100 * shares[kind]:.0f}%" for kind in VALUES]
        cells.append(NONE if lead is None else str(_show_lead(lead)))
        found.append((name.capitalize(), *cells, NONE if agreed is None else f"{100 * agreed:.0f}%"))
    items = len({item for _, item in ratings.values})
    raters = len(ratings.raters)
    title = f"{ratings.names[0]} against {ratings.names[1]}: {items} texts, {raters} rater{'s' * (raters != 1)}"
    return Grid(title, ("", "Win", "Lose", "Tie", "win - lose, points", "agreement"), tuple(found), "lrrrrr")


def record_ratings(ratings: Ratings) -> Path:
    """Save the shares with the rated run, where `headwise reproduce repulsive/table-5` finds them."""
    folder = ratings.runs[0]
    if not runs.is_finished(folder):
        raise DataError(f"{folder}, the run that was rated, is no longer there; ratings are saved with it.")
    numbers: dict[str, float] = {
        f"{name}_{kind}": 100 * share for name, _ in CRITERIA for kind, share in ratings.shares(name).items()
    }
    numbers |= {"raters": len(ratings.raters), "rated_texts": len({item for _, item in ratings.values})}
    path = runs.analysis_file(folder, ANALYSIS)
    runs.write_json(path, seal({"numbers": numbers, "against": ratings.names[1]}, folder))
    return path


def _show_lead(lead: Estimate) -> Number:
    return Number(lead.value, lead.low, lead.high, digits=0, factor=100, signed=True)


def _read_answers(file: Path, named: str) -> tuple[str, list[Any]]:
    found = runs.read_json(file, "ask the rater for the file again.")
    try:
        rater, own, answers = str(found["rater"]), str(found["set"]), list(found["answers"])
    except (LookupError, TypeError):
        raise DataError(f"{file} is no file of ratings; expected what the form's button saved.") from None
    if own != named:
        raise DataError(
            f"{file} rates another form ({own:.60}) than the key's ({named:.60}); read it with its own key."
        )
    return rater, answers


def _read_rating(file: Path, answer: Any, sides: Mapping[int, str]) -> tuple[int, dict[str, int] | None]:
    """Return an item and its ratings as 1, -1 or 0 a criterion; None where one is missing."""
    try:
        item = int(answer["item"])
        side = sides[item]
        given = {name: answer.get(name) for name, _ in CRITERIA}
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        raise DataError(f"{file}: {str(answer)[:80]} rates no text of the form.") from None
    strange = [value for value in given.values() if value not in (*SIDES, "tie", None)]
    if strange:
        raise DataError(f"{file}: item {item} is rated {strange[0]!r:.60}; expected A, B or tie.")
    if None in given.values():
        return item, None
    # "AB" means that the rated run is A
    return item, {name: 0 if value == "tie" else (1 if value == side[0] else -1) for name, value in given.items()}
