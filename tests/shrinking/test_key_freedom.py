"""What keys may do without a change of any score, and single keys for several heads within that."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.families import FAMILIES
from headwise.errors import HeadwiseError
from headwise.shrinking.alignment import KeyFreedom, measure_loss
from headwise.shrinking.merge_heads import Freedom, find_freedoms, read_turns
from reference import merging as reference
from shrinking.cutting import named
from shrinking.planted import SIZE, build, draw, gram_of, tokens

KEY_SIZE, HEADS, TOKENS = 8, 3, 29
FREEDOMS = [
    KeyFreedom(rotary, interleaved, kind)
    for rotary, interleaved, kind in itertools.product((0, 4, 8), (False, True), ("general", "rigid", "signs"))
]


def scores(queries: Tensor, keys: Tensor, freedom: KeyFreedom) -> Tensor:
    """Scores of queries at positions 0.. with keys at theirs, both [N, e]."""
    r, interleaved = freedom.rotary, freedom.interleaved
    left, right = (
        torch.stack([reference.rotate(one, place, r, interleaved) for place, one in enumerate(each)])
        for each in (queries, keys)
    )
    return left @ right.T


@cases("freedom", FREEDOMS)
def test_scores_at_all_positions_stay(freedom: KeyFreedom):
    queries, keys = draw(6, KEY_SIZE), draw(6, KEY_SIZE, seed=1)
    matrices, inverses = freedom.draw(HEADS, KEY_SIZE, torch.Generator().manual_seed(0))
    wanted = scores(queries, keys, freedom)
    for matrix, inverse in zip(matrices, inverses, strict=True):
        assert float((matrix - torch.eye(KEY_SIZE)).abs().max()) > 0.5
        torch.testing.assert_close(scores(queries @ inverse, keys @ matrix, freedom), wanted, atol=1e-12, rtol=0)


@cases("rotary", [4, 8])
def test_the_other_order_of_pairs_and_more_freedom_than_there_is_change_scores(rotary: int):
    queries, keys = draw(6, KEY_SIZE), draw(6, KEY_SIZE, seed=1)
    right = KeyFreedom(rotary, interleaved=False)
    wanted = scores(queries, keys, right)
    for wrong in (KeyFreedom(rotary, interleaved=True), KeyFreedom(0), KeyFreedom(rotary - 2)):
        (matrix,), (inverse,) = wrong.draw(1, KEY_SIZE, torch.Generator().manual_seed(0))
        assert float((scores(queries @ inverse, keys @ matrix, right) - wanted).abs().max()) > 1e-2


@cases("freedom", FREEDOMS)
@cases("alignment", ["orthogonal", "low_rank"])
def test_copies_turned_within_the_freedom_become_one_key_without_loss(freedom: KeyFreedom, alignment: str):
    key, queries = draw(TOKENS, KEY_SIZE), draw(HEADS, TOKENS, KEY_SIZE, seed=1)
    matrices, inverses = freedom.draw(HEADS, KEY_SIZE, torch.Generator().manual_seed(0))
    keys, turned = torch.stack([key @ one for one in matrices], 1), queries @ inverses
    weights = turned.mT @ turned
    sharing = freedom.share(gram_of(keys), weights, alignment)
    lost, total = measure_loss(gram_of(keys), weights, sharing)
    exact = alignment == "low_rank" or freedom.kind != "general"
    assert (abs(float(lost)) < 1e-12 * float(total)) is exact
    shared = torch.einsum("nie,ief->nf", keys, sharing.write)
    if exact:
        for head in range(HEADS):
            wanted = scores(queries[head, :6], key[:6], freedom)
            found = scores(turned[head, :6] @ sharing.read[head], shared[:6], freedom)
            torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)
    as_they_are, _ = measure_loss(gram_of(keys), weights, freedom.share(gram_of(keys), weights, "none"))
    assert float(as_they_are) > 0.05 * float(total)


@cases("freedom", FREEDOMS)
def test_keys_that_differ_are_read_by_matrices_of_the_freedom_alone(freedom: KeyFreedom):
    keys, queries = draw(TOKENS, HEADS, KEY_SIZE), draw(HEADS, TOKENS, KEY_SIZE, seed=1)
    weights = queries.mT @ queries
    for alignment in ("orthogonal", "low_rank"):
        sharing = freedom.share(gram_of(keys), weights, alignment)
        left, right = queries[0, :6], keys[:6, 0]
        for read in sharing.read:
            # of this freedom: a matrix and its inverse leave scores alone
            inverse = torch.linalg.inv(read).T
            moved = scores(left @ inverse, right @ read, freedom)
            torch.testing.assert_close(moved, scores(left, right, freedom), atol=1e-9, rtol=0)


def test_single_keys_of_least_error_are_found_pair_by_pair():
    freedom = KeyFreedom(KEY_SIZE)
    keys, queries = draw(TOKENS, HEADS, KEY_SIZE), draw(HEADS, TOKENS, KEY_SIZE, seed=1)
    weights = queries.mT @ queries
    wanted = 0.0
    first, second, _ = freedom.pairs(KEY_SIZE)
    for a, b in zip(first, second, strict=True):
        numbers = torch.complex(keys[..., a], keys[..., b])
        power = weights[:, a, a] + weights[:, b, b]
        values = torch.linalg.svdvals(numbers * power.sqrt())
        wanted += float(values[1:].square().sum())
    pairs = torch.stack([weights[:, a, a] + weights[:, b, b] for a, b in zip(first, second, strict=True)], 1)
    even = torch.diag_embed(torch.cat([pairs, pairs], 1))
    lost, _ = measure_loss(gram_of(keys), even, freedom.share(gram_of(keys), weights, "low_rank"))
    assert float(lost) == pytest.approx(wanted, rel=1e-12)


def test_pairs_that_hardly_turn_are_mixed_with_nearly_the_least_error_there_is():
    size, places = 4, 6
    freedom, heads = KeyFreedom(size), 2
    keys, queries = draw(TOKENS, heads, size), draw(heads, TOKENS, size, seed=1)
    # the second pair turns a hundred times more slowly
    turn = torch.stack(
        [
            torch.stack([reference.rotate(one, place, size, False, 1e4) for one in torch.eye(size)], 1)
            for place in range(-places + 1, 1)
        ]
    )
    counts = torch.arange(1.0, places + 1).double()
    angles = (torch.arange(places)[:, None] * torch.tensor([1.0, 0.01]).double()).repeat(1, 2)[None]
    turns = read_turns(nn.Module(), {"position_embeddings": (angles.cos(), angles.sin())}, None)
    assert turns is not None

    def measure(write: Tensor, read: Tensor) -> Tensor:
        """The squares of all score errors: each query with each key at each distance."""
        shared = torch.einsum("nie,ief->nf", keys, write)
        wanted = torch.einsum("hte,pef,nhf->phtn", queries, turn, keys)
        found = torch.einsum("hte,heg,pgf,nf->phtn", queries, read, turn, shared)
        return ((wanted - found).square().sum((1, 2, 3)) * counts).sum()

    gram, weights = gram_of(keys), queries.mT @ queries
    start = freedom.share(gram, weights, "low_rank")
    found = freedom.refine(start, gram, weights, turns)
    before, after = measure(start.write, start.read), measure(found.write, found.read)
    assert float(after) < 0.8 * float(before)
    best = [start.write.clone().requires_grad_(), start.read.clone().requires_grad_()]
    optimizer = torch.optim.LBFGS(best, max_iter=500, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimizer.zero_grad()
        lost = measure(*best)
        lost.backward()
        return lost

    optimizer.step(step)
    assert float(after) < 1.05 * float(measure(*best).detach())
    # where pairs turn apart, one number for each pair is the best
    kept = freedom.refine(start, gram, weights, torch.eye(size) + 0j * turns)
    assert torch.equal(kept.write, start.write)
    assert torch.equal(kept.read, start.read)


def test_single_keys_without_positions_are_the_best_for_the_queries_there_are():
    keys, queries = draw(TOKENS, HEADS, KEY_SIZE), draw(HEADS, TOKENS, KEY_SIZE, seed=1)
    queries[..., ::2] *= 5
    gram, weights = gram_of(keys), queries.mT @ queries
    lost, _ = measure_loss(gram, weights, KeyFreedom(0).share(gram, weights, "low_rank"))
    wanted = reference.least_lost_energy([*keys.unbind(1)], [[one] for one in queries])
    assert float(lost) == pytest.approx(wanted, rel=1e-10)


@cases("kind", ["rigid", "signs"])
def test_keys_whose_lengths_a_norm_takes_away_count_alike(kind: str):
    freedom = KeyFreedom(4, kind=kind)
    uneven = draw(TOKENS, HEADS, KEY_SIZE) * torch.tensor([0.2, 1.0, 7.0]).double()[:, None]
    found = freedom.share(gram_of(uneven), torch.eye(KEY_SIZE).double().expand(HEADS, -1, -1), "orthogonal")
    lengths = torch.einsum("nie,ief->nif", uneven, found.write).square().sum((0, 2))
    torch.testing.assert_close(lengths, lengths[:1].expand(HEADS), atol=1e-10, rtol=0)


def test_many_problems_are_solved_at_once():
    freedom = KeyFreedom(4, kind="rigid")
    keys, queries = draw(2, TOKENS, HEADS, KEY_SIZE), draw(2, HEADS, TOKENS, KEY_SIZE, seed=1)
    grams, weights = torch.stack([gram_of(one) for one in keys]), queries.mT @ queries
    together = freedom.share(grams, weights, "orthogonal")
    for number in range(2):
        alone = freedom.share(grams[number], weights[number], "orthogonal")
        torch.testing.assert_close(together.write[number], alone.write, atol=1e-10, rtol=0)
        torch.testing.assert_close(together.read[number], alone.read, atol=1e-10, rtol=0)


# Freedoms found by experiment


ANY = KeyFreedom(0)
EXPECTED = {
    "BERT": ANY,
    "T5": ANY,
    "Llama": KeyFreedom(8),
    "Mistral": KeyFreedom(6),
    "Phi-3": KeyFreedom(8),
    # queries and keys are normalized, with gains of 1
    "Qwen3": KeyFreedom(12, kind="rigid"),
    "GPT-NeoX": KeyFreedom(2),
    "GPT-J": KeyFreedom(4, interleaved=True),
    "GPT-OSS": KeyFreedom(8),
    # of the 12 features of a key a third turns
    "MiMo-V2-Flash": KeyFreedom(2),
}


def find(model: nn.Module, batch: Any) -> Freedom:
    heads = hw.find_heads(model)
    return find_freedoms([heads.sites[-1]], batch)[heads.sites[-1]]


@cases("family", named(FAMILIES, *EXPECTED))
def test_the_positions_of_a_family_are_recognized(family):
    model = family.build()
    found = find(model, family.inputs())
    assert found == Freedom(EXPECTED[family.name], ANY)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_gains_that_differ_leave_a_sign():
    gained = build("Qwen3")
    assert find(gained, (tokens(),)).key == KeyFreedom(SIZE, kind="signs")
    assert (
        str(find(gained, (tokens(),))) == "keys: a sign for each of 4 half-split pairs; values: any invertible matrix"
    )


def test_a_norm_that_subtracts_the_mean_leaves_nothing():
    model = build("Qwen3")
    for layer in model.model.layers:
        for name in ("q_norm", "k_norm"):
            setattr(layer.self_attn, name, nn.LayerNorm(SIZE))
    assert find(model, (tokens(),)) == Freedom(None, ANY)
    assert str(find(model, (tokens(),))).startswith("keys: nothing")
    # they are averaged as they are
    assert hw.merge(hw.find_heads(model), 1, batches=[tokens()]).free["model.layers.1.self_attn"].startswith("keys: no")


def test_values_with_a_norm_may_be_rotated():
    model = build("Llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(
            lambda _module, _inputs, output: nn.functional.rms_norm(output.unflatten(-1, (-1, SIZE)), (SIZE,)).flatten(
                -2
            )
        )
    assert find(model, (tokens(),)) == Freedom(KeyFreedom(SIZE), KeyFreedom(0, kind="rigid"))


def test_an_experiment_leaves_weights_gradients_and_modes_as_they_were():
    model = build("Llama").train()
    model(tokens(), labels=tokens()).loss.backward()
    weight = model.model.layers[1].self_attn.k_proj.weight
    data, gradient = weight.data.clone(), weight.grad.clone()
    buffer = model.model.rotary_emb.inv_freq
    find(model, (tokens(),))
    assert torch.equal(weight.data, data)
    assert torch.equal(weight.grad, gradient)
    assert model.model.rotary_emb.inv_freq is buffer
    assert all(module.training for module in model.modules())


def test_outputs_that_are_not_finite_are_told():
    model = build("Llama")
    nn.init.constant_(model.model.layers[1].self_attn.v_proj.weight, float("inf"))
    with pytest.raises(HeadwiseError, match=r"neither in float64 nor in float32 \(it computed NaN or infinity\)"):
        find(model, (tokens(),))
