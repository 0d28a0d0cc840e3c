"""From graphs to texts: beam search over words and entities to copy.

The search is our own because each step depends on the state of an LSTM, which no cache of keys and values holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.texts.batching import batch_by_length, to_device
from headwise_lab.tasks.graph2text.data import END, START, EncodedGraph, Graphs, collate
from headwise_lab.tasks.graph2text.files import spell_out
from headwise_lab.tasks.graph2text.scales import GraphScale

if TYPE_CHECKING:
    from headwise_lab.tasks.graph2text.model import GraphWriter

# Maximum number of graphs per batch, times the beams, and of their pairs of nodes, which attention grows with.
ROWS = 128
PAIRS = 1 << 22


@torch.no_grad()
def write_texts(
    model: GraphWriter,
    graphs: Sequence[EncodedGraph],
    *,
    beams: int,
    **options: Any,
) -> list[list[int]]:
    """Return the text of each graph as ids, its end included; `options` are the other arguments of `search`."""
    found: list[list[int]] = [[] for _ in graphs]
    sizes = [len(one["entities"]) + len(one["triples"]) for one in graphs]
    for batch in _make_batches(sizes, max(1, ROWS // beams)) if graphs else ():
        inputs = to_device(collate([graphs[index] for index in batch]), model)
        for index, text in zip(batch, search(model, inputs, beams=beams, **options), strict=True):
            found[index] = text
    return found


@torch.no_grad()
def search(
    model: GraphWriter,
    batch: Mapping[str, Tensor],
    *,
    beams: int,
    longest: int,
    length_penalty: float,
    excluded: Sequence[int] = (),
    no_repeat: int = 0,
) -> list[list[int]]:
    """Return the best text that a beam search finds for each graph of a batch: the greatest log P / length^p.

    A text has to end after `longest` words, its end included. A search is over once as many texts as beams have ended;
    with one beam it takes the most likely word each time.
    """
    memory = model.read(*(batch[name] for name in ("title", "entities", "nodes", "neighbors", "types")))
    count, device = len(batch["nodes"]), batch["nodes"].device
    memory = memory.rows(torch.arange(count, device=device).repeat_interleave(beams))
    state = model.start(memory)
    # all beams begin alike: only the first of them counts
    scores = torch.full((count, beams), -torch.inf, device=device, dtype=memory.root.dtype)
    scores[:, 0] = 0.0
    words = torch.full((count * beams,), START, device=device)
    texts = words.new_empty((count, beams, 0))
    ended: list[list[tuple[float, list[int]]]] = [[] for _ in range(count)]
    first = torch.arange(count, device=device)[:, None] * beams
    for length in range(1, longest + 1):
        state = model.step(memory, state, model.embed_words(memory, words))
        following = model.log_probabilities(memory, state)
        following[:, list(excluded)] = -torch.inf
        if no_repeat and length > no_repeat:
            _ban_repeats(following, texts.flatten(0, 1), no_repeat)
        if length == longest:
            following[:, :END] = following[:, END + 1 :] = -torch.inf
        size = following.shape[1]
        total = scores[:, :, None] + following.view(count, beams, size)
        # of 2 x beams candidates at most `beams` end, so that at least `beams` continue
        best, places = total.flatten(1).topk(min(2 * beams, beams * size), dim=1)
        _keep_ended(ended, texts, best, places, size, beams, length**length_penalty)
        if length == longest or all(len(one) >= beams for one in ended):
            break
        best = best.masked_fill(places % size == END, -torch.inf)
        scores, order = best.topk(beams, dim=1)
        places = places.gather(1, order)
        came_from = places // size
        words = (places % size).flatten()
        texts = torch.cat(
            [texts.gather(1, came_from[:, :, None].expand(-1, -1, length - 1)), words.view(count, beams, 1)], dim=2
        )
        state = state.rows((first + came_from).flatten())
    return [max(one, key=lambda scored: scored[0])[1] for one in ended]


def _make_batches(sizes: Sequence[int], examples: int) -> Iterator[list[int]]:
    """Yield graphs of similar size, fewer of those that are very large; a triple has two nodes."""
    for batch in batch_by_length(sizes, examples):
        held: list[int] = []
        for index in batch:
            # the shortest come first
            if held and (len(held) + 1) * (1 + 2 * sizes[index]) ** 2 > PAIRS:
                yield held
                held = []
            held.append(index)
        yield held


def _ban_repeats(following: Tensor, texts: Tensor, order: int) -> None:
    """Set to -inf in [R, V] what would repeat a word sequence of texts [R, L]."""
    windows = texts.unfold(1, order, 1)
    same = (windows[:, :, :-1] == texts[:, None, texts.shape[1] + 1 - order :]).all(dim=-1)
    rows, places = same.nonzero(as_tuple=True)
    following[rows, windows[rows, places, -1]] = -torch.inf


def _keep_ended(
    ended: list[list[tuple[float, list[int]]]],
    texts: Tensor,
    best: Tensor,
    places: Tensor,
    size: int,
    beams: int,
    divisor: float,
) -> None:
    """Add the ended among the best `beams` texts of each graph to its ended texts, up to `beams` of them."""
    endings = (places[:, :beams] % size == END) & (best[:, :beams] > -torch.inf)
    for graph, rank in endings.nonzero().tolist():
        if len(ended[graph]) < beams:
            text = texts[graph, int(places[graph, rank]) // size].tolist()
            ended[graph].append((float(best[graph, rank]) / divisor, [*text, END]))


def generate_texts(model: GraphWriter, graphs: Graphs, scale: GraphScale, *, beams: int | None = None) -> list[str]:
    """Return the text that a model writes about each graph as one line; `beams` replaces those of the scale."""
    coder = graphs.coder
    ids = write_texts(
        model,
        [coder.encode(graph) for graph in graphs.graphs],
        beams=scale.beams if beams is None else beams,
        longest=scale.longest,
        length_penalty=scale.length_penalty,
        excluded=coder.excluded,
        no_repeat=scale.no_repeat,
    )
    return [spell_out(coder.decode(one), graph.entities) for one, graph in zip(ids, graphs.graphs, strict=True)]
