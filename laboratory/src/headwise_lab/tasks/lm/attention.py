"""What the heads of a language model do: copying what came after the same token before, and resting on the first."""

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.heads.find import find_heads
from headwise.heads.taps import Taps
from headwise.metrics.patterns import induction_weights, sum_first_weights
from headwise.texts.batching import to_device
from headwise_lab.experiment.evaluation import select_with_weights, spread_evenly
from headwise_lab.experiment.seeding import derive_key
from headwise_lab.packed_text.shards import stack_rows
from headwise_lab.tasks.lm.data import Rows
from headwise_lab.tasks.lm.tokens import TextTokens

REPEATED, LONGEST = 16, 64
ROWS = 32
# Queries read at least so many tokens before; a share of heads whose mean weight is above rests there (Gu et al. 2025).
READ, RESTING = 8, 0.3
# Weights of one head that are computed together.
WEIGHTS = 1 << 17


def measure_copying(model: Any, words: TextTokens, length: int) -> dict[str, float]:
    """Return how well a model repeats random tokens, and which head looks where it must, in percent.

    Sequences are [start] r_1 .. r_L r_1 .. r_L of tokens drawn uniformly (Olsson et al. 2022). The induction score of a
    head is the mean weight from the second r_j to the first r_{j+1}, j < L: "induction" is that of the best head, and
    "induction_mean" the mean. "copied" is how often the likeliest token after the second r_j is r_{j+1}. The scores are
    those of attentions whose weights can be read, and left out where there are none.
    """
    half = min(LONGEST, (length - 1) // 2)
    ordinary = np.setdiff1d(np.arange(words.vocabulary_size), words.special)
    drawn = np.random.default_rng(derive_key("repeated tokens")).choice(ordinary, (REPEATED, half))
    ids = torch.from_numpy(np.concatenate([np.full((REPEATED, 1), words.start), drawn, drawn], axis=1))
    # [start] is at 0, the second r_j at half + j
    queries = torch.arange(half + 1, 2 * half)
    scores, right = [], []
    readable = select_with_weights(find_heads(model), lambda: model(**to_device({"input_ids": ids[:1]}, model)))
    with ExitStack() as attached:
        taps = attached.enter_context(Taps(readable, weights=True)) if len(readable) else None
        for part in ids.split(_count_together(ids.shape[1])):
            batch = to_device({"input_ids": part}, model)
            logits = model(**batch)["logits"]
            said = logits[:, queries.to(logits.device)].argmax(dim=-1).cpu()
            right.append((said == part[:, queries + 1]).double())
            if taps is not None:
                read = [one.weights for one in taps.read() if one.weights is not None]
                scores.append(torch.stack([induction_weights(weights.double().cpu(), half) for weights in read]))
    copied = {"copied": 100 * float(torch.cat(right).mean())}
    if not scores:
        return copied
    heads = torch.cat(scores, dim=1).mean(dim=(1, 3))
    return {"induction": 100 * float(heads.max()), "induction_mean": 100 * float(heads.mean()), **copied}


def measure_sinks(model: Any, rows: Rows) -> dict[str, float]:
    """Return how much attention goes to the first token of a document, in percent.

    "sink_attention" is the mean weight over heads and queries that see it, with at least 8 tokens before them, and
    "sink_heads" the share of heads whose mean weight is above 0.3. A layer whose window never reaches back so far, or
    whose weights cannot be read, is left out; nothing is returned where all are.
    """
    chosen = spread_evenly(len(rows), ROWS).tolist()
    size = _count_together(rows.length)

    def run(numbers: list[int]) -> Tensor:
        batch = stack_rows([rows[number] for number in numbers])
        given = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
        model(**to_device(given, model))
        return batch["position_ids"]

    readable = select_with_weights(find_heads(model), lambda: run(chosen[:1]))
    if not len(readable):
        return {}
    sums: list[Tensor] = []
    counts: list[Tensor] = []
    with Taps(readable, weights=True) as taps:
        for first in range(0, len(chosen), size):
            positions = run(chosen[first : first + size])
            places = torch.arange(positions.shape[1])
            firsts, read = places - positions, (positions >= READ).double()
            weights = [one.weights.cpu() for one in taps.read() if one.weights is not None]
            found, seeing = zip(*(sum_first_weights(one, firsts, read) for one in weights), strict=True)
            sums.append(torch.stack(found))
            counts.append(torch.stack(seeing))
    if not sums:
        return {}
    total, count = torch.stack(sums).sum(dim=0), torch.stack(counts).sum(dim=0)
    if not count.any():
        return {}
    mean = total[count > 0] / count[count > 0, None]
    return {"sink_attention": 100 * float(mean.mean()), "sink_heads": 100 * float((mean > RESTING).double().mean())}


def _count_together(length: int) -> int:
    return max(1, WEIGHTS // length**2)
