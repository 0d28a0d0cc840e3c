"""Which heads the tests remove, and what a model computes with them ablated."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from heads.family import Family
from headwise.heads.heads import Heads, Site

Removed = dict[str, tuple[int, ...]]


def evenly(heads: Heads) -> Removed:
    """Half of the heads of each attention: every second one, the first groups, or as many heads of the only group."""
    removed = {}
    for site in heads:
        if site.key_value_heads == site.num_heads:
            removed[site.name] = tuple(range(1, site.num_heads, 2))
        elif site.key_value_heads > 1:
            removed[site.name] = tuple(range(site.num_heads // 2))
        else:
            removed[site.name] = (0, 2)
    return removed


def unevenly(heads: Heads) -> Removed:
    """Other heads in each layer, and other numbers of them; nothing of every third attention."""
    removed = {}
    for index, site in enumerate(heads):
        group = site.num_heads // site.key_value_heads
        if site.key_value_heads == 1:
            removed[site.name] = (1, 2) if index % 2 else (3, 0)
        elif index % 3 < 2:
            first = site.key_value_heads - 1 if index % 2 else 0
            removed[site.name] = tuple(range(first * group, first * group + group))
            if index % 2 and site.key_value_heads > 3:
                removed[site.name] += tuple(range(group, 2 * group))
    return removed


def lift(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make a model one of double precision, and return its inputs so."""
    model.double()
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def compute_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have code that says float32 (norms, rotations, softmax) compute in float64, where errors below 1e-7 show."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@torch.no_grad()
def compute(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The outputs of a model that are no attention weights and no cached keys."""
    found = model(**inputs)
    found = found if hasattr(found, "items") else {"output": found}
    # attention weights and caches are no tensors
    return [value for value in found.values() if isinstance(value, Tensor) and value.is_floating_point()]


def ablated(heads: Heads, removed: Removed, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What the model computes with heads ablated."""
    with ExitStack() as stack:
        for site in heads:
            if site.name in removed:
                stack.enter_context(hw.ablate(only(heads, site), removed[site.name]))
        return compute(heads.model, inputs)


def only(heads: Heads, site: Site) -> Heads:
    return Heads(heads.model, (site,), heads.projections, heads.found)


@torch.no_grad()
def apart(first: list[Tensor], second: list[Tensor]) -> float:
    """The largest difference, relative to the largest number."""
    assert [tensor.shape for tensor in first] == [tensor.shape for tensor in second]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(first, second, strict=True))


def named(families: tuple[Family, ...], *names: str) -> list[Family]:
    chosen = [family for family in families if family.name in names]
    assert len(chosen) == len(names)
    return chosen
