"""The data of the graph-to-text task: the vocabulary, splits of graphs as ids, and how a batch is made."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from headwise.errors import DataError
from headwise.input_files import name_in_errors
from headwise.texts.batching import pad
from headwise_lab.data.arrays import digest
from headwise_lab.data.splits import drop_shared, split_by_hash
from headwise_lab.tasks.graph2text.files import Graph, read_graphs
from headwise_lab.tasks.graph2text.scales import GraphScale

SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
PADDING, UNKNOWN, START, END = range(len(SPECIAL))
# Rows of the table of nodes: padding, the root, a relation not seen in training and its inverse; then two a relation.
STRANGE, RELATIONS = 2, 4


class EncodedGraph(TypedDict):
    """One graph as ids; a word of the text at or above the vocabulary's size is a mention of an entity."""

    title: list[int]
    entities: list[list[int]]
    types: list[int]
    triples: list[tuple[int, int, int]]
    text: list[int]
    words: int


@dataclass(frozen=True, eq=False)
class GraphCoder:
    """The vocabulary: ids of words, types and relations.

    Attributes:
        vocabulary: The word of each id: padding, an unknown word, start and end, the types in angle brackets, words.
        types: Number of types.
        relations: The relations of training.
    """

    vocabulary: tuple[str, ...]
    types: int
    relations: tuple[str, ...]

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each word."""
        return {word: index for index, word in enumerate(self.vocabulary)}

    @cached_property
    def known_types(self) -> frozenset[str]:
        """The types that have an id."""
        return frozenset(word[1:-1] for word in self.vocabulary[len(SPECIAL) : len(SPECIAL) + self.types])

    @property
    def excluded(self) -> tuple[int, ...]:
        """Ids that are never generated: padding, unknown, start and types."""
        types = range(len(SPECIAL), len(SPECIAL) + self.types)
        return (PADDING, UNKNOWN, START, *types)

    @property
    def nodes(self) -> int:
        """Kinds of nodes that are no entity, padding included."""
        return RELATIONS + 2 * len(self.relations)

    def encode(self, graph: Graph, *, longest: int | None = None) -> EncodedGraph:
        """Return a graph as ids; a text longer than `longest` is truncated and has no end."""
        size = len(self.vocabulary)
        text = [size + word if isinstance(word, int) else self._find_id(word) for word in graph.text]
        text = [*text, END] if longest is None or len(text) <= longest else text[: longest + 1]
        known = {name: index for index, name in enumerate(self.relations)}
        return EncodedGraph(
            title=[self._find_id(word) for word in graph.title] or [UNKNOWN],
            entities=[[self._find_id(word) for word in entity] for entity in graph.entities],
            types=[self._find_id(_format_type(kind)) for kind in graph.types],
            triples=[
                (head, RELATIONS + 2 * known[relation] if relation in known else STRANGE, tail)
                for head, relation, tail in graph.triples
            ],
            text=text,
            words=size,
        )

    def decode(self, ids: Sequence[int]) -> list[str | int]:
        """Return the words of a text's ids, with the number of the entity at each mention."""
        size = len(self.vocabulary)
        return [self.vocabulary[index] if index < size else index - size for index in ids if index != END]

    def _find_id(self, word: str) -> int:
        return self.ids.get(word, UNKNOWN)


def learn_coder(train: Sequence[Graph], min_count: int) -> GraphCoder:
    """Return the coder of training graphs: their types, relations, and the words that occur often enough."""
    counts: Counter[str] = Counter()
    for graph in train:
        counts.update(graph.title)
        counts.update(word for entity in graph.entities for word in entity)
        counts.update(word for word in graph.text if isinstance(word, str))
    types = sorted({_format_type(kind) for graph in train for kind in graph.types})
    words = sorted(word for word, count in counts.items() if count >= min_count and word not in (*SPECIAL, *types))
    relations = sorted({relation for graph in train for _, relation, _ in graph.triples})
    return GraphCoder((*SPECIAL, *types, *words), len(types), tuple(relations))


