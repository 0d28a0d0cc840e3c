"""Heads in the place of several, as float64 loops over tokens and heads. No code is shared with `headwise.shrinking`.

Features y are a list of heads [N, e]; `readers` are, for each of them, the matrices [d, e] that read it.
"""

import itertools
import math

import torch
from torch import Tensor


def lost_energy(features: list[Tensor], readers: list[list[Tensor]], write: list[Tensor], read: list[Tensor]) -> float:
    """Sum over tokens, heads i and their readers R of |(y_i - u G_i^T) R^T|^2, with u = sum_j y_j F_j.

    >>> one = torch.tensor([[1.0]])
    >>> lost_energy([one, one], [[one], [3 * one]], [one / 2, one / 2], [one, 0 * one])
    9.0
    """
    total = 0.0
    for token in range(len(features[0])):
        shared = sum((y[token] @ f for y, f in zip(features, write, strict=True)), torch.zeros(()))
        for y, own, g in zip(features, readers, read, strict=True):
            for reader in own:
                total += float((reader @ (y[token] - g @ shared)).square().sum())
    return total


def least_lost_energy(features: list[Tensor], readers: list[list[Tensor]]) -> float:
    """The same for the best F and G: the squares of all but the first e singular values of [y_i R^T] side by side.

    >>> least_lost_energy([torch.eye(2), torch.eye(2)], [[torch.eye(2)], [2 * torch.eye(2)]])
    0.0
    """
    parts = [y @ reader.T for y, own in zip(features, readers, strict=True) for reader in own]
    values = torch.linalg.svdvals(torch.cat(parts, 1).double())
    return float(values[features[0].shape[1] :].square().sum())


def rotate(features: Tensor, position: int, rotary: int, interleaved: bool, base: float = 10000.0) -> Tensor:
    """One head [e] at a position: pair f of its first `rotary` features turned by position * base^(-2f / rotary).

    >>> rotate(torch.tensor([1.0, 0.0]), 1, 2, False).tolist() == [math.cos(1), math.sin(1)]
    True
    """
    turned = features.double().tolist()
    for pair in range(rotary // 2):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary // 2)
        angle = position * base ** (-2 * pair / rotary)
        a, b = turned[first], turned[second]
        turned[first] = a * math.cos(angle) - b * math.sin(angle)
        turned[second] = a * math.sin(angle) + b * math.cos(angle)
    return torch.tensor(turned, dtype=torch.float64)


def best_groups(similarity: Tensor, size: int) -> tuple[float, tuple[tuple[int, ...], ...]]:
    """The largest sum of similarities inside groups of one size, over ordered pairs, and the groups; by trying all.

    >>> best_groups(torch.tensor([[0.0, 1, 5, 1], [1, 0, 1, 3], [5, 1, 0, 1], [1, 3, 1, 0]]), 2)
    (16.0, ((0, 2), (1, 3)))
    """

    def complete(left: tuple[int, ...]) -> list[tuple[tuple[int, ...], ...]]:
        if not left:
            return [()]
        found = []
        for others in itertools.combinations(left[1:], size - 1):
            group = (left[0], *others)
            rest = tuple(head for head in left if head not in group)
            found += [(group, *groups) for groups in complete(rest)]
        return found

    def inside(groups: tuple[tuple[int, ...], ...]) -> float:
        return sum(float(similarity[i, j]) for group in groups for i in group for j in group if i != j)

    best = max(complete(tuple(range(len(similarity)))), key=inside)
    return inside(best), best
