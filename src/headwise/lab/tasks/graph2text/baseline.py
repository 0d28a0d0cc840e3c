"""A baseline of writing: the text of the nearest training graph, its entities replaced by those asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.lab.tasks.graph2text.files import spell_out

if TYPE_CHECKING:
    from headwise.lab.tasks.graph2text.files import Graph


def find_nearest_texts(train: Sequence[Graph], asked: Sequence[Graph]) -> list[str]:
    """Return for each graph the text of the training graph with the likest title and entities, filled in.

    Likeness is the cosine between the TF-IDF vectors of the words of title and entities.
    """
    # scikit-learn takes seconds to import, and only the worker that answers a baseline needs it
    from sklearn.feature_extraction.text import TfidfVectorizer

    # scikit-learn's annotation knows names of analyzers alone
    words: Any = _words
    vectors = TfidfVectorizer(analyzer=words)
    known = vectors.fit_transform(train)
    likest = (vectors.transform(asked) @ known.T).toarray().argmax(axis=1)
    return [fill_in(train[int(place)], graph) for place, graph in zip(likest, asked, strict=True)]


def fill_in(source: Graph, graph: Graph) -> str:
    """Return the text of `source` with entities of `graph` in the place of its own.

    The k-th entity of a type that the text mentions becomes the k-th of that type, counted round; where the graph has
    none of the type, the k-th of all.

    >>> from headwise.lab.tasks.graph2text.files import Graph
    >>> source = Graph((), (("lda",), ("text",)), ("method", "material"), (), ("we", "apply", 0, "to", 1), 1)
    >>> fill_in(source, Graph((), (("speech",), ("hmms",)), ("material", "method"), (), (), 2))
    'we apply hmms to speech'
    """
    own: dict[str, list[int]] = defaultdict(list)
    for number, kind in enumerate(graph.types):
        own[kind].append(number)
    met: dict[str, list[int]] = defaultdict(list)
    chosen: dict[int, int] = {}
    for word in source.text:
        if isinstance(word, int) and word not in chosen:
            kind = source.types[word]
            met[kind].append(word)
            candidates = own[kind] or list(range(len(graph.entities)))
            chosen[word] = candidates[(len(met[kind]) - 1) % len(candidates)]
    return spell_out([chosen[word] if isinstance(word, int) else word for word in source.text], graph.entities)


def _words(graph: Graph) -> list[str]:
    return [*graph.title, *(word for entity in graph.entities for word in entity)]
