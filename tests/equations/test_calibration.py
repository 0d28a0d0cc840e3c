from __future__ import annotations

import math

import pytest
import torch
from sklearn.calibration import calibration_curve

from cases import cases
from headwise.metrics.calibration import Reliability, predictive_entropy, reliability, reliability_of

GENERATOR = torch.Generator().manual_seed(3)
CONFIDENCE = 0.2 + 0.8 * torch.rand(400, generator=GENERATOR, dtype=torch.float64)
CORRECT = torch.rand(400, generator=GENERATOR, dtype=torch.float64) < CONFIDENCE - 0.1


def by_hand(bins: int) -> tuple[float, float]:
    """ECE and OE in the paper's letters, one loop a bin."""
    ece = oe = 0.0
    for m in range(1, bins + 1):
        inside = [i for i in range(400) if (m - 1) / bins < CONFIDENCE[i] <= m / bins]
        if not inside:
            continue
        acc = sum(bool(CORRECT[i]) for i in inside) / len(inside)
        conf = sum(float(CONFIDENCE[i]) for i in inside) / len(inside)
        ece += len(inside) / 400 * abs(acc - conf)
        oe += len(inside) / 400 * (conf * max(conf - acc, 0.0))
    return ece, oe


@cases("bins", [1, 7, 15])
def test_both_errors_are_the_papers_sums(bins: int):
    found = reliability(CONFIDENCE, CORRECT, bins=bins)
    assert (found.ece, found.oe) == pytest.approx(by_hand(bins), abs=1e-12)


def test_bins_are_those_of_scikit_learn():
    accuracy, confidence = calibration_curve(CORRECT.numpy(), CONFIDENCE.numpy(), n_bins=15, strategy="uniform")
    found = reliability(CONFIDENCE, CORRECT, bins=15).bins
    assert [one[0] for one in found] == pytest.approx(confidence.tolist(), abs=1e-12)
    assert [one[1] for one in found] == pytest.approx(accuracy.tolist(), abs=1e-12)


def test_a_bin_holds_its_upper_edge_and_not_its_lower_one():
    found = reliability(torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64), torch.ones(4).bool(), bins=4)
    assert found.counts == (2, 1, 0, 1)


def test_items_of_two_runs_add_up():
    parts = [reliability(CONFIDENCE[part], CORRECT[part]) for part in (slice(0, 130), slice(130, 400))]
    whole = reliability(CONFIDENCE, CORRECT)
    together = parts[0] + parts[1]
    assert together.counts == whole.counts
    assert together.ece == pytest.approx(whole.ece, abs=1e-12)


def test_confidence_is_the_largest_probability():
    logits = torch.randn(50, 4, generator=GENERATOR, dtype=torch.float64)
    probabilities, labels = logits.softmax(1), torch.randint(0, 4, (50,), generator=GENERATOR)
    expected = reliability(probabilities.amax(1), probabilities.argmax(1) == labels)
    assert reliability_of(probabilities, labels) == expected


def test_entropy_is_minus_the_sum_of_p_log_p():
    rows = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    by_hand = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2))
    assert predictive_entropy(rows).tolist() == pytest.approx([by_hand, 0.0, math.log(3)], abs=1e-12)


def test_the_record_is_plain_numbers():
    assert Reliability((2,), (1,), (1.5,)).bins == ((0.75, 0.5, 2),)
