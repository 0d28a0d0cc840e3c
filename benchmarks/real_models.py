"""What pruning half of the heads of a trained MiniLM costs: score, size and time, by three ways to choose.

The score is 100 times Spearman's rank correlation of cosines with the gold similarities of STS-B. Heads are weighed on
pairs of the training set, and the score is that of dev, which chooses nothing
(the labels of the test set are not published). Recovery trains on the training set; the whole model
gets the same steps. What is left is also trained for as many steps, on the same sentences without their labels, towards
the states of the whole model; and so is a model of the same size with new weights.
Run by `make bench NAME=real_models ARGS="--data FOLDER"`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

import headwise as hw
from importance import Task, correlate, read_pairs
from timing import console, interleaved_clocks, new_record, ratio, write

CPU = torch.device("cpu")
KEEP = 0.5
# Heads are weighed anew after each of these shares.
ROUNDS = (5 / 6, 2 / 3, KEEP)
RATE, BATCH = 2e-5, 16


def compare(task: Task, encoded: Sequence[dict[str, Tensor]]) -> Tensor:
    """Return the cosines of the embeddings of pairs."""
    first, second = map(task.embed, encoded)
    return F.cosine_similarity(first, second)


def score(task: Task) -> float:
    """Return 100 times Spearman's correlation of the cosines with the gold similarities."""
    task.model.eval()
    with torch.no_grad():
        cosines = torch.cat([compare(task, encoded) for encoded, _ in task.batches])
    return 100 * correlate(cosines, torch.cat([gold for _, gold in task.batches]))


def prune(task: Task, worth: Callable[[hw.Heads], Any]) -> None:
    """Cut heads by their worth, in rounds."""
    sizes = [site.num_heads for site in hw.find_heads(task.model)]
    for share in ROUNDS:
        heads = hw.find_heads(task.model)
        before = [site.num_heads for site in heads]
        kept = {round(size * share) / now for size, now in zip(sizes, before, strict=True)}
        hw.prune(heads, keep=kept.pop(), importance=worth(heads))


def measure_redundancy(task: Task, heads: hw.Heads) -> dict[str, Tensor]:
    """Return the step at which each head goes where of the two most alike one goes at each step."""
    batches = [side for encoded, _ in task.batches for side in encoded]
    layers = hw.measure(heads, batches).layers
    return {layer.site: torch.tensor(rank_unlike(layer.pairs["contribution_cka"])) for layer in layers}


def rank_unlike(pairs: Sequence[Sequence[float]]) -> list[float]:
    """Return the step at which each head goes: of the two most alike, the one more like the others that are left."""
    left = list(range(len(pairs)))
    steps = [float(len(pairs) - 1)] * len(pairs)
    for step in range(len(pairs) - 1):
        _, first, second = max((pairs[i][j], -i, -j) for i in left for j in left if i < j)
        next_one = max((-first, -second), key=lambda head: sum(pairs[head][other] for other in left))
        steps[next_one] = float(step)
        left.remove(next_one)
    return steps


def recover(task: Task, train: Task, steps: int, seed: int) -> None:
    """Train on pairs of the training set."""
    order = torch.Generator().manual_seed(seed)
    train.model = task.model.train()
    optimizer = torch.optim.AdamW(train.model.parameters(), lr=RATE)
    rows: Iterator[int] = iter(())
    for _ in range(steps):
        place = next(rows, None)
        if place is None:
            rows = iter(torch.randperm(len(train.batches), generator=order).tolist())
            place = next(rows)
        encoded, gold = train.batches[place]
        optimizer.zero_grad()
        (compare(train, encoded) - gold).square().mean().backward()
        optimizer.step()


def distill(task: Task, train: Task, whole: nn.Module, steps: int, seed: int) -> None:
    """Train towards the states of the whole model, on as many sentences a step as `recover`."""
    sides = [side for encoded, _ in train.batches for side in encoded]
    hw.distill(task.model, whole, sides, steps=steps, seed=seed, gradient_accumulation_steps=2)


