"""Texts of two runs: a page to read, and a blind rating form for raters with its key."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from headwise.atomic import new_folder
from headwise.errors import DataError, require_integer
from headwise.input_files import read_numbered_lines
from headwise.lab.data.arrays import digest
from headwise.lab.experiment import run_folder
from headwise.lab.experiment.finished import require_intact
from headwise.lab.experiment.seeding import derive_key
from headwise.lab.results.runs import REFERENCES
from headwise.lab.tasks.graph2text.data import test_graphs
from headwise.lab.tasks.graph2text.files import Graph
from headwise.report.html import Page

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
    """A test graph and what two runs wrote about it.

    Attributes:
        number: Its place in the test split.
        title: Its title.
        triples: Its triples, each as a line.
        entities: Its entities, each as a line.
        reference: The text of its authors.
        texts: The text of either run.
    """

    number: int
    title: str
    triples: tuple[str, ...]
    entities: tuple[str, ...]
    reference: str
    texts: tuple[str, str]


def read_items(one: Path, other: Path, data: Path) -> list[Item]:
    """Return every test graph with the texts of two finished runs of one comparison or of two on the same data.

    Raises:
        DataError: A run is not finished, or was tested on other graphs than those of `data`.
    """
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

    Raises:
        DataError: The folder holds the form of other texts, whose ratings would be lost.
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
    return resources.files("headwise.lab.tasks.graph2text").joinpath(name).read_text(encoding="utf-8")
