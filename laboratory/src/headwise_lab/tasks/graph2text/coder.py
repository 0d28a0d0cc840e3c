"""Graphs as ids, and ids as words: the vocabulary of the graph-to-text task."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

from headwise_lab.tasks.graph2text.files import Graph

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
