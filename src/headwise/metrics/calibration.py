"""Calibration of classifiers: reliability bins, ECE, OE, and the entropy of predictions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import SettingError, ShapeError, require_integer

BINS = 15


@dataclass(frozen=True)
class Reliability:
    """Accuracy of a classifier by confidence; `a + b` is the reliability on both sets of items.

    Bin m of M holds the items whose confidence is in ((m-1)/M, m/M]; a confidence of 0 is in the first bin.

    Attributes:
        counts: Number of items in each bin, |B_m|.
        right: Number of correct items in each bin.
        confidences: Sum of the confidences in each bin.
    """

    counts: tuple[int, ...]
    right: tuple[int, ...]
    confidences: tuple[float, ...]

    def __add__(self, other: Reliability) -> Reliability:
        if len(self.counts) != len(other.counts):
            raise SettingError(f"{len(self.counts)} and {len(other.counts)} bins were added; expected the same number.")
        return Reliability(
            tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)),
            tuple(a + b for a, b in zip(self.right, other.right, strict=True)),
            tuple(a + b for a, b in zip(self.confidences, other.confidences, strict=True)),
        )

    @property
    def bins(self) -> tuple[tuple[float, float, int], ...]:
        """Mean confidence, accuracy and number of items of each nonempty bin."""
        return tuple(
            (confidence / count, right / count, count)
            for count, right, confidence in zip(self.counts, self.right, self.confidences, strict=True)
            if count
        )

    @property
    def ece(self) -> float:
        """Expected calibration error, Σ_m |B_m|/n |acc(B_m) - conf(B_m)| (An et al. 2020, C.4; Guo et al. 2017)."""
        return self._mean([abs(accuracy - confidence) for confidence, accuracy, _ in self.bins])

    @property
    def oe(self) -> float:
        """Overconfidence error, Σ_m |B_m|/n conf(B_m) max(conf(B_m) - acc(B_m), 0) (An et al. 2020, C.4)."""
        return self._mean([confidence * max(confidence - accuracy, 0.0) for confidence, accuracy, _ in self.bins])

    def _mean(self, errors: list[float]) -> float:
        return sum(error * count for error, (_, _, count) in zip(errors, self.bins, strict=True)) / sum(self.counts)


def reliability(confidence: Tensor, correct: Tensor, *, bins: int = BINS) -> Reliability:
    """Return the accuracy of predictions by confidence.

    Args:
        confidence: Probability of the predicted class, [N], floating, in [0, 1].
        correct: Whether the prediction is correct, [N], bool.
        bins: Number M of bins of equal width.

    Raises:
        ShapeError: A tensor does not have this shape and dtype, or N is 0.
        SettingError: A confidence is not in [0, 1], or `bins` is less than 1.

    Example:
        >>> sure = reliability(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, False, True]), bins=2)
        >>> sure.counts, sure.right, round(sure.ece, 4), round(sure.oe, 4)
        ((0, 3), (0, 2), 0.1333, 0.1067)
    """
    require_integer("bins", bins, low=1)
    if confidence.dim() != 1 or not len(confidence) or not confidence.is_floating_point():
        raise ShapeError(f"confidence is {confidence.dtype} of shape {tuple(confidence.shape)}; expected floats [N].")
    if correct.shape != confidence.shape or correct.dtype != torch.bool:
        raise ShapeError(
            f"correct is {correct.dtype} of shape {tuple(correct.shape)}; expected torch.bool, one per confidence."
        )
    # rounding may push a probability slightly above 1
    slack = 8 * torch.finfo(confidence.dtype).eps
    if not ((confidence >= -slack) & (confidence <= 1 + slack)).all():
        low, high = float(confidence.min()), float(confidence.max())
        raise SettingError(f"confidence is between {low:g} and {high:g}; expected probabilities, in [0, 1].")
    sure = confidence.double().clamp(0.0, 1.0)
    inner = torch.arange(1, bins, dtype=torch.float64, device=sure.device) / bins
    places = torch.bucketize(sure, inner)
    counts = torch.bincount(places, minlength=bins)
    right = torch.bincount(places[correct], minlength=bins)
    total = torch.bincount(places, weights=sure, minlength=bins)
    return Reliability(tuple(counts.tolist()), tuple(right.tolist()), tuple(total.tolist()))


def reliability_of(probabilities: Tensor, labels: Tensor, *, bins: int = BINS) -> Reliability:
    """Return the reliability of predictive distributions, with the largest probability as confidence.

    Args:
        probabilities: [N, C]; each row sums to one.
        labels: The correct class of each item, [N], integers.
        bins: Number M of bins of equal width.

    Raises:
        ShapeError: A shape or dtype is wrong.
        SettingError: A row is not a distribution.

    Example:
        >>> reliability_of(torch.tensor([[0.55, 0.45], [0.1, 0.9]]), torch.tensor([0, 0]), bins=5).right
        (0, 0, 1, 0, 0)
    """
    _require_distributions(probabilities)
    if labels.shape != probabilities.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ShapeError(f"labels are {labels.dtype} of shape {tuple(labels.shape)}; expected one integer per row.")
    confidence, predicted = probabilities.max(dim=1)
    return reliability(confidence, predicted == labels, bins=bins)


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy of each predictive distribution, -Σ_c p_c log p_c, in nats: [N, C] -> [N] float64.

    0 for a certain prediction, and log C for a uniform one, the ideal for text of an unseen class (An et al. 2020,
    C.5).

    Raises:
        ShapeError: The shape or dtype is wrong.
        SettingError: A row is not a distribution.

    Example:
        >>> predictive_entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
        tensor([0.0000, 0.6931], dtype=torch.float64)
    """
    _require_distributions(probabilities)
    return torch.special.entr(probabilities.double().clamp_min(0.0)).sum(1)


def _require_distributions(probabilities: Tensor) -> None:
    if probabilities.dim() != 2 or not probabilities.numel() or not probabilities.is_floating_point():
        raise ShapeError(
            f"probabilities are {probabilities.dtype} of shape {tuple(probabilities.shape)}; expected floats [N, C]."
        )
    total = probabilities.double().sum(1)
    wrong = ~((total - 1).abs() <= 1e-2) | (probabilities < 0).any(1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise SettingError(f"row {row} of the probabilities sums to {float(total[row]):g}; expected softmax outputs.")