def _format_type(kind: str) -> str:
    return f"<{kind}>"


IGNORED = -100
# The row of a root in the table of nodes; `GraphCoder` numbers the relations.
ROOT = 1


@dataclass(frozen=True, eq=False)
class Graphs(Dataset[EncodedGraph]):
    """The graphs of one split; `split[i]` is an `EncodedGraph`."""

    graphs: tuple[Graph, ...]
    coder: GraphCoder
    longest: int | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Words of each text, its end included, [N]."""
        whole = np.array([len(graph.text) + 1 for graph in self.graphs], dtype=np.int64)
        return whole if self.longest is None else np.minimum(whole, self.longest + 1)

    @property
    def references(self) -> list[str]:
        """The text of each graph."""
        return [graph.reference for graph in self.graphs]

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> EncodedGraph:
        return self.coder.encode(self.graphs[index], longest=self.longest)


@dataclass(frozen=True, eq=False)
class GraphData:
    """The task's data."""

    train: Graphs
    dev: Graphs
    test: Graphs
    coder: GraphCoder
    scale: GraphScale
    title: str
    fingerprint: str
    dropped: int

    def summary(self) -> str:
        """Return what the set is, the sizes of its splits and what was done to it."""
        sizes = ", ".join(f"{len(getattr(self, name)):,} {name}" for name in ("train", "dev", "test"))
        dropped = f"; {self.dropped:,} left out of training or dev as a later split has them" if self.dropped else ""
        longest = self.train.longest or 0
        cut_off = sum(len(graph.text) > longest for graph in self.train.graphs)
        cut_texts = f"; {cut_off:,} training texts cut to {longest} words" if cut_off else ""
        entities = np.mean([len(graph.entities) for graph in self.train.graphs])
        triples = np.mean([len(graph.triples) for graph in self.train.graphs])
        return (
            f"{self.title}: {sizes}{dropped}{cut_texts}; {entities:.1f} entities and {triples:.1f} triples a graph; "
            f"{len(self.coder.vocabulary):,} words, {len(self.coder.relations)} relations"
        )


def load_graphs(place: Path, scale: GraphScale) -> GraphData:
    """Return the data of a scale.

    A set of one file is cut into tenths by a hash of title and entities; where a set has no dev split, dev
    is a tenth of its training split, cut likewise. Graphs of training or dev that a later split has too are left out.
    """
    found = read_graphs(place)
    with name_in_errors(place):
        splits, dropped = _split(found.splits)
    caps = {"train": scale.train_examples, "dev": scale.dev_examples, "test": scale.test_examples}
    splits = {name: tuple(graphs[: caps[name]]) for name, graphs in splits.items()}
    for name, graphs in splits.items():
        if not graphs:
            raise DataError(f"{place}: the {name} split holds no graph; add data.")
    coder = learn_coder(splits["train"], scale.min_count)
    return GraphData(
        Graphs(splits["train"], coder, scale.longest),
        Graphs(splits["dev"], coder),
        Graphs(splits["test"], coder),
        coder,
        scale,
        found.title,
        digest("graphs 1", found.paths),
        dropped,
    )


def test_graphs(place: Path) -> list[Graph]:
    """Return the whole test split of a set, in its order."""
    with name_in_errors(place):
        return _split(read_graphs(place).splits)[0]["test"]


