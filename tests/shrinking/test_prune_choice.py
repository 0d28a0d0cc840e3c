"""A share of the heads stays: as many in every attention, and those that matter most."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headwise as hw
from heads.families import FAMILIES
from headwise.heads.ablation import Importance
from headwise.shrinking.prune import choose_heads
from shrinking.cutting import ablated, apart, compute, named
from shrinking.planted import build, tokens


def worth_of(heads: hw.Heads, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {site.name: torch.rand(site.num_heads, generator=generator) for site in heads}


@pytest.mark.parametrize(("keep", "left"), [(0.5, 2), (0.7, 3), (0.2, 1), (0.01, 1)])
def test_the_heads_that_matter_least_go(keep: float, left: int):
    family = named(FAMILIES, "BERT")[0]
    model = family.build()
    heads = hw.find_heads(model)
    worth = worth_of(heads)
    gone = {name: tuple(sorted(numbers.argsort()[: 4 - left].tolist())) for name, numbers in worth.items()}
    expected = ablated(heads, gone, family.inputs())
    pruning = hw.prune(heads, keep=keep, importance=worth)
    assert pruning.removed == gone
    assert list(pruning.heads.values()) == [left] * 2
    assert apart(expected, compute(model, family.inputs())) < 1e-5


def test_importance_as_it_was_measured_chooses_and_transformers_loads_the_result():
    model = build("Llama", 8)
    heads = hw.find_heads(model)

    def losses() -> torch.Tensor:
        logits = model(tokens(0)).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.mT, tokens(0)[:, 1:], reduction="none").mean(1)

    worth = hw.importance(heads, losses, method="first_order")
    pruning = hw.prune(heads, keep=0.25, importance=worth)
    assert pruning.stock is None
    for name, gone in pruning.removed.items():
        left = [head for head in range(8) if head not in gone]
        assert len(left) == 2
        assert worth.drops[name][left].min() > worth.drops[name][list(gone)].max()


def test_groups_go_as_a_whole_by_the_sum_of_their_heads():
    heads = hw.find_heads(build("Llama", 4))
    worth = {site.name: torch.tensor([9.0, 0, 4, 4, 1, 1, 5, 5]) for site in heads}
    assert choose_heads(heads, 0.5, worth)["model.layers.0.self_attn"] == [2, 3, 4, 5]
    # the heads of the only group go one by one
    heads = hw.find_heads(build("Llama", 1))
    assert choose_heads(heads, 0.5, {site.name: torch.arange(8) for site in heads})["model.layers.1.self_attn"] == [
        *range(4)
    ]


def test_layers_that_share_a_table_of_positions_lose_the_same_heads():
    family = named(FAMILIES, "T5")[0]
    model = family.build()
    heads = hw.find_heads(model)
    worth = {site.name: torch.tensor([3.0, 1, 2, 4]) for site in heads}
    worth["encoder.block.1.layer.0.SelfAttention"] = torch.tensor([0.0, 5, 5, 0])
    removed = hw.prune(heads, keep=0.5, importance=worth).removed
    assert removed["encoder.block.0.layer.0.SelfAttention"] == (0, 3)
    assert removed["encoder.block.1.layer.0.SelfAttention"] == (0, 3)
    assert removed["decoder.block.1.layer.0.SelfAttention"] == (1, 2)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, hw.errors.SettingError, "expected either the heads to remove, or keep"),
        ({"removed": {0: [1]}, "keep": 0.5}, hw.errors.SettingError, "expected either"),
        ({"removed": {0: [1]}, "importance": {}}, hw.errors.SettingError, "expected either"),
        ({"keep": 0.5}, hw.errors.SettingError, "keep needs importance"),
        ({"keep": 0.0, "importance": {}}, hw.errors.SettingError, "keep is 0.0; expected a finite number"),
        ({"keep": 1.2, "importance": {}}, hw.errors.SettingError, "keep is 1.2"),
        ({"keep": 0.95, "importance": "even"}, hw.errors.SettingError, "no attention would lose a head"),
        ({"keep": 0.5, "importance": {"other": [1.0]}}, hw.errors.SettingError, "has no entry 'encoder.layer.0"),
        ({"keep": 0.5, "importance": "short"}, hw.errors.ShapeError, r"has shape \(3,\); expected \(4,\)"),
        (
            {"keep": 0.5, "importance": "named"},
            hw.errors.SettingError,
            r"is \['a', 'b', 'c', 'd'\]; expected 4 numbers",
        ),
        (
            {"keep": 0.5, "importance": "empty"},
            hw.errors.SettingError,
            "is None; expected 4 numbers, one for each head",
        ),
        ({"keep": 0.5, "importance": "endless"}, hw.errors.HeadwiseError, "holds NaN or infinity"),
    ],
)
def test_what_is_no_choice_is_refused(given: dict[str, Any], error: type, message: str):
    heads = hw.find_heads(named(FAMILIES, "BERT")[0].build())
    numbers: dict[str, Any] = {
        "named": [*"abcd"],
        "empty": None,
        "even": [1.0] * 4,
        "short": [1.0] * 3,
        "endless": [float("nan")] * 4,
    }
    if isinstance(given.get("importance"), str):
        given = {**given, "importance": {site.name: numbers[given["importance"]] for site in heads}}
    with pytest.raises(error, match=message):
        hw.prune(heads, **given)


def test_the_result_of_importance_is_taken_by_name():
    heads = hw.find_heads(named(FAMILIES, "BERT")[0].build())
    worth = worth_of(heads)
    assert choose_heads(heads, 0.5, Importance(0.0, worth)) == choose_heads(heads, 0.5, worth)
