"""GraphWriter: batches against single graphs, exact masks, each departure of the released code, and beam search."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headwise as hw
from cases import cases
from headwise.errors import ShapeError
from headwise_lab.experiment.seeding import initialize_parameters
from headwise_lab.tasks.graph2text.data import END, START, EncodedGraph, collate
from headwise_lab.tasks.graph2text.decoding import search, write_texts
from headwise_lab.tasks.graph2text.model import (
    CORRECT,
    RELEASED,
    Departures,
    GraphEncoder,
    GraphWriter,
    Memory,
    Places,
    pack,
)

WORDS, KINDS = 11, 8


def graph(entities: int, triples: list[tuple[int, int, int]], words: int = 6, seed: int = 0) -> EncodedGraph:
    """A graph with a text that mentions entities."""
    draw = torch.Generator().manual_seed(seed)

    def some(count: int, low: int, high: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=draw).tolist()

    return EncodedGraph(
        title=some(1 + seed % 3, 6, WORDS),
        entities=[some(1 + place % 3, 6, WORDS) for place in range(entities)],
        types=[4 + place % 2 for place in range(entities)],
        triples=triples,
        text=[*some(words, 6, WORDS + entities), END],
        words=WORDS,
    )


GRAPHS = [
    graph(4, [(0, 4, 1), (2, 6, 0), (3, 2, 3)], 7, seed=1),
    graph(1, [], 3, seed=2),
    graph(2, [(1, 6, 0)], 5, seed=3),
]


def writer(departures: Departures = CORRECT, *, dropout: float = 0.0, blind: bool = False) -> GraphWriter:
    model = GraphWriter(
        WORDS, KINDS, width=8, layers=3, heads=4, dropout=dropout, departures=departures, blind=blind
    ).double()
    initialize_parameters(model, 5)
    return model.eval()


def read(model: GraphWriter, batch: dict[str, torch.Tensor]) -> Memory:
    return model.read(*(batch[name] for name in ("title", "entities", "nodes", "neighbors", "types")))


def states(model: GraphWriter, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    _, phrases = model.phrases(batch["entities"], model.embedding)
    return model.encoder(phrases, batch["nodes"], batch["neighbors"])


def test_heads_of_the_blocks_and_of_the_decoder_are_found_and_proved():
    model = writer()
    assert [site.num_heads for site in hw.find_heads(model.encoder)] == [4, 4, 4]
    assert len(hw.find_heads(model)) == 5
    batch = collate(GRAPHS)
    _, phrases = model.phrases(batch["entities"], model.embedding)
    encoder = writer().encoder
    proof = hw.verify(hw.find_heads(encoder), [phrases.detach(), batch["nodes"], batch["neighbors"]])
    assert "blocks.2.attention" in str(proof)


def test_a_batch_of_graphs_equals_its_graphs_one_by_one():
    model = writer()
    together = collate(GRAPHS)
    whole = model(**together)
    for place, one in enumerate(GRAPHS):
        alone = collate([one])
        nodes = alone["nodes"].shape[1]
        assert torch.allclose(states(model, together)[place, :nodes], states(model, alone)[0], atol=1e-12)
        assert torch.allclose(whole["losses"][place], model(**alone)["losses"][0], atol=1e-12)
    gradients = []
    for batches in ([together], [collate([one]) for one in GRAPHS]):
        model.zero_grad()
        sum(model(**batch)["losses"].sum() for batch in batches).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.allclose(one, other, atol=1e-10) for one, other in zip(*gradients, strict=True))
    assert torch.allclose(whole["loss"], whole["losses"].sum() / sum(len(one["text"]) for one in GRAPHS))


@cases("departures", [CORRECT, Departures(scaled_by_width=True)])
def test_blocks_without_some_heads_compute_what_they_do_with_these_ablated(departures):
    encoder, batch = writer(departures).encoder, collate(GRAPHS)
    inputs = [torch.randn(len(batch["entities"]), 8).double(), batch["nodes"], batch["neighbors"]]
    hw.prune(hw.find_heads(encoder), {0: [1], 2: [0, 3]}, inputs=inputs)
    assert [site.num_heads for site in hw.find_heads(encoder)] == [3, 4, 2]


def test_a_node_that_is_no_neighbor_changes_nothing_and_a_neighbor_does():
    encoder = GraphEncoder(KINDS, width=8, layers=1, heads=2, dropout=0.0).double()
    initialize_parameters(encoder, 3)
    batch = collate(GRAPHS)
    entities = torch.randn(len(batch["entities"]), 8, dtype=torch.float64, requires_grad=True)
    found = encoder(entities, batch["nodes"], batch["neighbors"])
    nodes = batch["nodes"].tolist()
    rows = {-1 - value: (b, n) for b, row in enumerate(nodes) for n, value in enumerate(row) if value < 0}
    for b, n in itertools.product(range(len(GRAPHS)), range(batch["nodes"].shape[1])):
        if batch["nodes"][b, n] == 0:
            assert not found[b, n].any()
            continue
        # the square, since a layer normalization makes the plain sum constant
        (reached,) = torch.autograd.grad(found[b, n].square().sum() + found[b, n, 0], entities, retain_graph=True)
        for row, (graph_, node) in rows.items():
            neighbor = graph_ == b and bool(batch["neighbors"][b, n, node])
            assert bool(reached[row].abs().max() > 1e-9) == neighbor, (b, n, row)


@torch.no_grad()
@cases("layers", [1, 2, 3])
def test_another_entity_changes_the_nodes_within_as_many_steps_as_blocks_and_no_other_bit(layers):
    encoder = GraphEncoder(KINDS, width=8, layers=layers, heads=2, dropout=0.0).double()
    initialize_parameters(encoder, 4)
    batch = collate([graph(4, [(0, 4, 1), (1, 6, 2), (2, 4, 3)], seed=5), *GRAPHS])
    nodes, neighbors = batch["nodes"], batch["neighbors"]
    entities = torch.randn(len(batch["entities"]), 8, dtype=torch.float64)
    before = encoder(entities, nodes, neighbors)
    steps = torch.linalg.matrix_power(neighbors.double(), layers) > 0
    kept = 0
    for entity in range(len(entities)):
        changed = entities.clone()
        changed[entity] = 100 * torch.randn(8, dtype=torch.float64)
        after = encoder(changed, nodes, neighbors)
        ((owner, place),) = (nodes == -1 - entity).nonzero().tolist()
        reached = torch.zeros_like(nodes, dtype=torch.bool)
        reached[owner] = steps[owner, :, place]
        assert ((after != before).any(dim=-1) == reached).all()
        kept += int((~reached[owner] & (nodes[owner] != 0)).sum())
    # all entities meet at the root, so that after three steps every node of a graph has embed_words of every other
    assert (kept > 0) == (layers < 3)


@torch.no_grad()
def test_a_word_is_said_or_an_entity_copied_as_the_equations_have_it():
    model, one = writer(), GRAPHS[0]
    memory = read(model, collate([one]))
    state = model.start(memory)
    features = torch.cat([state.hidden, state.graph, state.title], dim=-1)[0]
    say = 1 / (1 + math.exp(-float(model.switch.weight[0] @ features + model.switch.bias[0])))
    assert 0.02 < say < 0.98
    assert abs(say - 0.5) > 0.01
    hidden = torch.tanh(model.said.weight @ features + model.said.bias)
    words = model.embedding.weight @ hidden + model.bias.bias
    copied = model.copied.weight @ features + model.copied.bias
    entities = states(model, collate([one]))[0, 1:5] @ copied
    expected = torch.cat([say * words.softmax(0), (1 - say) * entities.softmax(0)])
    assert torch.allclose(model.log_probabilities(memory, state)[0].exp(), expected, atol=1e-12)
    # what was copied is read as its type
    read_as = model.embed_words(memory, torch.tensor([WORDS + 1]))[0]
    assert torch.equal(read_as, model.embedding(torch.tensor(one["types"][1])))


@torch.no_grad()
def test_a_padded_word_and_node_is_never_read_by_the_decoder():
    model = writer()
    alone = read(model, collate([GRAPHS[1]]))
    batch = collate(GRAPHS)
    memory = read(model, batch)
    # what stands at pads is made large: an exact mask does not mind
    for pair, real in ((memory.graph, memory.nodes), (memory.title, memory.words)):
        for part in pair:
            part.masked_fill_(~real[:, None, :, None], 50.0)
    memory.copies.masked_fill_(~memory.entities.unsqueeze(-1), 50.0)
    one = model.log_probabilities(memory, model.start(memory))[1]
    other = model.log_probabilities(alone, model.start(alone))[0]
    assert torch.allclose(one[: len(other)], other, atol=1e-12)
    assert torch.isinf(one[len(other) :]).all()
    assert float(one.exp().sum()) == pytest.approx(1.0)


def test_the_loss_is_the_product_of_the_steps_a_search_takes():
    model = writer()
    for one in GRAPHS:
        batch = collate([one])
        memory = read(model, batch)
        state, total, word = model.start(memory), 0.0, START
        for following in one["text"]:
            state = model.step(memory, state, model.embed_words(memory, torch.tensor([word])))
            total -= float(model.log_probabilities(memory, state)[0, following].detach())
            word = following
        assert total == pytest.approx(float(model(**batch)["losses"][0].detach()), rel=1e-10)


def test_nothing_of_the_graph_but_its_size_reaches_a_blind_model():
    model = writer(blind=True)
    changed = {**GRAPHS[0], "entities": [[9]] * 4, "triples": [(1, 4, 2)], "types": GRAPHS[0]["types"][::-1]}
    assert changed["types"] != GRAPHS[0]["types"]
    before, after = collate([GRAPHS[0]]), collate([changed])
    assert torch.equal(model(**before)["loss"], model(**after)["loss"])
    mention = torch.tensor([model.embedding.num_embeddings])
    one, other = (model.embed_words(read(model, batch), mention) for batch in (before, after))
    assert torch.equal(one, other)
    assert not torch.equal(writer()(**collate([GRAPHS[0]]))["loss"], writer()(**collate([changed]))["loss"])


def departing(name: str, dropout: float = 0.0) -> GraphWriter:
    assert getattr(RELEASED, name) is True
    return writer(dataclasses.replace(CORRECT, **{name: True}), dropout=dropout)


def losses(model: GraphWriter) -> torch.Tensor:
    return model(**collate(GRAPHS))["losses"].detach()


@cases("name", ["scaled_by_width", "no_output", "bare_copies", "loose_masks"])
def test_a_departure_changes_what_is_said(name):
    assert not torch.allclose(losses(writer()), losses(departing(name)), rtol=1e-9)


def test_released_attention_drops_weights_in_evaluation_too():
    released = departing("dropout_at_test", 0.5)
    assert not torch.equal(losses(released), losses(released))
    assert not released.encoder.training
    assert torch.equal(losses(writer(dropout=0.5)), losses(writer(dropout=0.5)))


def test_released_nodes_learn_nothing_through_their_neighbors():
    batch, gradients = collate(GRAPHS), []
    vectors = torch.randn(len(batch["entities"]), 8, dtype=torch.float64, requires_grad=True)
    for model in (writer(), departing("detached")):
        found = model.encoder(vectors, batch["nodes"], batch["neighbors"])
        gradients.append(torch.autograd.grad(found[0, 1, 0], vectors)[0].abs().sum(dim=1))
    # entity 0 reaches entity 1 through the root
    assert gradients[0][1] > 1e-9
    assert gradients[1][1] == 0
    assert torch.allclose(losses(writer()), losses(departing("detached")), rtol=1e-12)


def test_released_training_begins_without_context_and_writing_does_not():
    plain, released = writer(), departing("late_context")
    assert torch.equal(losses(plain), losses(released))
    assert not torch.allclose(losses(plain.train()), losses(released.train()), rtol=1e-9)


def test_released_scores_are_divided_by_the_square_root_of_the_width():
    block, states_ = departing("scaled_by_width").encoder.blocks[0], torch.randn(1, 5, 8, dtype=torch.float64)
    q, k, _ = (states_ @ block.attention.in_proj_weight.T).chunk(3, dim=-1)
    scores = (q[..., :2] @ k[..., :2].mT) / math.sqrt(8)
    places = Places(torch.ones(1, 5, dtype=torch.int64), torch.ones(1, 5, 5, dtype=torch.bool))
    calls = []
    block.attention.register_forward_pre_hook(lambda _, given, named: calls.append((given, named)), with_kwargs=True)
    block(states_[0], places)
    ((given, named),) = calls
    weights = block.attention(*given, **{**named, "need_weights": True, "average_attn_weights": False})[1]
    assert torch.allclose(weights[0, 0], scores[0].softmax(-1), atol=1e-12)


def test_released_blocks_have_one_norm_and_heads_side_by_side():
    block = departing("one_norm").encoder.blocks[0]
    assert block.feed_forward_norm is block.attention_norm
    assert writer().encoder.blocks[0].feed_forward_norm is not writer().encoder.blocks[0].attention_norm
    assert torch.equal(departing("no_output").encoder.blocks[0].attention.out_proj.weight, torch.eye(8).double())


@torch.no_grad()
def test_released_copies_are_chosen_by_words_alone():
    bare = []
    for model in (writer(), departing("bare_copies")):
        one, other = (read(model, collate([changed])) for changed in (GRAPHS[0], {**GRAPHS[0], "triples": []}))
        bare.append(torch.allclose(one.copies, other.copies, rtol=1e-9))
    assert bare == [False, True]


def test_the_released_model_trains_and_writes():
    model = writer(RELEASED, dropout=0.1).train()
    model(**collate(GRAPHS))["loss"].backward()
    assert model.encoder.blocks[0].attention.out_proj.weight.grad is None
    assert len(write_texts(model.eval(), GRAPHS, beams=2, longest=4, length_penalty=1.0, excluded=())) == 3


def exhaustive(
    model: GraphWriter, one: EncodedGraph, longest: int, penalty: float, no_repeat: int = 0
) -> tuple[float, list[int]]:
    """The best text of all there are, by trying each."""
    batch = collate([one])
    memory = read(model, batch)
    best = (-math.inf, [])

    def follow(state, word: int, text: list[int], total: float) -> None:
        nonlocal best
        state = model.step(memory, state, model.embed_words(memory, torch.tensor([word])))
        scores = model.log_probabilities(memory, state)[0].tolist()
        best = max(best, ((total + scores[END]) / (len(text) + 1) ** penalty, [*text, END]))
        if len(text) + 1 < longest:
            for following in range(6, len(scores)):
                rows = [(*text, following)[place : place + no_repeat] for place in range(len(text) + 2 - no_repeat)]
                if no_repeat and len(set(rows)) < len(rows):
                    continue
                follow(state, following, [*text, following], total + scores[following])

    follow(model.start(memory), START, [], 0.0)
    return best


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@torch.no_grad()
def test_a_wide_beam_finds_what_trying_every_text_finds(penalty):
    model = writer()
    batch = collate(GRAPHS[1:])
    options = {"longest": 3, "length_penalty": penalty, "excluded": (0, 1, 2, 4, 5)}
    found = search(model, batch, beams=80, **options)
    for one, text in zip(GRAPHS[1:], found, strict=True):
        assert text == exhaustive(model, one, 3, penalty)[1]


@torch.no_grad()
def test_words_in_a_row_are_not_written_twice_where_that_is_the_rule():
    model, one = writer(), GRAPHS[1]
    # a word it would write again and again
    model.bias.bias[9] += 6.0
    model.switch.bias += 8.0
    model.bias.bias[END] -= 3.0
    options = {"beams": 250, "longest": 4, "length_penalty": 1.0, "excluded": (0, 1, 2, 4, 5)}
    (free,), (ruled,) = (search(model, collate([one]), **options, no_repeat=order) for order in (0, 2))
    assert free[:3] == [9, 9, 9]
    assert ruled == exhaustive(model, one, 4, 1.0, no_repeat=2)[1]
    assert ruled[:2] == [9, 9]
    assert ruled[2] != 9


@torch.no_grad()
def test_one_beam_takes_the_likeliest_word_each_time():
    model = writer()
    found = write_texts(model, GRAPHS, beams=1, longest=6, length_penalty=1.0, excluded=(0, 1, 2, 4, 5))
    for one, text in zip(GRAPHS, found, strict=True):
        memory = read(model, collate([one]))
        state, word, greedy = model.start(memory), START, []
        while word != END:
            state = model.step(memory, state, model.embed_words(memory, torch.tensor([word])))
            scores = model.log_probabilities(memory, state)[0]
            scores[[0, 1, 2, 4, 5]] = -torch.inf
            word = END if len(greedy) == 5 else int(scores.argmax())
            greedy.append(word)
        assert text == greedy


@torch.no_grad()
def test_a_text_does_not_depend_on_the_graphs_beside_it():
    model = writer()
    options = {"beams": 3, "longest": 7, "length_penalty": 1.0, "excluded": (0, 1, 2, 4, 5)}
    together = search(model, collate(GRAPHS), **options)
    assert together == [search(model, collate([one]), **options)[0] for one in GRAPHS]


def test_shapes_that_do_not_fit_are_refused():
    model, batch = writer(), collate(GRAPHS)
    with pytest.raises(ShapeError, match="have \\[2, 3\\] rows"):
        model(**{**batch, "title": batch["title"][:2]})
    with pytest.raises(ShapeError, match="neighbors has shape"):
        model(**{**batch, "neighbors": batch["neighbors"][:, :2]})


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_graphs_share_rows_without_touching(sizes: list[int]):
    rows, offsets = pack(sizes)
    taken = [
        (row, place)
        for row, start, size in zip(rows, offsets, sizes, strict=True)
        for place in range(start, start + size)
    ]
    assert len(set(taken)) == sum(sizes)
    assert max(place for _, place in taken) == max(sizes) - 1
    assert set(rows) == set(range(max(rows) + 1))
    # each row but one is more than half full: what else would have been put into it
    fill = [sum(size for row, size in zip(rows, sizes, strict=True) if row == one) for one in range(max(rows) + 1)]
    assert sum(2 * used <= max(sizes) for used in fill) <= 1


def test_rows_without_a_node_have_weights_and_no_nan():
    torch.manual_seed(0)
    encoder = GraphEncoder(6, width=8, layers=1, heads=2, dropout=0.0)
    nodes = torch.tensor([[1, -1, 4, 5], [1, -2, 0, 0], [1, 5, 4, 0]])
    taps = hw.Taps(hw.find_heads(encoder), weights=True)
    encoder(torch.randn(2, 8), nodes, (nodes != 0)[:, :, None] & (nodes != 0)[:, None])
    (capture,) = taps.read()
    torch.testing.assert_close(capture.weights.sum(dim=-1), torch.ones(capture.weights.shape[:-1]))
