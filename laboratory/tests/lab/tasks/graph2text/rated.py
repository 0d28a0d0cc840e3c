"""Two finished runs whose texts are rated, as a comparison leaves them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise_lab.experiment import run_folder
from headwise_lab.tasks.graph2text.data import test_graphs as graphs_of
from headwise_lab.tasks.graph2text.ratings import CRITERIA
from lab.tasks.graph2text.graph_sets import write_triples

HOSTILE = "</script><img src=x onerror=alert(1)>"


def write_pair(out: Path, place: Path) -> tuple[Path, Path, Path]:
    """Write two runs below a folder, and the graphs that they were tested on; return all three."""
    data = write_triples(place, 60)
    graphs = graphs_of(data)
    folders = (out / "svgd" / "seed-0", out / "plain" / "seed-0")
    for folder in folders:
        folder.mkdir(parents=True)
        texts = [f"{folder.parent.name} writes {number} {HOSTILE}" for number in range(len(graphs))]
        (folder / run_folder.TEXT).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        run_folder.write_result(folder, {"task": "graph2text"})
    (out / "references.txt").write_text("".join(f"{graph.reference}\n" for graph in graphs), encoding="utf-8")
    return *folders, data


def shown(form: Path) -> dict[str, Any]:
    """The data in a form."""
    block = form.read_text(encoding="utf-8").partition('id="rating-data">')[2].partition("</script>")[0]
    return json.loads(block)


def write_answers(path: Path, form: Path, rater: str, rate: Callable[[dict], str]) -> Path:
    """Write what the form's button would save, each item rated by `rate(item)`."""
    data = shown(form)
    answers = [
        {"item": item["id"], **dict.fromkeys((name for name, _ in CRITERIA), rate(item))} for item in data["items"]
    ]
    path.write_text(json.dumps({"set": data["set"], "rater": rater, "answers": answers}), encoding="utf-8")
    return path
