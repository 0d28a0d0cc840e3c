"""Cloze items: the last word of a sentence of held-out text, after what stands before it in its row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headwise.texts.batching import to_device
from headwise_lab.experiment.evaluation import spread_evenly
from headwise_lab.tasks.lm.data import Rows
from headwise_lab.tasks.lm.tokens import TextTokens

MOST, TOGETHER = 256, 32
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
    chosen = spread_evenly(len(rows), 4 * MOST).tolist()
    found = (_find_item(rows.ids(number), words) for number in chosen)
    return list(islice((item for item in found if item is not None), MOST))


def score_cloze(model: Any, items: list[ClozeItem], padding: int) -> dict[str, float]:
    """Return the share of items of which every token of the word is the likeliest one, in percent; none without items.

    This is the accuracy of LAMBADA (Paperno et al. 2016) as models of subwords are scored on it.
    """
    if not items:
        return {}
    right = [
        one for first in range(0, len(items), TOGETHER) for one in _answer(model, items[first:][:TOGETHER], padding)
    ]
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
