"""A classifier's predictions and cross entropies on a whole split, in batches of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headwise.lab.data.batching import batch_by_length

# Evaluation batch size.
BATCH = 256

# From the indices of some items of a split to their logits [B, classes].
Logits = Callable[[NDArray[np.int64]], Tensor]


def predict_classes(logits: Logits, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the likeliest class of each item of a split, [N], in the split's order.

    >>> predict_classes(lambda places: torch.eye(3)[places], np.array([5, 2, 9])).tolist()
    [0, 1, 2]
    """
    predicted = np.zeros(len(lengths), dtype=np.int64)
    for places in _batches(lengths):
        predicted[places] = logits(places).argmax(dim=-1).cpu().numpy()
    return predicted


def compute_cross_entropies(
    logits: Logits, lengths: NDArray[np.int64], labels: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Return the cross entropy of each item of a split and 1, [N, 2], in the split's order.

    >>> alike = lambda places: torch.zeros(len(places), 2)
    >>> compute_cross_entropies(alike, np.array([5, 2]), np.array([0, 1])).round(3).tolist()
    [[0.693, 1.0], [0.693, 1.0]]
    """
    found = np.ones((len(lengths), 2))
    for places in _batches(lengths):
        answered = logits(places)
        right = torch.from_numpy(labels[places].astype(np.int64)).to(answered.device)
        found[places, 0] = F.cross_entropy(answered, right, reduction="none").cpu().numpy()
    return found


def _batches(lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    return (np.asarray(batch, dtype=np.int64) for batch in batch_by_length(lengths, BATCH))
