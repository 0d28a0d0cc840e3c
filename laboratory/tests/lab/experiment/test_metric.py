"""The scores of items: those of sacreBLEU, scikit-learn and scipy, with the spread of resampling."""

from __future__ import annotations

import re

import numpy as np
import pytest
import sacrebleu
from scipy.stats import spearmanr
from sklearn.metrics import accuracy_score, matthews_corrcoef

from cases import cases
from headwise.errors import SettingError, ShapeError
from headwise_lab.experiment.evaluation import (
    ACCURACY,
    MATTHEWS,
    METRICS,
    SPEARMAN,
    Accuracy,
    Auc,
    Bleu,
    GlueScore,
    Likelihood,
    Measure,
    score_answers,
)


def corpus(sentences: int, seed: int, *, shorter: int = 0) -> tuple[list[str], list[str]]:
    """Return hypotheses and references that share many n-grams."""
    generator = np.random.default_rng(seed)
    references = [
        [f"w{word}" for word in generator.integers(0, 30, generator.integers(6, 15))] for _ in range(sentences)
    ]
    hypotheses = []
    for reference in references:
        kept = reference[: len(reference) - shorter]
        hypotheses.append([word if generator.random() < 0.8 else "wrong" for word in kept])
    return [" ".join(words) for words in hypotheses], [" ".join(words) for words in references]


def statistics(hypotheses: list[str], references: list[str]) -> np.ndarray:
    bleu = sacrebleu.BLEU()
    found = [bleu.corpus_score([h], [[r]]) for h, r in zip(hypotheses, references, strict=True)]
    return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in found])


@cases("shorter", [0, 2])
def test_the_mean_of_the_values_is_sacrebleus_corpus_score_and_their_spread_that_of_resampling(shorter):
    hypotheses, references = corpus(400, seed=2, shorter=shorter)
    counted, expected = statistics(hypotheses, references), sacrebleu.corpus_bleu(hypotheses, [references])
    assert (expected.bp < 1) == (shorter > 0)
    assert 100 * Bleu().values(counted).mean() == pytest.approx(expected.score, abs=1e-9)
    generator = np.random.default_rng(3)
    scores = [Bleu().values(counted[generator.integers(0, 400, 400)]).mean() for _ in range(400)]
    # the standard deviation of 400 resamples is itself known to 3.5 %
    assert Bleu().values(counted).std() / np.sqrt(400) == pytest.approx(np.std(scores), rel=0.12)


def test_a_corpus_without_any_match_of_four_words_scores_nothing():
    counted = statistics(["a b c x", "q r"], ["a b c d", "q r s t"])
    assert Bleu().values(counted).tolist() == [0.0, 0.0]


def test_statistics_of_another_shape_are_refused():
    wrong = ((Bleu(), (3,)), (Accuracy(), (3, 2)), (Auc(), (3, 3)), (Likelihood(), (3,)), (GlueScore(), (4, 2)))
    for metric, shape in wrong:
        with pytest.raises(ShapeError, match=re.escape(f"statistics have shape {shape}; expected")):
            metric.values(np.ones(shape))


def test_metrics_are_found_by_their_names_and_a_measure_says_which_way_is_better():
    assert {"accuracy", "BLEU", "AUC-ROC, own test", "GLUE score"} <= set(METRICS)
    assert all(metric.name == name for name, metric in METRICS.items())
    assert Measure("chrF", "chrF").title == "chrF ↑"
    with pytest.raises(SettingError, match="better"):
        Measure("chrF", "chrF", better="more")


GENERATOR = np.random.default_rng(3)


def drawn(kind: int, items: int = 400) -> tuple[np.ndarray, np.ndarray]:
    if kind == SPEARMAN:
        truth = np.round(GENERATOR.normal(size=items), 1)  # with ties, as people's scores
        return truth + 0.8 * GENERATOR.normal(size=items), truth
    truth = GENERATOR.random(items) < 0.3
    return (truth ^ (GENERATOR.random(items) < 0.2)).astype(float), truth.astype(float)


def answered(kind: int, answers: np.ndarray, truth: np.ndarray) -> np.ndarray:
    return np.stack([np.full(len(answers), float(kind)), answers, truth], axis=1)


@pytest.mark.full
@cases("kind", [ACCURACY, MATTHEWS, SPEARMAN])
def test_the_mean_of_the_shares_is_the_score_and_their_spread_that_of_resampling(kind):
    answers, truth = drawn(kind)
    found = GlueScore().values(answered(kind, answers, truth))
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
    assert not GlueScore().values(answered(kind, np.ones(30), truth)).any()
    assert score_answers(kind, np.ones(30), truth) == 0.0
