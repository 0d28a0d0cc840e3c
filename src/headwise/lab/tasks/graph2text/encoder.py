"""The graph transformer of GraphWriter (Koncel-Kedziorski et al. 2019): blocks of attention between neighbors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise.lab.models.encoder import SizedAttention


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

        Raises:
            ShapeError: `neighbors` does not fit `nodes`.
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

    Args:
        sizes: Nodes of each graph; a row has room for the largest.

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
