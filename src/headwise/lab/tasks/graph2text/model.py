"""GraphWriter (Koncel-Kedziorski et al. 2019): a text from a title and a knowledge graph, with copying of entities.

The graph encoder is in `encoder`, beam search in `decoding`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise.lab.models.encoder import ScaledEmbedding
from headwise.lab.tasks.graph2text.coder import UNKNOWN, GraphCoder
from headwise.lab.tasks.graph2text.encoder import CORRECT, RELEASED, Departures, GraphEncoder
from headwise.lab.tasks.graph2text.scales import GraphScale

IGNORED = -100
# Name of the model that does not see the graph.
BLIND = "no-graph"


@dataclass(frozen=True)
class Memory:
    """The encoded batch that the decoder reads; every tensor begins with [B].

    Attributes:
        graph: Keys and values of the nodes, [B, H, N, e] each.
        nodes: True at a node, [B, N].
        title: Keys and values of the title's words, [B, H, L, e] each.
        words: True at a word, [B, L].
        copies: Vectors by which entities are chosen for copying, [B, E, d].
        entities: True at an entity, [B, E].
        types: The word of each entity's type, [B, E].
        root: State of the graph's root, [B, d].
    """

    graph: tuple[Tensor, Tensor]
    nodes: Tensor
    title: tuple[Tensor, Tensor]
    words: Tensor
    copies: Tensor
    entities: Tensor
    types: Tensor
    root: Tensor

    def rows(self, rows: Tensor) -> Memory:
        """Return these rows of the batch; a row may be repeated."""
        return Memory(
            (self.graph[0][rows], self.graph[1][rows]),
            self.nodes[rows],
            (self.title[0][rows], self.title[1][rows]),
            *(one[rows] for one in (self.words, self.copies, self.entities, self.types, self.root)),
        )


@dataclass(frozen=True)
class State:
    """The decoder's state: hidden and cell of the LSTM, and its graph and title contexts, [B, d] each."""

    hidden: Tensor
    cell: Tensor
    graph: Tensor
    title: Tensor

    @property
    def features(self) -> Tensor:
        """Input of the output layers, [B, 3 d]."""
        return torch.cat([self.hidden, self.graph, self.title], dim=-1)

    def rows(self, rows: Tensor) -> State:
        """Return these rows of the batch."""
        return State(self.hidden[rows], self.cell[rows], self.graph[rows], self.title[rows])


class ContextAttention(nn.Module):
    """Attention of one state to many, whose keys and values are projected once; without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, [B, H, K, e] each, of states [B, K, d]."""
        keys, values = (
            part(states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.k_proj, self.v_proj)
        )
        return keys, values

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, real: Tensor) -> Tensor:
        """Return the output [B, d] of a state [B, d]; `real` is True at real keys, [B, K]."""
        queries = self.q_proj(query).unflatten(-1, (self.num_heads, -1)).unsqueeze(2)
        heads = F.scaled_dot_product_attention(queries, keys, values, real[:, None, None])
        return self.out_proj(heads.flatten(1))


