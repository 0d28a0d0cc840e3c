"""The graph-to-text task: GraphWriter writes an abstract from a title and a knowledge graph."""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import sacrebleu
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.errors import DataError
from headwise.input_files import encode_json
from headwise.texts.batching import TokenBatches, batch_by_tokens, to_device
from headwise.texts.frozen import Frozen
from headwise_lab.data.arrays import stable_key
from headwise_lab.experiment.evaluation import count_ngrams, round_to_bins, spread_evenly
from headwise_lab.experiment.run_folder import VOCABULARY
from headwise_lab.experiment.task import Answers, Task
from headwise_lab.tasks.graph2text.data import EncodedGraph, GraphData, Graphs, collate, load_graphs
from headwise_lab.tasks.graph2text.decoding import generate_texts
from headwise_lab.tasks.graph2text.files import FORM, Graph, read_graphs, spell_out
from headwise_lab.tasks.graph2text.model import GraphWriter, build_writer
from headwise_lab.tasks.graph2text.scales import GRAPH_SCALES, GraphScale
from headwise_lab.tasks.graph2text.scores import repeated_clauses, scores, signatures

PROBED, PROBED_TOKENS = 64, 4_096


class Graph2TextTask(Task, settings=Path(__file__).with_name("task.toml")):
    """Text from knowledge graphs (Koncel-Kedziorski et al. 2019; An et al. 2020, section 5.4); see `task.Task`."""

    name = "graph2text"
    scales = GRAPH_SCALES

    def load(
        self,
        folder: Path | None,
        scale: GraphScale,
        cache: Path | None,  # noqa: ARG002  the files are read at once
        *,
        progress: bool = False,  # noqa: ARG002  as above
    ) -> GraphData:
        """Return the data; see `load_graphs`."""
        if folder is None:
            raise DataError(f"graph2text needs --data: AGENDA's folder, or a file with {FORM}.")
        return load_graphs(folder, scale)

    def find(self, folder: Path, scale: GraphScale) -> None:  # noqa: ARG002  any scale reads the same files
        """Refuse a place without graphs and texts."""
        read_graphs(folder)

    def model(self, data: GraphData, scale: GraphScale) -> GraphWriter:
        """Return GraphWriter."""
        return build_writer(data.coder, scale)

    def other_model(self, name: str, data: GraphData, scale: GraphScale) -> GraphWriter:  # noqa: ARG002  there is one
        """Return GraphWriter with the graph zeroed: it reads the title and the number of entities."""
        return build_writer(data.coder, scale, blind=True)

    def target(self, model: GraphWriter) -> nn.Module:
        """Return the graph encoder: its blocks are what the arms act on."""
        return model.encoder

    def batches(self, data: GraphData, scale: GraphScale, seed: int) -> TokenBatches:
        """Return batches of texts of similar length, by words."""
        return TokenBatches(data.train.lengths, tokens=scale.tokens, seed=seed)

    def collate(self, examples: Sequence[EncodedGraph]) -> dict[str, Tensor]:
        """Return a padded batch."""
        return collate(examples)

    def on_dev(self, model: GraphWriter, data: GraphData) -> dict[str, Any]:
        """Return the BLEU of greedy texts on dev."""
        found = generate_texts(model, data.dev, data.scale, beams=1)
        score = sacrebleu.BLEU(force=True).corpus_score(found, [data.dev.references]).score
        return {"pooled": score / 100}

    def on_test(self, model: GraphWriter, data: GraphData) -> Answers:
        """Return the texts of beam search and their scores, and how much greedy texts repeat without `no_repeat`."""
        began = time.monotonic()
        found = generate_texts(model, data.test, data.scale)
        seconds = time.monotonic() - began
        sums, counts = self.losses(model, data).sum(axis=0)
        free = generate_texts(model, data.test, dataclasses.replace(data.scale, no_repeat=0), beams=1)
        measures = {
            "NLL": float(sums / counts),
            "decoding_seconds": seconds,
            "free_repeated": 100 * fmean(map(repeated_clauses, free)),
        }
        return _score_texts(found, data.test, measures)

    def greedy(self, model: GraphWriter, data: GraphData) -> NDArray[np.float64]:
        """Return the statistics of BLEU of each greedy text of a test graph."""
        return count_ngrams(generate_texts(model, data.test, data.scale, beams=1), data.test.references)

    @torch.no_grad()
    def losses(self, model: GraphWriter, data: GraphData) -> NDArray[np.float64]:
        """Return the negative log likelihood of each test text, and its words."""
        found = np.zeros((len(data.test), 2))
        for batch, made in _make_batches(model, data.test):
            found[batch, 0] = model(**made)["losses"].double().cpu().numpy()
            found[batch, 1] = data.test.lengths[batch]
        return found

    def difficulties(self, data: GraphData) -> NDArray[np.int64]:
        """Return the number of triples of each test graph, rounded up to the end of its bin."""
        return round_to_bins([len(graph.triples) for graph in data.test.graphs], self.bins)

    def references(self, data: GraphData) -> list[str]:
        """Return the text of each test graph."""
        return data.test.references

    def probe(self, model: GraphWriter, data: GraphData) -> Iterator[None]:
        """Run the graph encoder on dev graphs, one batch per item."""
        chosen = spread_evenly(len(data.dev), PROBED)
        for _, made in _make_batches(model, data.dev, chosen):
            model.read(*(made[name] for name in ("title", "entities", "nodes", "neighbors", "types")))
            yield

    def baseline(self, name: str, data: GraphData, seed: int) -> Answers:  # noqa: ARG002  nothing is drawn
        """Return the text of the nearest training graph, filled in."""
        return _score_texts(find_nearest_texts(data.train.graphs, data.test.graphs), data.test, {})

    def extra_files(self, data: GraphData) -> dict[str, str]:
        """Return the vocabulary, which encodes the model's inputs."""
        return {VOCABULARY: encode_json(dataclasses.asdict(data.coder), indent=1, ascii_only=False) + "\n"}

    def open_frozen(self, folder: Path, record: Mapping[str, Any], pipeline: Path | None) -> Frozen:  # noqa: ARG002  nothing is parsed
        """Return the graph encoder of a run."""
        # the reader takes the model from this file
        from headwise_lab.tasks.graph2text.writer import open_graphs

        return open_graphs(folder, record)


