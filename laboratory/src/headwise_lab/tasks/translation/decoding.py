"""Translations of sources by beam search, and the losses of references."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import LogitsProcessor, LogitsProcessorList

from headwise.texts.batching import batch_by_tokens, to_device
from headwise_lab.data.arrays import Ragged
from headwise_lab.data.subwords import END, PADDING, START, Subwords
from headwise_lab.tasks.translation.data import TranslationExample, TranslationSplit, collate
from headwise_lab.tasks.translation.model import IGNORED

# A target may be this many times as long as its source, and this many tokens longer.
LONGER, EXTRA = 2, 10
# Tokens of sources decoded at once, times the beams.
DECODED_TOKENS = 4_096
# Target tokens per batch when references are scored.
SCORED_TOKENS = 4_096
# A model without a table of positions has no longest source; memory has: attention grows with the square.
LONGEST = 1_024


def find_max_source_length(model: Any) -> int:
    """Return how many tokens a source may have, its end included: the model's positions, or 1,024 without a table."""
    return min(getattr(model.config, "max_position_embeddings", LONGEST), LONGEST)


@torch.no_grad()
def decode_sources(
    model: Any,
    sources: Sequence[list[int]] | Ragged,
    subwords: Subwords,
    *,
    beams: int,
    length_penalty: float,
    examples: int | None = None,
) -> list[str]:
    """Return the translation of each source as one line of text, in their order.

    Sources of similar length are decoded together, which does not change the results: a translation ends at the latest
    at twice the length of its source plus ten tokens, and its search once as many translations as beams are complete.
    A source longer than `find_max_source_length` is truncated. Padding and start are never generated.
    """
    if len(sources) == 0:
        return []
    device, longest = next(model.parameters()).device, find_max_source_length(model)
    positions = getattr(model.config, "max_position_embeddings", LONGER * LONGEST + EXTRA)
    lengths = [min(len(sources[index]), longest) for index in range(len(sources))]
    found = [""] * len(sources)
    for batch in batch_by_tokens(lengths, tokens=max(*lengths, DECODED_TOKENS // beams), examples=examples):
        rows = [{"source": _truncate(sources[index], longest), "target": [START]} for index in batch]
        ids = collate(rows)["input_ids"].to(device)  # pyright: ignore[reportArgumentType]
        limits = torch.tensor([min(LONGER * lengths[index] + EXTRA, positions) for index in batch], device=device)
        generated = model.generate(
            input_ids=ids,
            attention_mask=(ids != PADDING).long(),
            num_beams=beams,
            do_sample=False,
            **({"length_penalty": length_penalty, "early_stopping": True} if beams > 1 else {}),
            max_new_tokens=int(limits.max()),
            suppress_tokens=[PADDING, START],
            logits_processor=LogitsProcessorList([_EndInTime(limits.repeat_interleave(beams))]),
        )
        for index, row in zip(batch, generated.tolist(), strict=True):
            found[index] = _join_lines(subwords.decode(row))
    return found


def negative_log_likelihood(model: Any, split: TranslationSplit) -> float:
    """Return -(1 / T) sum_t log p(y_t | y_<t, x) over the T target tokens of a split, in nats, ends of lines included.

    Label smoothing is no part of it.
    """
    losses, tokens = compute_pair_losses(model, split).sum(axis=0)
    return float(losses / tokens)


@torch.no_grad()
def compute_pair_losses(model: Any, split: TranslationSplit) -> NDArray[np.float64]:
    """Return for each pair -sum_t log p(y_t | y_<t, x) over its target tokens, and how many they are, [N, 2]."""
    found = np.zeros((len(split), 2))
    for batch in batch_by_tokens(split.lengths, tokens=max(int(split.lengths.max()), SCORED_TOKENS)):
        sums, tokens = score_targets(model, [split[int(index)] for index in batch])
        found[batch, 0] = sums.cpu().numpy()
        found[batch, 1] = tokens.cpu().numpy()
    return found


def score_targets(model: Any, pairs: Sequence[TranslationExample]) -> tuple[Tensor, Tensor]:
    """Return -sum_t log p(y_t | y_<t, x) of the target of each pair, float64 [B], and how many tokens it has, [B].

    Pairs are cut by `truncate_pairs`.
    """
    tensors = to_device(collate(truncate_pairs(model, pairs)), model)
    labels = tensors["labels"]
    logits = model(**tensors, attention_mask=(tensors["input_ids"] != PADDING).long()).logits
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(labels).double().sum(dim=1), (labels != IGNORED).sum(dim=1)


def truncate_pairs(model: Any, pairs: Sequence[TranslationExample]) -> list[TranslationExample]:
    """Return pairs that the model can read: sources as they are translated, targets up to its positions, if any."""
    longest = find_max_source_length(model)
    positions = getattr(model.config, "max_position_embeddings", None)
    return [
        {"source": _truncate(pair["source"], longest), "target": _truncate(pair["target"], positions)} for pair in pairs
    ]


class _EndInTime(LogitsProcessor):
    """Leaves each row nothing but the end at its own limit, so that no row depends on the others."""

    def __init__(self, limits: Tensor) -> None:
        self.limits = limits

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        others = torch.ones(scores.shape[-1], dtype=torch.bool, device=scores.device)
        others[END] = False
        # the start stands before what was generated
        late = input_ids.shape[1] >= self.limits
        return scores.masked_fill(late[:, None] & others, -torch.inf)


def _truncate(tokens: list[int], longest: int | None) -> list[int]:
    return tokens if longest is None or len(tokens) <= longest else [*tokens[: longest - 1], END]


def _join_lines(text: str) -> str:
    # a vocabulary of bytes can spell the ends of lines
    return text.replace("\r", " ").replace("\n", " ")
