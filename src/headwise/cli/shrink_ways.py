"""Ways to choose the heads that stay: by exact costs, to first order, by redundancy, or at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from headwise.cli.shrink_subject import Subject
from headwise.heads.ablation import ablate, importance
from headwise.heads.heads import Heads
from headwise.report.measure import measure
from headwise.shrinking.prune import choose_heads

EXACT, FIRST, REDUNDANCY, RANDOM = "removed one by one", "first order", "redundancy", "random"
# What --by takes.
WAYS = {"exact": EXACT, "first-order": FIRST, "redundancy": REDUNDANCY, "random": RANDOM}
SHARES = (0.75, 0.5, 0.25)
DRAWS = 3
# What each head is worth, by the name of its attention.
Worth = Mapping[str, Tensor]


def weigh_heads(subject: Subject, advance: Callable[[int, int], None]) -> dict[str, list[Worth]]:
    """Return what each head is worth in each way; of random choices several draws."""
    heads = subject.heads
    report = measure(
        heads,
        subject.chosen,
        score=subject.score_measured(),
        forward=subject.run,
        advance=advance,
    )
    found: dict[str, list[Worth]] = {
        EXACT: [{layer.site: torch.tensor([drop.value for drop in layer.drops]) for layer in report.layers}],
        FIRST: [importance(heads, subject.estimate, method="first_order").drops],
    }
    pairs = {layer.site: layer.pairs.get("contribution_cka") for layer in report.layers}
    if all(pairs.values()):
        found[REDUNDANCY] = [{site: torch.tensor(rank_unlike(each or ())) for site, each in pairs.items()}]
    generator = torch.Generator().manual_seed(0)
    found[RANDOM] = [
        {site.name: torch.rand(site.num_heads, generator=generator) for site in heads} for _ in range(DRAWS)
    ]
    return found


def rank_unlike(pairs: Sequence[Sequence[float]]) -> list[float]:
    """Return the step at which each head of a layer goes, when of the two most alike one goes at each step.

    Of the two it is the one that is more like the others that are left.

    >>> rank_unlike([[1, 0.9, 0.1], [0.9, 1, 0.2], [0.1, 0.2, 1]])
    [1.0, 0.0, 2.0]
    """
    left = list(range(len(pairs)))
    steps = [float(len(pairs) - 1)] * len(pairs)
    for step in range(len(pairs) - 1):
        _, first, second = max((pairs[i][j], -i, -j) for i in left for j in left if i < j)
        gone = max((-first, -second), key=lambda head: sum(pairs[head][other] for other in left))
        steps[gone] = float(step)
        left.remove(gone)
    return steps


def score_without(subject: Subject, removed: Mapping[str, Sequence[int]]) -> float:
    """Return the score with heads ablated, which is that of the pruned model."""
    heads = subject.heads
    with ExitStack() as stack:
        for site in heads:
            if site.name in removed:
                stack.enter_context(
                    ablate(Heads(heads.model, (site,), heads.projections, heads.found), removed[site.name])
                )
        return subject.score()


def draw_curves(
    subject: Subject, ways: Mapping[str, Sequence[Worth]], keep: float
) -> dict[str, dict[float, list[float]]]:
    """Return the scores of each way over the share of heads kept, the one wanted among them."""
    heads, whole = subject.heads, subject.score()
    shares = sorted({*SHARES, keep}, reverse=True)
    curves: dict[str, dict[float, list[float]]] = {}
    for way, draws in ways.items():
        curves[way] = {1.0: [whole]}
        for share in shares:
            chosen = [choose_heads(heads, share, worth) for worth in draws]
            curves[way][share] = [score_without(subject, removed) for removed in chosen]
    return curves
