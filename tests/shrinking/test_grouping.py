from __future__ import annotations

import pytest
import torch

from headwise.errors import HeadwiseError, SettingError, ShapeError
from headwise.shrinking.alignment import group_by_similarity, group_in_order
from reference import merging as reference
from shrinking.drawn_heads import draw


def inside(similarity: torch.Tensor, groups: tuple[tuple[int, ...], ...]) -> float:
    return sum(float(similarity[i, j]) for group in groups for i in group for j in group if i != j)


@pytest.mark.parametrize(("heads", "groups"), [(6, 3), (6, 2), (8, 4), (8, 2)])
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


def test_numbers_that_do_not_divide_are_refused():
    with pytest.raises(SettingError, match=r"groups is 4, and 6 heads do not make .* expected one of 1, 2, 3"):
        group_in_order(6, 4)
    with pytest.raises(SettingError, match="groups is 7; expected an integer of at least 1 and at most 6"):
        group_by_similarity(torch.rand(6, 6), 7)
    with pytest.raises(ShapeError, match="similarity has shape"):
        group_by_similarity(torch.rand(6, 5), 3)
    with pytest.raises(HeadwiseError, match="similarity holds NaN"):
        group_by_similarity(torch.full((4, 4), float("nan")), 2)
