"""GraphWriter (Koncel-Kedziorski et al. 2019): a text from a title and a knowledge graph, with copying of entities.

The graph encoder has blocks of attention between neighbors. Beam search is in `decoding`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise_lab.models.encoder import ScaledEmbedding, SizedAttention
from headwise_lab.tasks.graph2text.data import UNKNOWN, GraphCoder
from headwise_lab.tasks.graph2text.scales import GraphScale


@dataclass(frozen=True)
class Departures:
    """Where the released code of GraphWriter departs from its paper, or from standard attention.

    Attributes:
        scaled_by_width: Scores are divided by sqrt(d) and not by sqrt(d / H).
        dropout_at_test: The blocks drop attention weights, in evaluation too, instead of the outputs of the heads.
        detached: Keys and values are detached, so no gradient passes through a node's neighbors; so is the decoder's
            first cell.
        one_norm: A block has one layer normalization, used twice.
        no_output: The heads of a block are concatenated without an output projection.
        late_context: The decoder's first step has no context in training, but has one in decoding.
        bare_copies: An entity is chosen for copying by the vector of its words, before the blocks.
        loose_masks: The decoder's attentions see one pad of each graph and title, if there is one.
    """

    scaled_by_width: bool = False
    dropout_at_test: bool = False
    detached: bool = False
    one_norm: bool = False
    no_output: bool = False
    late_context: bool = False
    bare_copies: bool = False
    loose_masks: bool = False


CORRECT = Departures()
RELEASED = Departures(*(True,) * 8)


class GraphBlock(nn.Module):
    """Returns the new states of the nodes of all graphs.

    t = LN(v + MHA(v, neighbors of v)), out = LN'(t + FFN(t)), with FFN(t) = W_2 PReLU(W_1 t + b_1) + b_2 of 4 d hidden
    units, each with its own slope. The attention has no biases. The states of real nodes are concatenated,
    so that only the attention itself computes padding.

    Args:
        width: Width d.
        heads: Attention heads H; must divide `width`.
        dropout: Dropout of the outputs of attention and FFN, in [0, 1).
        departures: Departures from the paper, as in the released code.
    """

    def __init__(self, width: int, heads: int, *, dropout: float, departures: Departures = CORRECT) -> None:
        super().__init__()
        self.departures = departures
        self.attention = SizedAttention(width, heads)
        # dropping weights costs a draw for each, pads included, and the fused kernel: outputs are dropped instead
        self.attention.dropout = dropout if departures.dropout_at_test else 0.0
        self.dropout = nn.Dropout(0.0 if departures.dropout_at_test else dropout)
        if departures.no_output:
            self.attention.out_proj = SideBySide(width, width, bias=False)
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.PReLU(4 * width),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )
        self.feed_forward_norm = self.attention_norm if departures.one_norm else nn.LayerNorm(width)

    def forward(self, states: Tensor, places: Places) -> Tensor:
        """Return the new states [T, d] of all nodes of the batch, graph by graph."""
        query = keys = places.to_rows(states)
        if self.departures.detached:
            keys = query.detach()
        if self.departures.scaled_by_width:
            # without biases this is the scale of the scores
            query = query * (self.attention.embed_dim / self.attention.head_dim) ** -0.5
        # arms pair heads, and pruning removes some
        strangers = places.strangers.repeat_interleave(self.attention.num_heads, dim=0)
        attended, _ = self.attention(
            query, keys, keys, key_padding_mask=places.padding, attn_mask=strangers, need_weights=False
        )
        states = self.attention_norm(states + self.dropout(places.from_rows(attended)))
        return self.feed_forward_norm(states + self.feed_forward(states))

    def train(self, mode: bool = True) -> GraphBlock:
        """Switch between training and evaluation."""
        super().train(mode)
        if self.departures.dropout_at_test:
            self.attention.training = True
        return self


class GraphEncoder(nn.Module):
    """Returns the states of the nodes of graphs: entities, a root and relations, through blocks of graph attention.

    Args:
        kinds: Rows of the table of nodes that are no entity; row 0 is padding.
        width: Width d.
        layers: Number of blocks.
        heads: Attention heads H of a block.
        dropout: As in `GraphBlock`.
        departures: Likewise.

    Example:
        >>> encoder = GraphEncoder(6, width=8, layers=2, heads=2, dropout=0.0)
        >>> nodes = torch.tensor([[1, -1, 4, 5], [1, -2, 0, 0]])
        >>> neighbors = (nodes != 0)[:, :, None] & (nodes != 0)[:, None]
        >>> encoder(torch.randn(2, 8), nodes, neighbors).shape
        torch.Size([2, 4, 8])
    """

    def __init__(
        self, kinds: int, *, width: int, layers: int, heads: int, dropout: float, departures: Departures = CORRECT
    ) -> None:
        super().__init__()
        self.kinds = NodeKinds(kinds, width)
        self.blocks = nn.ModuleList(
            GraphBlock(width, heads, dropout=dropout, departures=departures) for _ in range(layers)
        )

    def forward(self, entities: Tensor, nodes: Tensor, neighbors: Tensor) -> Tensor:
        """Return the states [B, N, d]; zero where there is no node.

        Args:
            entities: Vectors of all entities of the batch, [E, d].
            nodes: int64 [B, N]: 0 where there is none, the kind of a node that is no entity, -1 - e for entity e. The
                first of each graph is its root.
            neighbors: True where the node of the row may attend to that of the column, bool [B, N, N].
        """
        if tuple(neighbors.shape) != (*nodes.shape, nodes.shape[1]):
            raise ShapeError(
                f"neighbors has shape {tuple(neighbors.shape)} and nodes {tuple(nodes.shape)}; expected (B, N, N) "
                "and (B, N)."
            )
        places = Places(nodes, neighbors)
        table = torch.cat([self.kinds.weight, entities])
        real = nodes.flatten()[places.flat]
        states = table[torch.where(real < 0, len(self.kinds.weight) - 1 - real, real)]
        for block in self.blocks:
            states = block(states, places)
        return places.to_graphs(states)


class Places:
    """Positions of the nodes of a batch, concatenated graph by graph, and which node may attend to which.

    Graphs differ much in size. In the attention several small ones share a row as long as the largest graph, to save
    padding: R rows of W places, with R at most B and W the nodes of the largest.

    Args:
        nodes: As for `GraphEncoder.forward`, [B, N].
        neighbors: Likewise, [B, N, N].

    Attributes:
        flat: The place of each real node in [B N], [T].
        padding: True where there is no node, [R, W].
        strangers: True where the node of the row may not attend to that of the column, [R, W, W]. Padding attends to
            the first of its row, so that no row of weights is empty.

    Example:
        >>> nodes = torch.tensor([[1, 4, 5, 4], [1, 4, 0, 0], [1, 5, 0, 0]])
        >>> real = nodes != 0
        >>> places = Places(nodes, real[:, :, None] & real[:, None])
        >>> places.padding.shape, places.to_rows(torch.ones(8, 3)).shape
        (torch.Size([2, 4]), torch.Size([2, 4, 3]))
    """

    def __init__(self, nodes: Tensor, neighbors: Tensor) -> None:
        real = nodes != 0
        self.flat = real.flatten().nonzero().squeeze(1)
        self.rows = _rows(self.flat, nodes.shape)
        sizes = real.sum(dim=1)
        row, offset = (torch.tensor(one, device=nodes.device) for one in pack(sizes.tolist()))
        # the place of each node in its shared row, [B, N]
        within = offset[:, None] + real.cumsum(dim=1) - 1
        wide = int(sizes.max())
        shape = torch.Size((int(row.max()) + 1, wide))
        self.seats = (row[:, None] * wide + within).flatten()[self.flat]
        self.shared_rows = _rows(self.seats, shape)
        self.padding = self.shared_rows == len(self.flat)
        graph, one, other = (neighbors & real[:, :, None] & real[:, None]).nonzero(as_tuple=True)
        allowed = neighbors.new_zeros(*shape, wide)
        allowed[row[graph], within[graph, one], within[graph, other]] = True
        allowed[:, :, 0] |= self.padding
        self.strangers = ~allowed

    def to_graphs(self, states: Tensor) -> Tensor:
        """Return states [T, d] as [B, N, d], zero where there is no node."""
        return _spread(states, self.rows)

    def to_rows(self, states: Tensor) -> Tensor:
        """Return states [T, d] as [R, W, d], zero where there is no node."""
        return _spread(states, self.shared_rows)

    def from_rows(self, states: Tensor) -> Tensor:
        """Return states [R, W, d] as [T, d]."""
        return states.flatten(0, 1)[self.seats]


def pack(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the row of each graph and its start there: the largest first, each in the first row with room.

    Example:
        >>> pack([2, 5, 3, 1])
        ([1, 0, 1, 2], [3, 0, 0, 0])
    """
    room, used = max(sizes), []
    rows, offsets = [0] * len(sizes), [0] * len(sizes)
    for graph in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        row = next((number for number, taken in enumerate(used) if taken + sizes[graph] <= room), len(used))
        if row == len(used):
            used.append(0)
        rows[graph], offsets[graph] = row, used[row]
        used[row] += sizes[graph]
    return rows, offsets


def _rows(seats: Tensor, shape: torch.Size) -> Tensor:
    """Return the index of the state at each place; after the last state where there is none."""
    rows = seats.new_full((shape.numel(),), len(seats))
    rows[seats] = torch.arange(len(seats), device=seats.device)
    return rows.view(shape)


def _spread(states: Tensor, rows: Tensor) -> Tensor:
    return torch.cat([states, states.new_zeros(1, states.shape[1])])[rows]


class NodeKinds(nn.Embedding):
    """Vectors of the nodes that are no entity, with Glorot initialization; that of padding is zero."""

    def __init__(self, kinds: int, width: int) -> None:
        super().__init__(kinds, width, padding_idx=0)

    def reset_parameters(self) -> None:
        """Draw the vectors anew."""
        nn.init.xavier_uniform_(self.weight)
        self._fill_padding_idx_with_zero()


class SideBySide(nn.modules.linear.NonDynamicallyQuantizableLinear):
    """An output projection that is a fixed identity: the heads are concatenated."""

    def reset_parameters(self) -> None:
        """Make it the identity."""
        nn.init.eye_(self.weight)
        self.weight.requires_grad_(False)


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
