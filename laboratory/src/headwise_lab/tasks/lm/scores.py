"""How well a language model predicts held-out text: per token, per byte, by what it has read before, and last words."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headwise.texts.batching import to_device
from headwise_lab.experiment.evaluation import Likelihood, spread_evenly
from headwise_lab.experiment.task import Answers
from headwise_lab.packed_text.shards import stack_rows
from headwise_lab.tasks.lm.data import Rows, TextRow
from headwise_lab.tasks.lm.tokens import TextTokens
from headwise_lab.training.processes import IGNORED

# Tokens of an evaluation batch.
TOGETHER = 4_096


def compute_token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log p of each predicted token, 0 where none is, [B, T - 1].

    Args:
        logits: Of every position, [B, T, V].
        labels: Tokens, not shifted, -100 where none is predicted, [B, T].
    """
    ahead = labels[:, 1:]
    flat = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ahead.flatten(), reduction="none", ignore_index=IGNORED
    )
    return flat.view_as(ahead)


def score_batches(model: Any, rows: Rows) -> Iterator[tuple[list[TextRow], NDArray[np.float64]]]:
    """Yield the rows of a split in order, batch by batch, with the losses of their tokens, [B, T - 1]."""
    size = max(1, TOGETHER // rows.length)
    for first in range(0, len(rows), size):
        chosen = [rows[number] for number in range(first, min(first + size, len(rows)))]
        batch = to_device(stack_rows(chosen), model)
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])["logits"]
        yield chosen, compute_token_losses(logits, batch["labels"]).double().cpu().numpy()


def score_rows(model: Any, rows: Rows, words: TextTokens) -> Answers:
    """Return a model's predictions on a split, with the statistics of `metrics.Likelihood`, per token.

    Measures are the loss and perplexity per token; the perplexity and bits per byte of text, which do not depend on the
    tokenizer; "loss_context_N", the mean loss of tokens before which a model has seen N to 2 N - 1 tokens of their
    document; and "context_gain", that of the first power of two from 8 on (or the longest below) less that of the
    longest context.
    """
    sums, counts, predicted = [], [], []
    text = 0
    # context of c tokens falls in bin floor(log2 c)
    by_context = np.zeros((2, 1 + int(math.log2(rows.length))))
    for chosen, losses in score_batches(model, rows):
        labels = np.stack([row.labels[1:] for row in chosen])
        real = labels != IGNORED
        text += int(words.bytes[labels[real]].sum())
        bins = np.log2(np.stack([row.position_ids[:-1] for row in chosen])[real] + 1).astype(np.int64)
        np.add.at(by_context[0], bins, losses[real])
        np.add.at(by_context[1], bins, 1.0)
        sums.append(losses.sum(axis=1))
        counts.append(real.sum(axis=1).astype(np.float64))
        # one number per row that tells predictions apart
        predicted += [zlib.crc32(np.round(1e3 * row).astype(np.int32).tobytes()) for row in losses]
    statistics = np.stack([np.concatenate(sums), np.concatenate(counts)], axis=1)
    measures = describe_losses(statistics, text) | describe_contexts(*by_context)
    return Answers(statistics, np.array(predicted, dtype=np.int64), measures)


def describe_losses(statistics: NDArray[np.float64], text: int) -> dict[str, float]:
    """Return loss and perplexity per token and per byte.

    Args:
        statistics: Sum of losses and number of tokens of each row, [N, 2].
        text: Bytes of text that the tokens stand for.

    >>> found = describe_losses(np.array([[2.0, 4.0], [4.0, 4.0]]), 16)
    >>> found["loss"], round(found["perplexity"], 3), round(found["bits_per_byte"], 3)
    (0.75, 2.117, 0.541)
    """
    total, tokens = statistics.sum(axis=0)
    found = {"loss": total / tokens, "perplexity": _exp(total / tokens)}
    if text:
        found |= {"bits_per_byte": total / text / math.log(2), "byte_perplexity": _exp(total / text)}
    return {name: float(value) for name, value in found.items()}


