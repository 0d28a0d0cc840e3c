"""A finished run of the graph-to-text task that writes about graphs.

The graph encoder of a finished graph2text run, which reads a user's own triples.

Each graph is its own batch: several would share a row of the attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from headwise.errors import DataError, require_integer
from headwise.heads.find import find_heads
from headwise.texts.batching import Encoded, to_device
from headwise.texts.frozen import Frozen
from headwise_lab.data.line_streams import LONGEST_LINE, TextLine, answer_lines
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm import OtherModel
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.task import name_run
from headwise_lab.frozen.runs import list_files, read_attending_arm
from headwise_lab.tasks.graph2text.data import SPECIAL, GraphCoder, Graphs, collate
from headwise_lab.tasks.graph2text.decoding import generate_texts
from headwise_lab.tasks.graph2text.files import FORM_WITHOUT_TEXT, UNTYPED, Graph, parse_triples, read_triples
from headwise_lab.tasks.graph2text.model import BLIND, GraphWriter, build_writer
from headwise_lab.tasks.graph2text.scales import GraphScale
from headwise_lab.training.trained import (
    build_run_model,
    read_arm,
    read_finished,
    read_scale,
    require_kept_file,
    restore_run,
)

TASK = "graph2text"
# A graph of AGENDA has at most some 100 nodes. Time and memory grow with the square of the one and with the other.
MOST_NODES, MOST_WORDS = 1_000, 100
# Unknown types and relations that are warned of, each once; a stream may hold any number.
MOST_WARNINGS = 20


@dataclass(frozen=True, eq=False)
class Writer:
    """A trained model with its vocabulary."""

    model: GraphWriter
    coder: GraphCoder
    scale: GraphScale

    def write(self, graphs: Sequence[Graph]) -> list[str]:
        """Return the text about each graph as one line, in their order."""
        return generate_texts(self.model, Graphs(tuple(graphs), self.coder), self.scale)

    def find_unknown(self, graph: Graph) -> list[str]:
        """Return the types and relations of a graph that the training graphs lack."""
        relations = dict.fromkeys(relation for _, relation, _ in graph.triples)
        types = dict.fromkeys(kind for kind in graph.types if kind != UNTYPED)
        return [
            *(f"relation {one!r}" for one in relations if one not in self.coder.relations),
            *(f"type <{one}>" for one in types if one not in self.coder.known_types),
        ]


def open_writer(folder: Path, *, beams: int | None = None, length_penalty: float | None = None) -> Writer:
    """Return the writer of a finished run."""
    record = read_finished(folder, TASK)
    scale, arm = read_scale(folder, record, GraphScale), read_arm(folder, record)
    given = {"beams": beams, "length_penalty": length_penalty}
    scale = replace(scale, **{name: value for name, value in given.items() if value is not None})
    require_kept_file(folder, run_folder.WEIGHTS)
    coder = _read_coder(require_kept_file(folder, run_folder.VOCABULARY))
    blind = arm.find(OtherModel) == OtherModel(BLIND)
    model = build_run_model(folder, lambda: build_writer(coder, scale, blind=blind))
    restore_run(folder, arm, model, named_task(TASK), seed=int(record["seed"]))
    return Writer(model, coder, scale)


def read_requests(lines: Iterable[TextLine], name: str) -> Iterator[Graph | None]:
    """Yield the graph of each line, None for a blank one; `name` is that of the stream in messages."""
    for line in lines:
        where = f"{name}, line {line.number}"
        if line.cut:
            raise DataError(f"{where}: over {LONGEST_LINE:,} bytes; expected {FORM_WITHOUT_TEXT}.")
        if not line.text.strip():
            yield None
            continue
        graph = parse_triples(line.text, name, line.number, needs_text=False)
        nodes = 1 + len(graph.entities) + 2 * len(graph.triples)
        if nodes > MOST_NODES:
            raise DataError(
                f"{where}: a graph of {nodes:,} nodes, {len(graph.entities):,} entities and {len(graph.triples):,} "
                f"triples; expected at most {MOST_NODES:,}: give it in parts."
            )
        longest = max(map(len, (graph.title, *graph.entities)))
        if longest > MOST_WORDS:
            raise DataError(f"{where}: a title or entity of {longest:,} words; expected at most {MOST_WORDS}.")
        yield graph


def write_lines(
    writer: Writer,
    graphs: Iterable[Graph | None],
    output: IO[bytes],
    *,
    window: int,
    warn: Callable[[str], None] = lambda _sentence: None,
    done: Callable[[int], None] = lambda _lines: None,
) -> None:
    """Write the text about each graph in order, as one line; for None an empty line.

    `warn` is called with a sentence about each unknown type or relation, once per name, `done` as in `answer_lines`.
    """
    warned: set[str] = set()

    def write(held: list[Graph | None]) -> list[str]:
        present = [(place, graph) for place, graph in enumerate(held) if graph is not None]
        for _, graph in present:
            for name in writer.find_unknown(graph):
                if len(warned) < MOST_WARNINGS and name not in warned:
                    warned.add(name)
                    warn(f"line {graph.line}: {name} was in no training graph; the run knows nothing of it.")
        found = [""] * len(held)
        for (place, _), text in zip(present, writer.write([graph for _, graph in present]), strict=True):
            found[place] = text
        return found

    answer_lines(graphs, write, output, window=window, done=done)


def _read_coder(path: Path) -> GraphCoder:
    kept: Any = run_folder.read_json(path)
    try:
        vocabulary, types, relations = kept["vocabulary"], kept["types"], kept["relations"]
        words = (*vocabulary, *relations)
        sound = all(isinstance(word, str) for word in words) and tuple(vocabulary[: len(SPECIAL)]) == SPECIAL
        if not sound:
            raise ValueError("its special words are missing")
        require_integer("types", types, high=len(vocabulary) - len(SPECIAL))
        return GraphCoder(tuple(vocabulary), types, tuple(relations))
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(f"{path} does not hold a vocabulary ({str(error)[:200]}); train this run again.") from None


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
