"""How well a pre-trained discriminator tells which tokens its generator replaced.

Masks and the noise of replacements are the same in every evaluation.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.texts.batching import to_device
from headwise_lab.experiment.seeding import derive_key
from headwise_lab.experiment.task import Answers
from headwise_lab.packed_text.shards import stack_rows
from headwise_lab.tasks.pretraining.data import Rows

# Evaluation batch size.
BATCH = 64
# Outputs of the model that scores are made of.
OUTPUTS = ("logits", "replaced", "losses", "generator_losses", "filled")


def score_batches(model: Any, rows: Rows) -> Iterator[dict[str, Tensor]]:
    """Yield the model's outputs on the rows of a split in order, batch by batch."""
    for first in range(0, len(rows), BATCH):
        batch = stack_rows([rows[number] for number in range(first, min(first + BATCH, len(rows)))])
        # the same noise for every model: an arm differs by its generator's probabilities
        yield model(**to_device(batch, model), sampling_seed=derive_key("replacements", first))


def score_rows(model: Any, rows: Rows) -> Answers:
    """Return a model's predictions on a split, with the statistics of `metrics.Auc`."""
    found = [{name: _to_numpy(out[name]) for name in OUTPUTS} for out in score_batches(model, rows)]
    outputs = {name: np.concatenate([one[name] for one in found]) for name in OUTPUTS}
    scores, replaced = outputs["logits"], outputs["replaced"]
    # one number per row that tells predictions apart
    predicted = np.array([zlib.crc32(np.round(1e3 * row).astype(np.int32).tobytes()) for row in scores], dtype=np.int64)
    measures = {
        "discriminator_loss": float(outputs["losses"].mean()),
        "generator_loss": float(outputs["generator_losses"].mean()),
        "generator_accuracy": 100 * float(outputs["filled"].mean()),
        "replaced": 100 * float(replaced.mean()),
    }
    return Answers(compute_placements(scores, replaced), predicted, measures)


def compute_placements(scores: NDArray[np.floating], replaced: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return [placements of replaced, replaced, placements of original, original] of each row, [N, 4].

    Args:
        scores: How sure the discriminator is that a token was replaced, [N, T].
        replaced: Whether it was, [N, T].

    >>> compute_placements(np.array([[2.0, 1.0, 3.0]]), np.array([[True, False, False]])).tolist()
    [[0.5, 1.0, 1.0, 2.0]]
    """
    placed = np.zeros(scores.shape)
    for kind, side in ((replaced, 1.0), (~replaced, -1.0)):
        others = np.sort(side * scores[~kind])
        own = side * scores[kind]
        below = np.searchsorted(others, own, side="left") + np.searchsorted(others, own, side="right")
        placed[kind] = below / (2 * max(1, len(others)))
    columns = (placed * replaced, replaced, placed * ~replaced, ~replaced)
    return np.stack([column.sum(axis=1) for column in columns], axis=1).astype(np.float64)


def compute_losses(model: Any, rows: Rows) -> NDArray[np.float64]:
    """Return the sum of the discriminator's losses and the number of tokens of each row, [N, 2]."""
    sums = np.concatenate([_to_numpy(out["losses"].double().sum(dim=1)) for out in score_batches(model, rows)])
    return np.stack([sums, np.full(len(sums), float(rows.length))], axis=1)


def _to_numpy(tensor: Tensor) -> NDArray:
    return tensor.detach().to(torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype).cpu().numpy()