class GraphWriter(nn.Module):
    """Returns the likelihood of a text given its title and graph, or the probabilities of its next word.

    The LSTM reads [word, graph context, title context]; both contexts are multi-head attentions whose query is its
    hidden state h, with h added. From out = [h, contexts] comes s = sigmoid(w out): with probability s a word of the
    vocabulary is written, softmax(E tanh(W out)) with E the embeddings, else an entity is copied, softmax over entities
    j of (W_c out) . v_j with v_j its node's state. `model.encoder.blocks.*.attention` are the graph's attentions.

    Args:
        vocabulary_size: Number of word ids V; 0 is padding. V + j is entity j of the graph.
        kinds: As in `GraphEncoder`.
        width: Width d, even.
        layers: Blocks of the graph encoder.
        heads: Attention heads H of the blocks and of the decoder's attentions.
        dropout: Dropout of words, in the blocks and before the output layers, in [0, 1).
        departures: Departures from the paper, as in the released code.
        blind: Whether all nodes are zeroed, and what was written for an entity is read as an unknown word: the model
            then sees only the size of the graph.
    """

    def __init__(
        self,
        vocabulary_size: int,
        kinds: int,
        *,
        width: int,
        layers: int,
        heads: int,
        dropout: float,
        departures: Departures = CORRECT,
        blind: bool = False,
    ) -> None:
        super().__init__()
        self.departures, self.blind = departures, blind
        self.embedding = ScaledEmbedding(vocabulary_size, width)
        self.titles = PhraseEncoder(width, dropout)
        self.phrases = PhraseEncoder(width, dropout)
        self.encoder = GraphEncoder(
            kinds, width=width, layers=layers, heads=heads, dropout=dropout, departures=departures
        )
        self.graph_attention = ContextAttention(width, heads)
        self.title_attention = ContextAttention(width, heads)
        self.cell = nn.LSTMCell(3 * width, width)
        self.said = nn.Linear(3 * width, width)
        self.bias = WordBias(vocabulary_size)
        self.copied = nn.Linear(3 * width, width)
        self.switch = nn.Linear(3 * width, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        title: Tensor,
        entities: Tensor,
        nodes: Tensor,
        neighbors: Tensor,
        types: Tensor,
        inputs: Tensor,
        labels: Tensor,
    ) -> dict[str, Tensor]:
        """Return {"loss": mean of -log p over all words, "losses": their sum of each text, [B]}.

        Arguments are those of `data.collate`.

        Raises:
            ShapeError: Batch sizes differ.
        """
        batch = {len(one) for one in (title, nodes, neighbors, types, inputs, labels)}
        if len(batch) != 1:
            raise ShapeError(f"title, nodes, neighbors, types, inputs and labels have {sorted(batch)} rows.")
        memory = self.read(title, entities, nodes, neighbors, types)
        state = self.start(memory)
        if self.departures.late_context and self.training:
            state = dataclasses.replace(state, graph=0 * state.graph, title=0 * state.title)
        if self.blind:
            # what was written before, were it of an entity, says its type
            mentions = labels[:, :-1] >= self.embedding.num_embeddings
            inputs = torch.cat([inputs[:, :1], inputs[:, 1:].masked_fill(mentions, UNKNOWN)], dim=1)
        found = []
        for vectors in self._vectors(inputs).unbind(1):
            state = self.step(memory, state, vectors)
            found.append(state.features)
        losses = self._losses(memory, torch.stack(found, dim=1), labels)
        return {"loss": losses.sum() / (labels != IGNORED).sum(), "losses": losses}

    def read(self, title: Tensor, entities: Tensor, nodes: Tensor, neighbors: Tensor, types: Tensor) -> Memory:
        """Return the encoded titles and graphs."""
        title_states, _ = self.titles(title, self._vectors)
        phrases = self.entity_vectors(entities)
        states = self.encoder(phrases, nodes, neighbors)
        there = nodes[:, 1 : 1 + types.shape[1]] < 0
        copies = states[:, 1 : 1 + types.shape[1]]
        if self.departures.bare_copies:
            rows = torch.where(there, -1 - nodes[:, 1 : 1 + types.shape[1]], 0)
            copies = phrases[rows] * there.unsqueeze(-1)
        if self.blind:
            states, copies = torch.zeros_like(states), torch.zeros_like(copies)
            types = torch.full_like(types, UNKNOWN)
        return Memory(
            graph=self.graph_attention.project(states),
            nodes=self._visible(nodes != 0),
            title=self.title_attention.project(title_states),
            words=self._visible(title != 0),
            copies=copies,
            entities=there,
            types=types,
            root=states[:, 0],
        )

    def entity_vectors(self, entities: Tensor) -> Tensor:
        """Return the initial vectors of entities, [E, d], from their words."""
        return self.phrases(entities, self._vectors)[1]

    def start(self, memory: Memory) -> State:
        """Return the state before the first word: that of the root, with its contexts."""
        cell = memory.root.detach() if self.departures.detached else memory.root
        return self._attend(memory, memory.root, cell)

    def step(self, memory: Memory, state: State, vectors: Tensor) -> State:
        """Return the state after reading a word, whose vectors are [B, d]."""
        read = torch.cat([vectors, state.graph, state.title], dim=-1)
        return self._attend(memory, *self.cell(read, (state.hidden, state.cell)))

    def embed_words(self, memory: Memory, words: Tensor) -> Tensor:
        """Return the vectors [B, d] of written words, [B]: of an entity, that of its type."""
        size = self.embedding.num_embeddings
        types = memory.types.gather(1, (words - size).clamp_min(0).unsqueeze(1)).squeeze(1)
        return self.embedding(torch.where(words < size, words, types))

    def log_probabilities(self, memory: Memory, state: State) -> Tensor:
        """Return log p of the next word, [B, V + E]; -inf for an absent entity."""
        features = state.features
        word, copy = self._switch(features)
        copies = self._copies(memory, features.unsqueeze(1)).squeeze(1)
        return torch.cat([word + self._words(features).log_softmax(-1), copy + copies.log_softmax(-1)], dim=-1)

    def _vectors(self, words: Tensor) -> Tensor:
        return self.dropout(self.embedding(words))

    def _attend(self, memory: Memory, hidden: Tensor, cell: Tensor) -> State:
        graph = self.graph_attention(hidden, *memory.graph, memory.nodes)
        title = self.title_attention(hidden, *memory.title, memory.words)
        return State(hidden, cell, hidden + graph, hidden + title)

    def _losses(self, memory: Memory, features: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of -log p of the labels [B, T] of each text, [B]."""
        size = self.embedding.num_embeddings
        features = self.dropout(features)
        word, copy = (part.squeeze(-1) for part in self._switch(features))
        copying = labels >= size
        saying = (labels >= 0) & ~copying
        copies = self._copies(memory, features).log_softmax(-1)
        entity = copies.gather(2, (labels - size).clamp_min(0).unsqueeze(2)).squeeze(2)
        found = torch.where(copying, copy + entity, 0.0)
        # the vocabulary is large: its softmax is computed only where a word is the label
        said = -F.cross_entropy(self._words(features[saying]), labels[saying], reduction="none")
        return -(found.sum(dim=1) + torch.zeros_like(found).masked_scatter(saying, said + word[saying]).sum(dim=1))

    def _switch(self, features: Tensor) -> tuple[Tensor, Tensor]:
        logit = self.switch(features)
        return F.logsigmoid(logit), F.logsigmoid(-logit)

    def _words(self, features: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.said(features)), self.embedding.weight, self.bias.bias)

    def _copies(self, memory: Memory, features: Tensor) -> Tensor:
        scores = self.copied(features) @ memory.copies.mT
        return scores.masked_fill(~memory.entities.unsqueeze(1), -torch.inf)

    def _visible(self, real: Tensor) -> Tensor:
        if not self.departures.loose_masks:
            return real
        return torch.cat([torch.ones_like(real[:, :1]), real[:, :-1]], dim=1)


class PhraseEncoder(nn.Module):
    """A bidirectional LSTM of two layers with d/2 units per direction; padding is not read."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(width, width // 2, num_layers=2, batch_first=True, bidirectional=True, dropout=dropout)

    def forward(self, words: Tensor, vectors: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the states of the words [B, L, d] and the concatenated last states of both directions, [B, d].

        Args:
            words: Ids of words, [B, L], padded with 0.
            vectors: Returns the vectors [T, d] of ids [T]; called for words only, never for padding.
        """
        lengths = (words != 0).sum(dim=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        states, (last, _) = self.recurrent(packed._replace(data=vectors(packed.data)))
        states, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True, total_length=words.shape[1])
        return states, torch.cat([last[-2], last[-1]], dim=-1)


class WordBias(nn.Module):
    """A bias for each word."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocabulary_size))

    def reset_parameters(self) -> None:
        """Make it zero."""
        nn.init.zeros_(self.bias)


def build_writer(coder: GraphCoder, scale: GraphScale, *, blind: bool = False) -> GraphWriter:
    """Return the model of a scale for a vocabulary; `blind` as in `GraphWriter`."""
    return GraphWriter(
        len(coder.vocabulary),
        coder.nodes,
        width=scale.width,
        layers=scale.layers,
        heads=scale.heads,
        dropout=scale.dropout,
        departures=RELEASED if scale.released else CORRECT,
        blind=blind,
    )
