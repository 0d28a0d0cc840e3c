"""What pruning half of the heads of a trained MiniLM costs: score, size and time, by several ways to choose.

The score is 100 times Spearman's rank correlation of cosines with the gold similarities of STS-B. Heads are weighed on
pairs of the training set, and the score is that of dev, which chooses nothing (the labels of the test set are not
published); that of its first 500 pairs is kept too. Recovery trains on the training set; the whole model gets the same
steps. What is left is also trained for as many steps, on the same sentences without their labels, towards the states of
the whole model; and so is a model of the same size with new weights. Where Torch-Pruning is installed, it cuts the same
number of heads, weighed by its importances on the same losses.
Run by `make bench NAME=real_models ARGS="--data FOLDER"`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
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
# Pairs at the start of dev.
FIRST = 500
# Ways whose models are trained again.
TRAINED = ("whole", "half, first order", "half, Torch-Pruning, Taylor", "half, at random")
Weigh = Callable[[hw.Heads], Any]


def compare(task: Task, encoded: Sequence[dict[str, Tensor]]) -> Tensor:
    """Return the cosines of the embeddings of pairs."""
    first, second = map(task.embed, encoded)
    return F.cosine_similarity(first, second)


def score(task: Task) -> tuple[float, float]:
    """Return 100 times Spearman's correlation of the cosines with the gold similarities, of all pairs and the first."""
    task.model.eval()
    with torch.no_grad():
        cosines = torch.cat([compare(task, encoded) for encoded, _ in task.batches])
    gold = torch.cat([gold for _, gold in task.batches])
    return 100 * correlate(cosines, gold), 100 * correlate(cosines[:FIRST], gold[:FIRST])


def prune(weigh: Weigh, task: Task, rounds: Sequence[float] = ROUNDS) -> None:
    """Cut heads by their worth, in rounds."""
    sizes = [site.num_heads for site in hw.find_heads(task.model)]
    for share in rounds:
        heads = hw.find_heads(task.model)
        before = [site.num_heads for site in heads]
        kept = {round(size * share) / now for size, now in zip(sizes, before, strict=True)}
        hw.prune(heads, keep=kept.pop(), importance=weigh(heads))


def prune_by_torch_pruning(importance: str, weighed: Task, task: Task) -> None:
    """Cut heads of a BERT with Torch-Pruning, in one step."""
    library: Any = importlib.import_module("torch_pruning")
    model: Any = task.model.eval()
    weighed.model = model
    for losses in weighed.losses():
        losses.sum().backward()
    attentions = [module for module in model.modules() if hasattr(module, "num_attention_heads")]
    maps = [getattr(one, name) for one in attentions for name in ("query", "key", "value")]
    kinds = library.importance
    pruner = library.pruner.BasePruner(
        model,
        dict(weighed.batches[0][0][0]),
        importance={"Taylor": kinds.GroupTaylorImportance, "magnitude": kinds.GroupMagnitudeImportance}[importance](),
        num_heads=dict.fromkeys(maps, attentions[0].num_attention_heads),
        # a ratio of channels of 0 turns the pruning of heads off too
        pruning_ratio=1 - KEEP,
        head_pruning_ratio=1 - KEEP,
        prune_num_heads=True,
        prune_head_dims=False,
        ignored_layers=[one for one in model.modules() if isinstance(one, nn.Linear) and one not in maps],
        output_transform=lambda output: output.last_hidden_state,
    )
    pruner.step()
    for one in attentions:
        one.num_attention_heads, one.all_head_size = pruner.num_heads[one.query], one.query.out_features
    model.zero_grad()


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


def list_ways(weighed: Task, seeds: Sequence[int]) -> dict[str, list[Callable[[Task], object]]]:
    """Return the ways to make a model smaller, at random once for each seed."""

    def first_order(heads: hw.Heads) -> Any:
        weighed.model = heads.model.eval()
        return hw.importance(heads, weighed.losses, method="first_order")

    def redundancy(heads: hw.Heads) -> Any:
        weighed.model = heads.model.eval()
        return measure_redundancy(weighed, heads)

    def at_random(seed: int) -> Callable[[hw.Heads], Any]:
        generator = torch.Generator().manual_seed(seed)
        return lambda heads: {site.name: torch.rand(site.num_heads, generator=generator) for site in heads}

    ways: dict[str, list[Callable[[Task], object]]] = {
        "whole": [lambda _task: None],
        "half, first order": [partial(prune, first_order)],
        "half, first order, one round": [partial(prune, first_order, rounds=(KEEP,))],
        "half, redundancy": [partial(prune, redundancy)],
        "half, at random": [partial(prune, at_random(seed)) for seed in seeds],
    }
    if importlib.util.find_spec("torch_pruning") is not None:
        for kind in ("Taylor", "magnitude"):
            ways[f"half, Torch-Pruning, {kind}"] = [partial(prune_by_torch_pruning, kind, weighed)]
    return ways


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


def score_distilled(task: Task, train: Task, model: nn.Module, whole: nn.Module, steps: int, seed: int) -> Any:
    """Return the scores of a copy of a model after that."""
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

    seeds = range(arguments.seeds)
    ways = list_ways(weighed, seeds)
    rows, models = {}, {}
    for name, choices in track(ways.items(), "pruning MiniLM", console=console):
        scores: dict[str, list[tuple[float, float]]] = {"score": []}
        for choice in choices:
            test.model = deepcopy(whole)
            choice(test)
            scores["score"].append(score(test))
            models[name] = deepcopy(test.model).eval()
            # a way without a seed of its own is trained with every seed
            one = [len(scores["score"]) - 1]
            for seed in () if name not in TRAINED else (seeds if len(choices) == 1 else one):
                test.model = deepcopy(models[name])
                recover(test, train, arguments.steps, seed)
                scores.setdefault("recovered", []).append(score(test))
                learn = partial(score_distilled, test, train, whole=whole, steps=arguments.steps, seed=seed)
                scores.setdefault("distilled", []).append(learn(model=models[name]))
                if name == "half, first order":
                    fresh = draw_anew(deepcopy(models[name]), seed)
                    scores.setdefault("distilled from new weights", []).append(learn(model=fresh))
        rows[name] = {key: [every for every, _ in found] for key, found in scores.items()}
        rows[name][f"first {FIRST} pairs"] = {key: [first for _, first in found] for key, found in scores.items()}
        rows[name]["parameters"] = sum(parameter.numel() for parameter in models[name].parameters())
    encoded = test.batches[0][0][0]
    works = {name: (lambda model=model: model(**encoded)) for name, model in models.items()}
    _, seconds = interleaved_clocks(CPU, works, arguments.rounds, "timing")
    for name, row in rows.items():
        row["time"] = ratio(seconds, name, "whole")
        means = ", ".join(f"{key} {describe(found)}" for key, found in row.items() if isinstance(found, list))
        size = f"{row['parameters'] / 1e6:.1f} million parameters, {row['time']:.2f} of the time"
        console.print(f"{name}: {means}; {size}", soft_wrap=True)
    record |= {"keep": KEEP, "pairs": len(test.batches), "steps": arguments.steps, "seeds": arguments.seeds}
    record["models"] = {"MiniLM": rows}
    write(record, CPU, arguments.out)


if __name__ == "__main__":
    main()
