"""One head in the place of several: closed forms against explicit matrices, groups of heads, and the refit of W_O."""

from __future__ import annotations

import pytest
import torch
from scipy.linalg import orthogonal_procrustes
from torch import Tensor

from cases import cases
from headwise.shrinking.alignment import (
    Sharing,
    align_orthogonal,
    group_by_similarity,
    group_in_order,
    measure_loss,
    share_low_rank,
)
from headwise.shrinking.merge import refit_output
from reference import merging as reference
from shrinking.planted import draw, gram_of, weights_of

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


def inside(similarity: torch.Tensor, groups: tuple[tuple[int, ...], ...]) -> float:
    return sum(float(similarity[i, j]) for group in groups for i in group for j in group if i != j)


@cases(("heads", "groups"), [(6, 3), (6, 2), (8, 4), (8, 2)])
def test_groups_are_equal_and_nearly_as_alike_as_the_best_of_all(heads: int, groups: int):
    shares = []
    for seed in range(20):
        drawn = draw(heads, heads, seed=seed).sigmoid()
        similarity = drawn + drawn.T
        found = group_by_similarity(similarity, groups)
        assert sorted(head for group in found for head in group) == list(range(heads))
        assert {len(group) for group in found} == {heads // groups}
        assert list(found) == sorted(found)
        best, _ = reference.best_groups(similarity, heads // groups)
        assert inside(similarity, found) >= inside(similarity, group_in_order(heads, groups)) - 1e-12
        shares.append(inside(similarity, found) / best)
    assert min(shares) > 0.9
    assert sum(shares) / len(shares) > 0.98


def test_heads_of_one_kind_are_found_in_any_order():
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    kind = order % 4
    similarity = (kind[:, None] == kind).double() + 0.3 * draw(12, 12).sigmoid()
    for group in group_by_similarity((similarity + similarity.T) / 2, 4):
        assert len({int(kind[head]) for head in group}) == 1


def test_an_exchange_mends_what_greed_spoiled():
    # the most alike pair (0, 1) leaves 2 and 3, which have nothing in common
    similarity = torch.tensor([[0, 1.0, 0.9, 0], [1.0, 0, 0, 0.9], [0.9, 0, 0, 0], [0, 0.9, 0, 0]])
    assert group_by_similarity(similarity, 2) == ((0, 2), (1, 3))


def test_one_group_and_as_many_as_heads():
    assert group_by_similarity(torch.rand(4, 4), 1) == ((0, 1, 2, 3),)
    assert group_by_similarity(torch.rand(4, 4), 4) == ((0,), (1,), (2,), (3,))


@cases("ridge", [1e-3, 0.7])
def test_the_refit_is_least_squares_with_rows_that_hold_to_the_given_weight(ridge: float):
    x, y, start = draw(11, 5), draw(11, 3, seed=1), draw(3, 5, seed=2)
    strength = (ridge * float((x.T @ x).diagonal().mean())) ** 0.5
    rows, wanted = torch.cat([x, strength * torch.eye(5).double()]), torch.cat([y, strength * start.T])
    expected = torch.linalg.lstsq(rows, wanted).solution.T
    found = refit_output(x.T @ x, x.T @ y, start, ridge)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_a_weight_that_gives_the_outputs_stays_and_so_does_what_no_token_shows():
    x, start = draw(4, 6), draw(3, 6, seed=1)
    torch.testing.assert_close(refit_output(x.T @ x, x.T @ x @ start.T, start), start, atol=1e-12, rtol=0)
    x[:, 5] = 0
    found = refit_output(x.T @ x, x.T @ draw(4, 3, seed=2), start)
    assert torch.equal(found[:, 5], start[:, 5])
    assert not torch.allclose(found[:, :5], start[:, :5])