def score_distilled(task: Task, train: Task, model: nn.Module, whole: nn.Module, steps: int, seed: int) -> float:
    """Return the score of a copy of a model after that."""
    task.model = deepcopy(model)
    distill(task, train, whole, steps, seed)
    return score(task)


def draw_anew(model: Any, seed: int) -> Any:
    """Give a model new weights."""
    torch.manual_seed(seed)
    for module in model.modules():
        model._init_weights(module)
    return model


def describe(values: Sequence[float]) -> str:
    """Return a mean, with the least and the most of several seeds."""
    mean = statistics.fmean(values)
    return f"{mean:.2f}" if len(values) == 1 else f"{mean:.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tsv and dev.tsv of STS-B")
    parser.add_argument("--pairs", type=int, default=300, help="pairs of the training set on which heads are weighed")
    parser.add_argument("--steps", type=int, default=200, help="steps of recovery, of 16 pairs each")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of timing")
    parser.add_argument("--out", type=Path, help="the JSON record (default: a new file in benchmarks/records)")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    record = new_record("real-models", CPU)
    test = Task(read_pairs(arguments.data / "dev.tsv", 10_000), 64, CPU)
    weighed = Task(read_pairs(arguments.data / "train.tsv", arguments.pairs), 50, CPU)
    train = Task(read_pairs(arguments.data / "train.tsv", 10_000), BATCH, CPU)
    whole = deepcopy(test.model)

    def first_order(heads: hw.Heads) -> Any:
        weighed.model = heads.model.eval()
        return hw.importance(heads, weighed.losses, method="first_order")

    def redundancy(heads: hw.Heads) -> Any:
        weighed.model = heads.model.eval()
        return measure_redundancy(weighed, heads)

    def at_random(seed: int) -> Callable[[hw.Heads], Any]:
        generator = torch.Generator().manual_seed(seed)
        return lambda heads: {site.name: torch.rand(site.num_heads, generator=generator) for site in heads}

    seeds = range(arguments.seeds)
    ways: dict[str, list[Callable[[hw.Heads], Any] | None]] = {
        "whole": [None],
        "half, first order": [first_order],
        "half, redundancy": [redundancy],
        "half, at random": [at_random(seed) for seed in seeds],
    }
    rows, models = {}, {}
    for name, choices in track(ways.items(), "pruning MiniLM", console=console):
        scores, recovered, distilled = [], [], []
        for choice in choices:
            test.model = deepcopy(whole)
            if choice is not None:
                prune(test, choice)
            scores.append(score(test))
            models[name] = deepcopy(test.model).eval()
            # a way without a seed of its own is trained with every seed
            for seed in seeds if len(choices) == 1 else [len(recovered)]:
                test.model = deepcopy(models[name])
                recover(test, train, arguments.steps, seed)
                recovered.append(score(test))
                distilled.append(score_distilled(test, train, models[name], whole, arguments.steps, seed))
        size = sum(parameter.numel() for parameter in models[name].parameters())
        rows[name] = {"score": scores, "recovered": recovered, "distilled": distilled, "parameters": size}
        rows[name]["distilled from new weights"] = [
            score_distilled(test, train, draw_anew(deepcopy(models[name]), seed), whole, arguments.steps, seed)
            for seed in (seeds if choices == [first_order] else ())
        ]
    encoded = test.batches[0][0][0]
    works = {name: (lambda model=model: model(**encoded)) for name, model in models.items()}
    _, seconds = interleaved_clocks(CPU, works, arguments.rounds, "timing")
    for name, row in rows.items():
        row["time"] = ratio(seconds, name, "whole")
        console.print(
            f"{name:20} {describe(row['score']):24} after {arguments.steps} steps {describe(row['recovered']):24} "
            f"distilled {describe(row['distilled']):24} "
            f"{row['parameters'] / 1e6:.1f} million parameters, {row['time']:.2f} of the time"
        )
    record |= {"keep": KEEP, "pairs": len(test.batches), "steps": arguments.steps, "seeds": arguments.seeds}
    record["models"] = {"MiniLM": rows}
    write(record, CPU, arguments.out)


if __name__ == "__main__":
    main()
