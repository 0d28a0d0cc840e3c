from __future__ import annotations

import pytest
import torch
from scipy import stats

from cases import cases
from headwise import metrics
from headwise.metrics import pairs as head_pairs
from headwise.metrics.intervals import mean_interval, student_quantile
from headwise.metrics.pairs import (
    attention_pairs,
    cosine_pairs,
    distance_pairs,
    mean_over_others,
    mean_over_pairs,
    parameter_pairs,
)
from headwise.metrics.roles import role_shares

GENERATOR = torch.Generator().manual_seed(5)
VECTORS = torch.randn(3, 7, 4, 6, generator=GENERATOR, dtype=torch.float64)
KEEP = torch.rand(3, 7, generator=GENERATOR) < 0.7
WEIGHTS = (3 * torch.randn(3, 4, 7, 7, generator=GENERATOR, dtype=torch.float64)).softmax(-1)


@cases("keep", [None, KEEP])
def test_means_over_pairs_are_the_metrics(keep):
    assert mean_over_pairs(distance_pairs(VECTORS, keep).mean) == pytest.approx(
        float(metrics.head_distance(VECTORS, keep)), abs=1e-12
    )
    assert mean_over_pairs(cosine_pairs(VECTORS, keep).mean) == pytest.approx(
        float(metrics.output_cosine(VECTORS, keep)), abs=1e-12
    )
    pairs, entropy = attention_pairs(WEIGHTS, keep)
    assert mean_over_pairs(pairs.mean) == pytest.approx(
        float(metrics.attention_jensen_shannon(WEIGHTS, keep)), abs=1e-12
    )
    torch.testing.assert_close(entropy / pairs.count, metrics.attention_entropy(WEIGHTS, keep))
    cosine, _ = parameter_pairs(VECTORS[0, 0])
    assert mean_over_pairs(cosine) == pytest.approx(float(metrics.parameter_cosine(VECTORS[0, 0]).mean), abs=1e-12)


def test_each_entry_is_of_its_two_heads():
    whole = distance_pairs(VECTORS).mean, cosine_pairs(VECTORS).mean, attention_pairs(WEIGHTS)[0].mean
    pair = VECTORS[..., [1, 3], :]
    assert whole[0][1, 3] == pytest.approx(float(metrics.head_distance(pair)), abs=1e-12)
    assert whole[1][3, 1] == pytest.approx(float(metrics.output_cosine(pair)), abs=1e-12)
    assert whole[2][1, 3] == pytest.approx(float(metrics.attention_jensen_shannon(WEIGHTS[:, [1, 3]])), abs=1e-12)


def test_batches_add_up():
    parts = distance_pairs(VECTORS[:1], KEEP[:1]) + distance_pairs(VECTORS[1:], KEEP[1:])
    torch.testing.assert_close(parts.mean, distance_pairs(VECTORS, KEEP).mean)


def test_the_mean_over_others_leaves_the_head_itself_out():
    matrix = torch.tensor([[9.0, 1.0, 2.0], [1.0, 9.0, 5.0], [2.0, 5.0, 9.0]])
    assert mean_over_others(matrix).tolist() == [1.5, 3.0, 3.5]


def test_role_shares_are_sums_by_hand_and_leave_out_rows_that_a_role_forbids_everything():
    roles = torch.rand(3, 2, 7, 7, generator=GENERATOR) < 0.3
    roles[:, 1, 2] = False
    weights = WEIGHTS.clone()
    weights[..., 6] = 0.0  # a key nobody can attend to
    weights = weights / weights.sum(-1, keepdim=True)
    found = role_shares(weights, roles, KEEP)
    for role in range(2):
        mass, chance, queries = torch.zeros(4, dtype=torch.float64), 0.0, 0
        for b in range(3):
            for q in range(7):
                keys = [k for k in range(6) if roles[b, role, q, k]]
                if not KEEP[b, q] or not keys:
                    continue
                queries += 1
                chance += len(keys) / 6
                mass += weights[b, :, q][:, keys].sum(-1)
        assert int(found.queries[role]) == queries
        assert float(found.expected[role]) == pytest.approx(chance / queries, abs=1e-12)
        torch.testing.assert_close(found.share[:, role], mass / queries)


def test_a_random_mask_as_sparse_gets_what_is_expected_on_average():
    rows, allowed = WEIGHTS[:1, :1], 3
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(600):
        order = torch.rand(1, 1, 7, 7, generator=generator).argsort(-1)
        drawn.append(float(role_shares(rows, order < allowed).share))
    expected = role_shares(rows, torch.arange(7).expand(1, 1, 7, 7) < allowed).expected
    assert float(expected) == pytest.approx(allowed / 7)
    assert sum(drawn) / len(drawn) == pytest.approx(allowed / 7, abs=0.015)


@cases("freedom", [1, 2, 3, 5, 30])
def test_quantiles_are_students(freedom: int):
    assert student_quantile(0.975, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=3e-3)


def test_the_interval_is_students():
    values = torch.randn(12, generator=GENERATOR, dtype=torch.float64) + 0.4
    found = mean_interval(values, level=0.9)
    low, high = stats.t.interval(0.9, 11, loc=values.mean(), scale=stats.sem(values.numpy()))
    assert (found.low, found.value, found.high) == pytest.approx((low, float(values.mean()), high), rel=1e-5, abs=1e-5)
    alone = mean_interval(values[:1])
    assert alone.low == alone.value == alone.high
    assert mean_interval(values, level=0.999).low < found.low


@cases("keep", [None, KEEP])
def test_tokens_taken_a_few_at_a_time_are_the_same_sums(keep, monkeypatch):
    cosines, (divergences, entropy) = cosine_pairs(VECTORS, keep), attention_pairs(WEIGHTS, keep)
    monkeypatch.setattr(head_pairs, "CHUNK", 4)
    torch.testing.assert_close(cosine_pairs(VECTORS, keep).total, cosines.total)
    again, entropies = attention_pairs(WEIGHTS, keep)
    torch.testing.assert_close(again.total, divergences.total)
    torch.testing.assert_close(entropies, entropy)


def test_moments_of_single_precision_are_those_of_double():
    vectors = VECTORS.float()
    # far from zero beside its spread, and so small that its squares are no numbers of single precision
    vectors[..., 1, :] += 2.0**20
    vectors[..., 2, :] *= 1e-25
    found, expected = metrics.output_moments(vectors), metrics.output_moments(vectors.double())
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-12, atol=0.0)
    sizes = expected.scatter.abs().amax((1, 3), keepdim=True)
    assert ((found.scatter - expected.scatter).abs() / sizes).max() < 1e-5
    torch.testing.assert_close(found.linear_cka_matrix(), expected.linear_cka_matrix(), rtol=1e-4, atol=1e-6)
