"""Tasks whose model classifies: predictions and cross entropies on a whole split, in batches of similar length."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headwise.lab.data.batching import LengthBatches, batch_by_length, to_device
from headwise.lab.experiment.evaluation import spread_batches, spread_evenly
from headwise.lab.experiment.task import Answers, Task

# Evaluation batch size.
BATCH = 256

# From the indices of some items of a split to their logits [B, classes].
Logits = Callable[[NDArray[np.int64]], Tensor]


class ClassifierTask(Task):
    """A task whose model returns the "logits" of a batch of items; a split has their `lengths` and `labels`.

    Attributes:
        probed: Maximum number of dev items for measures of heads.
        probe_batch: Batch size for these.
    """

    probed = 256
    probe_batch = BATCH

    def batches(self, data: Any, scale: Any, seed: int) -> LengthBatches:
        """Return batches of items of similar length."""
        return LengthBatches(data.train.lengths, batch_size=scale.batch_size, seed=seed)

    def on_test(self, model: Any, data: Any) -> Answers:
        """Return the predicted classes and whether they are right."""
        predicted = self.predict(model, data.test)
        return Answers(predicted == data.test.labels, predicted)

    def losses(self, model: Any, data: Any) -> NDArray[np.float64]:
        """Return the cross entropy of each test item, and 1."""
        split = data.test
        return compute_cross_entropies(lambda places: self.logits(model, split, places), split.lengths, split.labels)

    def dev_losses(self, model: Any, data: Any) -> Iterator[Tensor]:
        """Yield the cross entropy of one dev item at a time, which may be several rows to attention."""
        for place in spread_evenly(len(data.dev), self.probed):
            answered = self.logits(model, data.dev, np.array([place]))
            right = torch.tensor([int(data.dev.labels[place])], device=answered.device)
            yield F.cross_entropy(answered, right, reduction="none")

    def probe(self, model: Any, data: Any) -> Iterator[None]:
        """Run the model on dev items, one batch per item of the iterator."""
        for places in spread_batches(data.dev.lengths, self.probed, self.probe_batch):
            self.logits(model, data.dev, places)
            yield

    def predict(self, model: Any, split: Any) -> NDArray[np.int64]:
        """Return the predicted class of each item of a split, [N], in the split's order."""
        return predict_classes(lambda places: self.logits(model, split, places), split.lengths)

    def logits(self, model: Any, split: Any, places: NDArray[np.int64]) -> Tensor:
        """Return the logits of some items of a split."""
        batch = to_device(self.collate([split[int(place)] for place in places]), model)
        return model(**{name: tensor for name, tensor in batch.items() if name != "labels"})["logits"]


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
