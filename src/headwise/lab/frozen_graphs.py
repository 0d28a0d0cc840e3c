"""A finished run of graph2text, frozen: its graph encoder, which reads a user's own triples.

Owns how the nodes of a graph are named. A graph is a batch of its own: several would share a row of the attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headwise.checks import DataError
from headwise.lab import runs
from headwise.lab.arms import Arm
from headwise.lab.encoded import Encoded
from headwise.lab.frozen_model import Frozen, run_name, sizes_of
from headwise.lab.models.graph_writer import GraphWriter
from headwise.lab.tasks.graph2text import VOCABULARY, writer_of
from headwise.lab.tasks.graph_coder import GraphCoder
from headwise.lab.tasks.graph_data import collate
from headwise.lab.tasks.graph_files import Graph, read_triples
from headwise.lab.tasks.graph_scales import GraphScale
from headwise.lab.tasks.named import named_task
from headwise.lab.trained import revived
from headwise.layouts import find_heads

__all__ = ["frozen_graphs", "node_names"]

ROOT, INVERSE = "(root)", "\N{LEFTWARDS ARROW} "


def frozen_graphs(folder: Path, record: Mapping[str, Any], arm: Arm) -> Frozen:
    """Return the graph encoder of a run of graph2text."""
    kept = runs.read_json(folder / VOCABULARY)
    try:
        coder = GraphCoder(tuple(kept["vocabulary"]), int(kept["types"]), tuple(kept["relations"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / VOCABULARY} does not say the run's words ({error}); train it again.") from error
    model = writer_of(coder, sizes_of(GraphScale, folder, record))
    revived(folder, arm, model, named_task("graph2text"), seed=int(record["seed"]))
    encoder = model.encoder
    return Frozen(
        run_name(folder),
        encoder,
        find_heads(encoder),
        lambda graphs: _encoded(model, coder, graphs),
        lambda batch: encoder(**batch.inputs),
        None,
        tuple(folder / file for file in (runs.SETTINGS, runs.WEIGHTS, VOCABULARY)),
        lines=lambda path: read_triples(path, needs_text=False),
        note="Of this run the graph encoder was looked at: its tokens are a root, entities, and each relation twice.",
    )


def node_names(graph: Graph) -> tuple[str, ...]:
    """Return what each node of a graph is called, in the order of `graph_data.collate`.

    >>> graph = Graph((), (("beam", "search"), ("parsing",)), ("method", "task"), ((0, "USED-FOR", 1),), (), 1)
    >>> node_names(graph)
    ('(root)', 'beam search', 'parsing', 'USED-FOR', '← USED-FOR')
    """
    relations = [name for _, relation, _ in graph.triples for name in (relation, f"{INVERSE}{relation}")]
    return (ROOT, *(" ".join(entity) for entity in graph.entities), *relations)


def _encoded(model: GraphWriter, coder: GraphCoder, graphs: Sequence[Graph]) -> Iterator[Encoded]:
    device = next(model.parameters()).device
    for number, graph in enumerate(graphs):
        made = {name: one.to(device) for name, one in collate([coder.encode(graph)]).items()}
        with torch.no_grad():
            entities = model.entity_vectors(made["entities"])
        inputs = {"entities": entities, "nodes": made["nodes"], "neighbours": made["neighbours"]}
        yield Encoded(number, (number,), inputs, made["nodes"] != 0, (node_names(graph),))
