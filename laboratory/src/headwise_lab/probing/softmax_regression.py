"""Logistic regression over many classes: scikit-learn's objective and interface, minimized by torch in float32.

scikit-learn's works in float64 on arrays of sentences x classes, and took 16 minutes for a probe of 1,000 classes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from torch import Tensor
from torch.nn.functional import cross_entropy

from headwise.errors import require_integer, require_positive

# For the largest entry of the gradient, times the number of classes: scikit-learn's tolerance at 100 classes.
TOLERANCE = 1e-2
# Maximum evaluations of the loss per iteration, mostly in the line search.
EVALUATIONS = 10
# Sentences whose scores over 1,000 classes fit in a core's cache.
SENTENCES = 500


class SoftmaxRegression(ClassifierMixin, BaseEstimator):
    """One linear layer and a softmax; each fit starts from the last one (the first from zeros).

    The objective is that of `LogisticRegression(C=1 / (penalty N))` of scikit-learn over three classes or more,

        (1/N) sum_n -log softmax(W x_n + b)_{y_n} + penalty/2 |W|^2.

    Args:
        penalty: Above 0.
        max_iter: Iterations of L-BFGS at most, at least 1.

    Attributes:
        classes_: The K classes, sorted.
        coef_: W, [K, d].
        intercept_: b, [K].
        n_iter_: Iterations of the last fit.
        converged_: Whether no entry of its gradient was above 0.01 / K at its end.

    Raises:
        SettingError: On `fit`, a value is outside its range.

    Example:
        >>> draw = np.random.default_rng(0)
        >>> labels = np.arange(600) % 120
        >>> vectors = np.eye(120)[labels] + draw.normal(scale=0.1, size=(600, 120))
        >>> float(np.mean(SoftmaxRegression(1e-3).fit(vectors, labels).predict(vectors) == labels))
        1.0
    """

    classes_: NDArray[np.int64]
    coef_: NDArray[np.float32]
    intercept_: NDArray[np.float32]
    n_iter_: int
    converged_: bool

    def __init__(self, penalty: float = 1e-3, max_iter: int = 100) -> None:
        self.penalty = penalty
        self.max_iter = max_iter

    def fit(self, vectors: NDArray[np.floating], labels: NDArray[np.int64]) -> SoftmaxRegression:
        """Fit to vectors [N, d] and their classes [N]; return self."""
        require_positive("penalty", self.penalty)
        require_integer("max_iter", self.max_iter, low=1)
        given = torch.from_numpy(np.asarray(vectors, dtype=np.float32))
        classes, places = np.unique(labels, return_inverse=True)
        target = torch.from_numpy(places)
        shape = (len(classes), given.shape[1])
        if not hasattr(self, "coef_") or self.coef_.shape != shape or not np.array_equal(self.classes_, classes):
            self.classes_, self.coef_ = classes, np.zeros(shape, np.float32)
            self.intercept_ = np.zeros(len(classes), np.float32)
        weight, bias = (torch.tensor(start, requires_grad=True) for start in (self.coef_, self.intercept_))
        tolerance = TOLERANCE / len(classes)
        lbfgs = torch.optim.LBFGS(
            [weight, bias],
            max_iter=self.max_iter,
            max_eval=EVALUATIONS * self.max_iter,
            tolerance_grad=tolerance,
            # in float32 the loss stops changing before its gradient is small
            tolerance_change=0.0,
            history_size=10,
            line_search_fn="strong_wolfe",
        )

        def loss() -> Tensor:
            lbfgs.zero_grad()
            value = self.penalty / 2 * weight.square().sum()
            value.backward()
            for part, answers in zip(given.split(SENTENCES), target.split(SENTENCES), strict=True):
                own = cross_entropy(part @ weight.T + bias, answers, reduction="sum") / len(given)
                own.backward()
                value = value.detach() + own.detach()
            return value

        lbfgs.step(loss)
        # the last evaluation need not be where the line search ended
        loss()
        gradients = [one.grad for one in (weight, bias) if one.grad is not None]
        self.converged_ = all(float(grad.abs().max()) <= tolerance for grad in gradients)
        self.coef_, self.intercept_ = weight.detach().numpy(), bias.detach().numpy()
        self.n_iter_ = int(lbfgs.state[weight]["n_iter"])
        return self

    def predict(self, vectors: NDArray[np.floating]) -> NDArray[np.int64]:
        """Return the most likely class of each vector, [N]."""
        scores = np.asarray(vectors, dtype=np.float32) @ self.coef_.T + self.intercept_
        return self.classes_[scores.argmax(axis=1)]
