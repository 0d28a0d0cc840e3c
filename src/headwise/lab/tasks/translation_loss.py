"""How likely a model finds the references: the loss of An et al. 2020, Figure 3b.

Owns the negative log likelihood of a split. Must not know scores of translations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from headwise.lab.models.seq2seq import IGNORED, PADDING
from headwise.lab.tasks.translation_data import TranslationSplit, collate
from headwise.lab.token_batches import token_sorted

__all__ = ["negative_log_likelihood"]

TOKENS = 4_096


@torch.no_grad()
def negative_log_likelihood(model: Any, split: TranslationSplit) -> float:
    """Return -(1 / T) sum_t log p(y_t | y_<t, x) over the T target tokens of a split, in nats, ends of lines included.

    Label smoothing is no part of it.

    Args:
        model: A model whose forward takes a collated batch and returns logits, in evaluation mode.
        split: The pairs.
    """
    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    for batch in token_sorted(split.lengths, tokens=max(int(split.lengths.max()), TOKENS)):
        examples = collate([split[int(index)] for index in batch])
        tensors = {name: tensor.to(device) for name, tensor in examples.items()}
        labels = tensors["labels"]
        logits = model(**tensors, attention_mask=(tensors["input_ids"] != PADDING).long()).logits
        losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        total += float(losses)
        tokens += int((labels != IGNORED).sum())
    return total / tokens