def find_nearest_texts(train: Sequence[Graph], graphs: Sequence[Graph]) -> list[str]:
    """Return for each graph the text of the training graph with the most similar title and entities, filled in.

    Similarity is the cosine of the TF-IDF vectors of the words of title and entities.
    """
    # scikit-learn takes seconds to import, and only the worker that answers a baseline needs it
    from sklearn.feature_extraction.text import TfidfVectorizer

    def list_words(graph: Graph) -> list[str]:
        return [*graph.title, *(word for entity in graph.entities for word in entity)]

    # scikit-learn's annotation knows only the names of analyzers
    analyzer: Any = list_words
    vectors = TfidfVectorizer(analyzer=analyzer)
    known = vectors.fit_transform(train)
    nearest = (vectors.transform(graphs) @ known.T).toarray().argmax(axis=1)
    return [fill_in(train[int(place)], graph) for place, graph in zip(nearest, graphs, strict=True)]


def fill_in(source: Graph, graph: Graph) -> str:
    """Return the text of `source` with entities of `graph` in place of its own.

    The k-th entity of a type that the text mentions becomes the k-th of that type, counted round; where the graph has
    none of the type, the k-th of all.

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


def _make_batches(
    model: GraphWriter, split: Graphs, chosen: NDArray[np.int64] | None = None
) -> Iterator[tuple[NDArray[np.int64], dict[str, Tensor]]]:
    """Yield the places and tensors of batches of similar length, of a split or of its `chosen` places."""
    places = np.arange(len(split)) if chosen is None else chosen
    lengths = split.lengths[places]
    for batch in batch_by_tokens(lengths, tokens=max(PROBED_TOKENS, int(lengths.max()))):
        yield places[batch], to_device(collate([split[int(index)] for index in places[batch]]), model)


def _score_texts(found: Sequence[str], split: Graphs, measures: Mapping[str, float]) -> Answers:
    references = split.references
    entities = [[" ".join(entity) for entity in graph.entities] for graph in split.graphs]
    hashes = np.array([stable_key(line) >> 1 for line in found], dtype=np.int64)
    measures = {**scores(found, references, entities), **measures}
    return Answers(count_ngrams(found, references), hashes, measures, found, signatures(found, references))
