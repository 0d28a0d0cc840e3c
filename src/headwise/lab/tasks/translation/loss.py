"""How likely a model finds the references: the loss of An et al. 2020, Figure 3b.

Owns the negative log likelihood of a split. Must not know scores of translations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from headwise.lab.data.batching import batch_by_tokens
from headwise.lab.tasks.translation.data import TranslationSplit, collate
from headwise.lab.tasks.translation.model import IGNORED, PADDING

TOKENS = 4_096


def negative_log_likelihood(model: Any, split: TranslationSplit) -> float:
    """Return -(1 / T) sum_t log p(y_t | y_<t, x) over the T target tokens of a split, in nats, ends of lines included.

    Label smoothing is no part of it.

    Args:
        model: A model whose forward takes a collated batch and returns logits, in evaluation mode.
        split: The pairs.
    """
    losses, tokens = pair_losses(model, split).sum(axis=0)
    return float(losses / tokens)


@torch.no_grad()
def pair_losses(model: Any, split: TranslationSplit) -> NDArray[np.float64]:
    """Return for each pair -sum_t log p(y_t | y_<t, x) over its target tokens, and how many they are, [N, 2].

    Args:
        model: As for `negative_log_likelihood`.
        split: The pairs.
    """
    device = next(model.parameters()).device
    found = np.zeros((len(split), 2))
    for batch in batch_by_tokens(split.lengths, tokens=max(int(split.lengths.max()), TOKENS)):
        examples = collate([split[int(index)] for index in batch])
        tensors = {name: tensor.to(device) for name, tensor in examples.items()}
        labels = tensors["labels"]
        logits = model(**tensors, attention_mask=(tensors["input_ids"] != PADDING).long()).logits
        losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
        found[batch, 0] = losses.view_as(labels).double().sum(dim=1).cpu().numpy()
        found[batch, 1] = (labels != IGNORED).sum(dim=1).cpu().numpy()
    return found
