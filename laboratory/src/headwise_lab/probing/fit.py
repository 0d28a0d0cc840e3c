"""Fitting a probing classifier: its penalty is chosen on dev, and it is scored once on test.

The classifiers are SentEval's: logistic regression, or one hidden layer of sigmoids.
"""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

from headwise.errors import SettingError, require_choice, require_integer
from headwise_lab.probing.softmax_regression import SoftmaxRegression

FORM = "fit-2"  # bump this when fits change

KINDS = ("regression", "mlp")
# SentEval's four and a stronger one, as there are fewer sentences here; strongest first.
PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
# A regression stops after this many weaker penalties in a row without improvement on dev. A hidden layer tries all:
# under strong ones it always predicts the same class.
PATIENCE = 2
ITERATIONS, EPOCHS = 100, 200
BATCH = 128
# Above this many classes there is no hidden layer, as in SentEval for word content, and `SoftmaxRegression` is used.
MANY = 100


@dataclass(frozen=True)
class Classifier:
    """The classifier to fit: logistic "regression", or "mlp" with one hidden layer.

    Raises:
        SettingError: A value is outside its range.
    """

    kind: str = "regression"
    # Values to try for lambda in mean loss + lambda/2 |W|^2, in order.
    penalties: tuple[float, ...] = PENALTIES
    # Units of the hidden layer, and the seed of its random numbers.
    hidden: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("classifier", self.kind, KINDS)
        require_integer("hidden", self.hidden, low=1)
        require_integer("seed", self.seed)
        if not self.penalties or min(self.penalties) <= 0:
            raise SettingError(f"penalties are {self.penalties}; expected at least one, each above 0.")


@dataclass(frozen=True, eq=False)
class Split:
    """Vectors [N, d] and the class of each, [N]."""

    vectors: NDArray[np.floating]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Fitted:
    """Accuracy on dev, number of correct test predictions, the penalty chosen, and whether its fit converged."""

    dev: float
    correct: int
    penalty: float
    converged: bool


def fit(classifier: Classifier, splits: Mapping[str, Split]) -> Fitted:
    """Return how well a classifier does on vectors standardized by the training split's mean and deviation.

    Penalties are tried from the first on, by a regression until two in a row are no better on dev; of equal ones on dev
    the first is kept. The test split is scored once, by the classifier that was chosen.

    Args:
        classifier: What to fit.
        splits: "train", "dev" and "test".

    Example:
        >>> draw = np.random.default_rng(0)
        >>> labels = draw.integers(0, 2, 300)
        >>> vectors = draw.normal(size=(300, 4)) + 2.0 * labels[:, None]
        >>> found = fit(Classifier(), {"train": Split(vectors[:200], labels[:200]),
        ...     "dev": Split(vectors[200:250], labels[200:250]), "test": Split(vectors[250:], labels[250:])})
        >>> found.correct > 40
        True
    """
    train = np.asarray(splits["train"].vectors, dtype=np.float32)
    middle, spread = train.mean(axis=0), train.std(axis=0)
    # keep constant coordinates constant
    spread = np.where(spread > 1e-6 * (np.abs(middle) + 1e-6), spread, 1.0)

    def standardize(name: str) -> NDArray[np.float32]:
        return ((np.asarray(splits[name].vectors, dtype=np.float32) - middle) / spread).astype(np.float32)

    vectors, dev = standardize("train"), standardize("dev")
    many = len(np.unique(splits["train"].labels)) > MANY
    hidden = classifier.kind == "mlp" and not many
    best, penalty, worse = -1.0, 0.0, 0
    model: Any = None
    chosen: Any = None
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for tried in classifier.penalties:
            if hidden:
                model = _make_hidden_layer(classifier, tried, len(vectors))
            elif many:
                model = (model or SoftmaxRegression(max_iter=ITERATIONS)).set_params(penalty=tried)
            else:
                model = model or LogisticRegression(max_iter=ITERATIONS, warm_start=True)
                model.set_params(C=1.0 / (tried * len(vectors)))
            model.fit(vectors, splits["train"].labels)
            score = float(np.mean(model.predict(dev) == splits["dev"].labels))
            if score > best:
                best, penalty, chosen, worse = score, tried, copy.deepcopy(model), 0
            else:
                worse += 1
            if worse == PATIENCE and not hidden:
                break
        correct = int(np.sum(chosen.predict(standardize("test")) == splits["test"].labels))
    converged = chosen.converged_ if many else int(np.max(chosen.n_iter_)) < chosen.max_iter
    return Fitted(best, correct, penalty, converged)


def _make_hidden_layer(classifier: Classifier, penalty: float, count: int) -> MLPClassifier:
    return MLPClassifier(
        (classifier.hidden,),
        activation="logistic",
        # scikit-learn divides alpha by the sentences of a batch
        alpha=penalty * min(BATCH, count),
        batch_size=cast(Any, min(BATCH, count)),  # a number or "auto"; scikit-learn's type hint has the latter only
        learning_rate_init=1e-2,
        max_iter=EPOCHS,
        # sigmoids stay on a plateau for a while
        n_iter_no_change=30,
        random_state=classifier.seed,
    )
