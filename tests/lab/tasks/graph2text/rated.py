"""Two finished runs whose texts are rated, as a comparison leaves them."""

from __future__ import annotations

from pathlib import Path

from headwise.lab.experiment import run_folder
from headwise.lab.tasks.graph2text.data import test_graphs as graphs_of
from lab.tasks.graph2text.graph_sets import write_triples

HOSTILE = "</script><img src=x onerror=alert(1)>"


def write_pair(out: Path, place: Path) -> tuple[Path, Path, Path]:
    """Write two runs below a folder, and the graphs that they were tested on; return all three."""
    data = write_triples(place, 60)
    graphs = graphs_of(data)
    folders = (out / "svgd" / "seed-0", out / "plain" / "seed-0")
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / run_folder.RESULT).write_text('{"task": "graph2text"}', encoding="utf-8")
        texts = [f"{folder.parent.name} writes {number} {HOSTILE}" for number in range(len(graphs))]
        (folder / run_folder.TEXT).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    (out / "references.txt").write_text("".join(f"{graph.reference}\n" for graph in graphs), encoding="utf-8")
    return *folders, data
