"""One head in the place of several: the closed forms against explicit matrices, token by token."""

from __future__ import annotations

import pytest
import torch
from scipy.linalg import orthogonal_procrustes
from torch import Tensor

from headwise.shrinking.alignment import Sharing, align_orthogonal, measure_loss, share_low_rank, share_mean
from reference import merging as reference
from shrinking.drawn_heads import draw, gram_of, weights_of

TOKENS, HEADS, QUERIES, SIZE, WIDTH = 23, 3, 2, 4, 9


def drawn() -> tuple[Tensor, Tensor]:
    """Features [N, m, e] of unlike sizes, and readers [m, n, d, e]."""
    sizes = torch.tensor([0.3, 1.0, 2.5]).double()
    readers = draw(HEADS, QUERIES, WIDTH, SIZE, seed=1)
    return draw(TOKENS, HEADS, SIZE) * sizes[:, None], readers * sizes.flip(0)[:, None, None, None]


def as_lists(features: Tensor, readers: Tensor) -> tuple[list[Tensor], list[list[Tensor]]]:
    return [*features.unbind(1)], [[*own] for own in readers]


def test_the_lost_energy_is_that_of_a_loop_over_tokens():
    features, readers = drawn()
    for seed in range(3):
        write, read = draw(HEADS, SIZE, SIZE, seed=10 + seed), draw(HEADS, SIZE, SIZE, seed=20 + seed)
        lost, total = measure_loss(gram_of(features), weights_of(readers), Sharing(write, read))
        wanted = reference.lost_energy(*as_lists(features, readers), [*write], [*read])
        assert float(lost) == pytest.approx(wanted, rel=1e-12)
        nothing = reference.lost_energy(*as_lists(features, readers), [*write], [0 * one for one in read])
        assert float(total) == pytest.approx(nothing, rel=1e-12)


def test_the_low_rank_head_loses_what_no_head_can_keep():
    features, readers = drawn()
    gram, weights = gram_of(features), weights_of(readers)
    sharing = share_low_rank(gram, weights)
    lost, _ = measure_loss(gram, weights, sharing)
    assert float(lost) == pytest.approx(reference.least_lost_energy(*as_lists(features, readers)), rel=1e-12)
    own = reference.lost_energy(*as_lists(features, readers), [*sharing.write], [*sharing.read])
    assert own == pytest.approx(float(lost), rel=1e-10)


def test_the_low_rank_head_has_the_length_of_the_heads():
    features, readers = drawn()
    sharing = share_low_rank(gram_of(features), 1e6 * weights_of(readers))
    shared = torch.einsum("nie,ief->nf", features, sharing.write)
    assert float(shared.square().sum()) == pytest.approx(float(features.square().sum()) / HEADS, rel=1e-12)


def test_low_rank_heads_of_complex_numbers_are_the_leading_singular_vectors():
    features = torch.complex(draw(TOKENS, HEADS), draw(TOKENS, HEADS, seed=1))
    power = torch.tensor([0.5, 1.0, 3.0]).double()
    gram, weights = gram_of(features[..., None]), (power + 0j)[:, None, None]
    lost, total = measure_loss(gram, weights, share_low_rank(gram, weights))
    values = torch.linalg.svdvals(features * power.sqrt())
    assert float(lost) == pytest.approx(float(values[1:].square().sum()), rel=1e-12)
    assert float(total) == pytest.approx(float(values.square().sum()), rel=1e-12)


def test_a_head_nobody_reads_and_a_head_that_is_zero_are_no_trouble():
    features, readers = drawn()
    readers[0], features[:, 1] = 0, 0
    gram, weights = gram_of(features), weights_of(readers)
    sharing = share_low_rank(gram, weights)
    lost, total = measure_loss(gram, weights, sharing)
    assert abs(float(lost)) < 1e-12 * float(total)
    assert bool(sharing.write.isfinite().all() and sharing.read.isfinite().all())


def test_nothing_but_zeros_stays_zero():
    sharing = share_low_rank(torch.zeros(2, 3, 2, 3).double(), torch.zeros(2, 3, 3).double())
    assert bool(sharing.write.isfinite().all() and sharing.read.isfinite().all())
    assert float(sharing.read.abs().max()) == 0


def test_two_heads_are_turned_as_by_procrustes():
    features = draw(TOKENS, 2, SIZE)
    turned = align_orthogonal(gram_of(features), rounds=200)
    wanted, scale = orthogonal_procrustes(features[:, 0].numpy(), features[:, 1].numpy())
    torch.testing.assert_close(turned[0] @ turned[1].T, torch.from_numpy(wanted), atol=1e-8, rtol=0)
    both = torch.einsum("nie,ief->inf", features, turned)
    assert float((both[0] * both[1]).sum()) == pytest.approx(scale, rel=1e-10)


def test_rotations_are_rotations_and_each_round_brings_heads_nearer():
    features = draw(TOKENS, 5, SIZE)
    gram = gram_of(features)

    def spread(rounds: int) -> float:
        turned = align_orthogonal(gram, rounds)
        torch.testing.assert_close(turned @ turned.mT, torch.eye(SIZE).double().expand(5, -1, -1), atol=1e-12, rtol=0)
        aligned = torch.einsum("nie,ief->nif", features, turned)
        return float((aligned - aligned.mean(1, keepdim=True)).square().sum())

    found = [spread(rounds) for rounds in (0, 1, 8, 200)]
    assert found[0] > found[1] > found[2]
    assert found[2] < 1.02 * found[3]


def test_turned_copies_are_brought_together_whatever_the_turns():
    turns = torch.linalg.qr(draw(6, SIZE, SIZE, seed=3)).Q
    features = torch.einsum("ne,ief->nif", draw(TOKENS, SIZE), turns)
    gram, weights = gram_of(features), weights_of(draw(6, 1, WIDTH, SIZE))
    lost, total = measure_loss(gram, weights, share_mean(gram, align_orthogonal(gram)))
    assert abs(float(lost)) < 1e-12 * float(total)
    as_they_are, _ = measure_loss(gram, weights, share_mean(gram, torch.eye(SIZE).double().expand(6, -1, -1)))
    assert float(as_they_are) > 0.1 * float(total)


def test_lengths_that_a_norm_takes_away_have_no_part_in_the_mean():
    head = draw(TOKENS, SIZE)
    features = torch.stack([head, 100 * draw(TOKENS, SIZE, seed=1)], 1)
    ones = torch.eye(SIZE).double().expand(2, -1, -1)
    gram = gram_of(features)
    shared = torch.einsum("nie,ief->nf", features, share_mean(gram, ones, normalized=True).write)
    sizes = features.square().sum((0, 2)).sqrt()
    units = (features / sizes[:, None]).mean(1)
    torch.testing.assert_close(shared / shared.norm(), units / units.norm(), atol=1e-12, rtol=0)