def collate(examples: Sequence[EncodedGraph]) -> dict[str, Tensor]:
    """Return a batch.

    The nodes of a graph are its root, its entities, and for each triple a node of the relation and one of its inverse
    (Koncel-Kedziorski et al. 2019). A node may attend itself; the root and each entity one another; and of a triple
    (a, r, b) the relation's node may attend a, b the relation's node, the inverse's node b, and a the inverse's node.

    Returns:
        "title" [B, L], words padded with 0; "entities" [E, W], the words of all entities of the batch; "nodes" [B, N],
        0 where there is none, the kind of a node that is no entity, and -1 - e for row e of "entities"; "neighbors"
        [B, N, N], True where the node of the row may attend that of the column; "types" [B, most entities], the word of
        each entity's type, 0 where there is none; "inputs" and "labels" [B, T], the decoder's inputs and
        targets, 0 and -100 at pads.

    Example:
        >>> graph = EncodedGraph(
        ...     title=[5], entities=[[6], [7, 5]], types=[4, 4], triples=[(0, 4, 1)], text=[8, 6, 3], words=8
        ... )
        >>> batch = collate([graph])
        >>> batch["nodes"].tolist(), batch["inputs"].tolist(), batch["labels"].tolist()
        ([[1, -1, -2, 4, 5]], [[2, 4, 6]], [[8, 6, 3]])
        >>> batch["neighbors"][0, 3].tolist()  # the relation attends the head of its triple and itself
        [False, True, False, True, False]
    """
    if not examples:
        raise DataError("collate was given no examples; expected at least one.")
    nodes, edges, entities = [], [], []
    for one in examples:
        count = len(one["entities"])
        row = [ROOT, *(-1 - len(entities) - place for place in range(count))]
        row += [kind + side for _, kind, _ in one["triples"] for side in (0, 1)]
        nodes.append(row)
        edges.append(_neighbors(count, one["triples"]))
        entities += one["entities"]
    widest = max(map(len, nodes))
    neighbors = np.zeros((len(examples), widest, widest), dtype=bool)
    for place, found in enumerate(edges):
        neighbors[place, : len(found), : len(found)] = found
    inputs = [[START, *(_read(word, one) for word in one["text"][:-1])] for one in examples]
    return {
        "title": pad([one["title"] for one in examples], PADDING),
        "entities": pad(entities, PADDING),
        "nodes": pad(nodes, PADDING),
        "neighbors": torch.from_numpy(neighbors),
        "types": pad([one["types"] for one in examples], PADDING),
        "inputs": pad(inputs, PADDING),
        "labels": pad([one["text"] for one in examples], IGNORED),
    }


def _read(word: int, graph: EncodedGraph) -> int:
    """Return what the decoder reads of a word it has written: of a mention, the entity's type."""
    return word if word < graph["words"] else graph["types"][word - graph["words"]]


def _neighbors(entities: int, triples: Sequence[tuple[int, int, int]]) -> NDArray[np.bool_]:
    size = 1 + entities + 2 * len(triples)
    found = np.eye(size, dtype=bool)
    found[0, 1 : 1 + entities] = found[1 : 1 + entities, 0] = True
    for number, (head, _, tail) in enumerate(triples):
        forward = 1 + entities + 2 * number
        found[forward, 1 + head] = found[1 + tail, forward] = True
        found[forward + 1, 1 + tail] = found[1 + head, forward + 1] = True
    return found


def _split(read: Mapping[str, Sequence[Graph]]) -> tuple[dict[str, list[Graph]], int]:
    """Return the graphs of train, dev and test, and how many were left out because a later split has them."""
    if "all" in read:
        places = split_by_hash([graph.key for graph in read["all"]])
        return {name: [read["all"][place] for place in found] for name, found in places.items()}, 0
    splits = {name: list(graphs) for name, graphs in read.items()}
    if "dev" not in splits:
        # dev is cut before graphs that are also in test are dropped, so that it does not depend on test
        whole = splits["train"]
        places = split_by_hash([graph.key for graph in whole])
        splits["train"] = [whole[place] for place in sorted([*places["train"], *places["test"]])]
        splits["dev"] = [whole[place] for place in places["dev"]]
    ordered = {name: splits[name] for name in ("train", "dev", "test")}
    kept = drop_shared({name: [graph.key for graph in graphs] for name, graphs in ordered.items()})
    found = {name: [ordered[name][place] for place in places] for name, places in kept.items()}
    return found, sum(map(len, ordered.values())) - sum(map(len, found.values()))
