"""The scores of GLUE: scikit-learn's and scipy's, and each item's share of them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import accuracy_score, matthews_corrcoef

from cases import cases
from headwise.errors import ShapeError
from headwise_lab.experiment.evaluation import ACCURACY, MATTHEWS, SPEARMAN, GlueScore, score_answers

GENERATOR = np.random.default_rng(3)


def drawn(kind: int, items: int = 400) -> tuple[np.ndarray, np.ndarray]:
    if kind == SPEARMAN:
        truth = np.round(GENERATOR.normal(size=items), 1)  # with ties, as people's scores
        return truth + 0.8 * GENERATOR.normal(size=items), truth
    truth = GENERATOR.random(items) < 0.3
    return (truth ^ (GENERATOR.random(items) < 0.2)).astype(float), truth.astype(float)


def statistics(kind: int, answers: np.ndarray, truth: np.ndarray) -> np.ndarray:
    return np.stack([np.full(len(answers), float(kind)), answers, truth], axis=1)


@cases("kind", [ACCURACY, MATTHEWS, SPEARMAN])
def test_the_mean_of_the_shares_is_the_score_and_their_spread_that_of_resampling(kind):
    answers, truth = drawn(kind)
    found = GlueScore().values(statistics(kind, answers, truth))
    wanted = {
        ACCURACY: lambda: accuracy_score(truth, answers),
        MATTHEWS: lambda: matthews_corrcoef(truth, answers),
        SPEARMAN: lambda: spearmanr(answers, truth).statistic,
    }[kind]()
    assert 0.3 < wanted < 0.9
    assert found.mean() == pytest.approx(wanted)
    assert score_answers(kind, answers, truth) == pytest.approx(wanted)
    draws = GENERATOR.integers(0, len(found), (300, len(found)))
    exact = [score_answers(kind, answers[draw], truth[draw]) for draw in draws[:300]]
    linear = [found[draw].mean() for draw in draws[:300]]
    assert np.std(linear) == pytest.approx(np.std(exact), rel=0.12)


@cases("kind", [MATTHEWS, SPEARMAN])
def test_a_constant_answer_has_no_correlation(kind):
    _, truth = drawn(kind, 30)
    assert not GlueScore().values(statistics(kind, np.ones(30), truth)).any()
    assert score_answers(kind, np.ones(30), truth) == 0.0


def test_statistics_of_another_shape_are_refused():
    with pytest.raises(ShapeError, match=r"\(4, 2\); expected kind, answer and truth"):
        GlueScore().values(np.ones((4, 2)))