def describe_contexts(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean loss of each bin of contexts that has tokens, and the gain of the longest.

    >>> describe_contexts(np.array([8.0, 0.0, 6.0]), np.array([2.0, 0.0, 3.0]))
    {'loss_context_1': 4.0, 'loss_context_4': 2.0, 'context_gain': 2.0}
    """
    seen = {2**number: float(sums[number] / counts[number]) for number in np.flatnonzero(counts).tolist()}
    short = max((size for size in seen if size <= 8), default=0)
    if short == max(seen, default=0):
        short = min(seen, default=0)
    found = {f"loss_context_{size}": loss for size, loss in seen.items()}
    return found | ({"context_gain": seen[short] - seen[max(seen)]} if len(seen) > 1 else {})


def score_unigrams(train: Rows, rows: Rows, words: TextTokens, most: int) -> Answers:
    """Return the likelihoods of predicting each token by its frequency in training.

    p(token) = (count + 1) / (tokens + V) over the predicted tokens of at most `most` training rows.
    """
    counts = np.ones(words.vocabulary_size)
    for number in range(min(most, len(train))):
        predicted = train[number].labels[1:]
        counts += np.bincount(predicted[predicted != IGNORED], minlength=words.vocabulary_size)
    losses = np.log(counts.sum()) - np.log(counts)
    labels = [rows[number].labels[1:] for number in range(len(rows))]
    kept = [one[one != IGNORED] for one in labels]
    statistics = np.array([[losses[one].sum(), len(one)] for one in kept])
    measures = describe_losses(statistics, int(sum(words.bytes[one].sum() for one in kept)))
    return Answers(statistics, np.zeros(len(statistics), dtype=np.int64), measures)


def compute_likelihood(statistics: NDArray[np.float64]) -> float:
    """Return the geometric mean of the probability of the next token."""
    return float(Likelihood().values(statistics).mean())


def _exp(value: float) -> float:
    # a model that has diverged has the largest number there is
    return math.exp(min(value, 700.0))


ITEMS, AT_ONCE = 256, 32
# Words before the one that is left out.
BEFORE = 8
# A point after one of these ends no sentence, nor does one before a small letter of the same line.
TITLES = "Mr|Mrs|Ms|Dr|St|Mt|Prof|Gen|Col|Capt|Lt|Sgt|Rev|Hon|Messrs|Mme|Mlle|Jr|Sr|vs|etc|cf|al|No|Vol|Fig"
LAST_WORD = re.compile(rf"(?<=\s)(?!(?:{TITLES})\s?\.)([^\W\d_]{{2,}})(?=\s?[.!?](?:\s*$|\s*\n|\s+(\S)))")


@dataclass(frozen=True)
class ClozeItem:
    """A text without its last word.

    Attributes:
        ids: Its tokens, the document's start and the word included.
        first: Where the word begins.
    """

    ids: tuple[int, ...]
    first: int


def find_last_words(text: str) -> list[re.Match[str]]:
    """Return the last word of each sentence of a text.

    >>> [match[1] for match in find_last_words("so said Mr. Ox the elder. à la fin she slept. Then")]
    ['slept']
    """
    return [match for match in LAST_WORD.finditer(text) if not (match[2] or "").islower()]


def find_items(rows: Rows, words: TextTokens) -> list[ClozeItem]:
    """Return at most 256 items from rows spread evenly, at most one a row: the last word that ends a sentence in it.

    Words have at least two letters and eight words before them in the same document.
    """
    chosen = spread_evenly(len(rows), 4 * ITEMS).tolist()
    found = (_find_item(rows.ids(number), words) for number in chosen)
    return list(islice((item for item in found if item is not None), ITEMS))


def score_cloze(model: Any, items: list[ClozeItem], padding: int) -> dict[str, float]:
    """Return the share of items of which every token of the word is the likeliest one, in percent; none without items.

    This is the accuracy of LAMBADA (Paperno et al. 2016) as models of subwords are scored on it.
    """
    if not items:
        return {}
    right = [one for first in range(0, len(items), AT_ONCE) for one in _answer(model, items[first:][:AT_ONCE], padding)]
    return {"cloze": 100 * sum(right) / len(right), "cloze_items": float(len(right))}


def _answer(model: Any, items: list[ClozeItem], padding: int) -> Iterator[bool]:
    longest = max(len(item.ids) for item in items)
    # what follows a word does not change what was said before it
    ids = torch.tensor([[*item.ids, *[padding] * (longest - len(item.ids))] for item in items])
    said = model(**to_device({"input_ids": ids}, model))["logits"].argmax(dim=-1).cpu()
    for item, row in zip(items, said, strict=True):
        yield row[item.first - 1 : len(item.ids) - 1].tolist() == list(item.ids[item.first :])


def _find_item(row: NDArray[np.int64], words: TextTokens) -> ClozeItem | None:
    documents = np.split(row, np.flatnonzero(row == words.start))
    text = words.decode(max(documents, key=len).tolist())
    matches = [match for match in find_last_words(text) if len(text[: match.start()].split()) >= BEFORE]
    if not matches:
        return None
    before, whole = text[: matches[-1].start()].rstrip(), text[: matches[-1].end()]
    context, ids = words.encode_batch([before, whole])
    # where the word's tokens begin is not known if it changes those before it
    if ids[: len(context)] != context or len(ids) == len(context):
        return None
    kept = ids[-(len(row) - 1) :]
    return ClozeItem((words.start, *kept), 1 + len(kept) - (len(ids) - len(context)))
