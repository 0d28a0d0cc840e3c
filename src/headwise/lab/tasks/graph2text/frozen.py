"""The graph encoder of a finished graph2text run, which reads a user's own triples.

Each graph is its own batch: several would share a row of the attention.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headwise.heads.find import find_heads
from headwise.lab.data.batching import to_device
from headwise.lab.data.encoded import Encoded
from headwise.lab.experiment.frozen import Frozen, name_run
from headwise.lab.frozen.runs import list_files, read_attending_arm
from headwise.lab.tasks.graph2text.data import collate
from headwise.lab.tasks.graph2text.files import Graph, read_triples
from headwise.lab.tasks.graph2text.writer import Writer, open_writer

ROOT, INVERSE = "(root)", "\N{LEFTWARDS ARROW} "


def open_graphs(folder: Path, record: Mapping[str, Any]) -> Frozen:
    """Return the graph encoder of a run of graph2text."""
    read_attending_arm(folder, record)
    writer = open_writer(folder)
    encoder = writer.model.encoder
    return Frozen(
        name_run(folder),
        encoder,
        find_heads(encoder),
        lambda graphs: _encode(writer, graphs),
        lambda batch: encoder(**batch.inputs),
        None,
        list_files(folder),
        lines=lambda path: read_triples(path, needs_text=False),
        note="Of this run the graph encoder was looked at: its tokens are a root, entities, and each relation twice.",
    )


def name_nodes(graph: Graph) -> tuple[str, ...]:
    """Return what each node of a graph is called, in the order of `graph_data.collate`.

    >>> graph = Graph((), (("beam", "search"), ("parsing",)), ("method", "task"), ((0, "USED-FOR", 1),), (), 1)
    >>> name_nodes(graph)
    ('(root)', 'beam search', 'parsing', 'USED-FOR', '← USED-FOR')
    """
    relations = [name for _, relation, _ in graph.triples for name in (relation, f"{INVERSE}{relation}")]
    return (ROOT, *(" ".join(entity) for entity in graph.entities), *relations)


def _encode(writer: Writer, graphs: Sequence[Graph]) -> Iterator[Encoded]:
    for number, graph in enumerate(graphs):
        made = to_device(collate([writer.coder.encode(graph)]), writer.model)
        with torch.no_grad():
            entities = writer.model.entity_vectors(made["entities"])
        inputs = {"entities": entities, "nodes": made["nodes"], "neighbors": made["neighbors"]}
        yield Encoded(number, (number,), inputs, made["nodes"] != 0, (name_nodes(graph),))
