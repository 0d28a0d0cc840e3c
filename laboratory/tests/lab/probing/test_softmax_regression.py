"""Logistic regression over many classes, held against scikit-learn's, and where it stands in for it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import logsumexp
from sklearn.linear_model import LogisticRegression

from cases import cases
from headwise.errors import SettingError
from headwise_lab.probing import fit as probing_fit
from headwise_lab.probing import softmax_regression
from headwise_lab.probing.fit import Classifier, Split, fit
from headwise_lab.probing.softmax_regression import SoftmaxRegression


def drawn(classes: int, count: int, width: int = 9) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(4)
    # far apart, negative and not in a row, as labels may be
    labels = draw.permutation(np.arange(count) % classes) * 3 - 7
    middles = draw.normal(size=(classes, width))
    return middles[(labels + 7) // 3] + 0.7 * draw.normal(size=(count, width)) + 0.3, labels


def objective(found: SoftmaxRegression | LogisticRegression, penalty: float, vectors, labels) -> float:
    """What both minimize, in float64."""
    weight = found.coef_.astype(np.float64)
    scores = vectors @ weight.T + found.intercept_
    own = scores[np.arange(len(labels)), np.searchsorted(found.classes_, labels)]
    return float(np.mean(logsumexp(scores, axis=1) - own) + penalty / 2 * np.sum(weight**2))


def test_it_ends_where_scikit_learn_does_in_float64_from_penalty_to_penalty():
    vectors, labels = drawn(300, 1500)
    found = SoftmaxRegression()
    for penalty, gap in ((1e-2, 1e-6), (1e-3, 5e-6), (1e-4, 1e-4)):
        found.set_params(penalty=penalty).fit(vectors, labels)
        assert found.converged_
        assert 0 < found.n_iter_ < found.max_iter
        slow = LogisticRegression(C=1 / (penalty * len(labels)), tol=1e-6, max_iter=3000).fit(vectors, labels)
        least = objective(slow, penalty, vectors, labels)
        assert objective(found, penalty, vectors, labels) < least * (1 + gap)
        np.testing.assert_allclose(found.coef_, slow.coef_, atol=5e-2)
        assert np.mean(found.predict(vectors) == slow.predict(vectors)) > 0.99


def test_it_goes_on_from_its_end_and_not_from_another_set_of_classes(monkeypatch):
    vectors, labels = drawn(110, 700)
    found = SoftmaxRegression(0.02).fit(vectors, labels)
    first = found.n_iter_
    assert found.fit(vectors, labels).n_iter_ <= 1 < first
    found.set_params(penalty=0.019).fit(vectors, labels)
    assert 0 < found.n_iter_ < first
    fresh = SoftmaxRegression(0.01).fit(vectors, labels * 2)
    assert np.array_equal(found.set_params(penalty=0.01).fit(vectors, labels * 2).coef_, fresh.coef_)
    short = SoftmaxRegression(0.01, max_iter=2).fit(vectors, labels)
    assert (short.n_iter_, short.converged_) == (2, False)
    # a fit that stops before its last iteration need not have come to its end
    given = dict.fromkeys(("train", "dev", "test"), Split(vectors, labels))
    assert fit(Classifier(penalties=(1e-3,)), given).converged
    # the loss is read three times at most
    monkeypatch.setattr(softmax_regression, "EVALUATIONS", 0.03)
    assert not fit(Classifier(penalties=(1e-3,)), given).converged
    with pytest.raises(SettingError, match=r"penalty is 0\.0"):
        SoftmaxRegression(0.0).fit(vectors, labels)
    with pytest.raises(SettingError, match="max_iter is 0"):
        SoftmaxRegression(max_iter=0).fit(vectors, labels)


@cases(("classes", "used"), [(100, "LogisticRegression"), (101, "SoftmaxRegression")])
@cases("kind", ["regression", "mlp"])
def test_a_probe_takes_it_for_more_than_a_hundred_classes(classes, used, kind, monkeypatch):
    vectors, labels = drawn(classes, 6 * classes, width=20)
    if kind == "mlp" and classes == 100:
        used = "MLPClassifier"
    for name in {"LogisticRegression", "SoftmaxRegression", "MLPClassifier"} - {used}:
        monkeypatch.setattr(probing_fit, name, lambda *_, **__: pytest.fail("another classifier"))
    monkeypatch.setattr(probing_fit, "EPOCHS", 3)
    cut = 5 * classes
    given = {name: Split(vectors[cut:], labels[cut:]) for name in ("dev", "test")}
    given["train"] = Split(vectors[:cut], labels[:cut])
    found = fit(Classifier(kind, penalties=(0.1, 1e-3)), given)
    if kind == "regression":
        assert found.penalty == 1e-3
        assert found.dev > 0.5
        assert found.correct == round(found.dev * classes)
        monkeypatch.setattr(probing_fit, "ITERATIONS", 1)
        assert (found.converged, fit(Classifier(kind, penalties=(0.1, 1e-3)), given).converged) == (True, False)
