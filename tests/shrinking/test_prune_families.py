"""A model whose heads were removed computes what it does with them ablated, in every family, or is refused."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from cases import cases
from heads.families import FAMILIES, sweep
from heads.family import Family
from shrinking.cutting import Removed, ablated, apart, compute, compute_in_float64, evenly, lift, named, unevenly

REFUSED = {
    "BitNet": "BitNetRMSNorm before W_O, which takes all of them together",
    "Kosmos-2": "LayerNorm before W_O, which takes all of them together",
    "NeoMME": "is given value embeddings of each head",
    "Bloom": "is given ALiBi slopes of each head",
    "MPT": "is given position biases of each head",
    "WavLM": "hands its weights to torch's function",
}
UNEVEN = {
    "T5": r"all of them must lose the same heads: \{'encoder.block.0.layer.0.SelfAttention': \[...\], ",
    "CodeGen": "in 4 parts of 2, and removing heads 0, 1, 2 would leave 0, 1, 2, 2 in them",
    "Funnel": "reads n_head from its configuration at each call",
}
# Their code, or that of what they hold, says float32.
SINGLE = ("MiMo-V2-Flash", "GPT-OSS", "XGLM", "CANINE")
# A user's own code is proved.
OWN = ("timm ViT", "timm Swin")
PRUNED = [family for family in FAMILIES if family.name not in REFUSED]


def settle(family: Family, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.nn.Module, dict[str, torch.Tensor], float]:
    """A model, its inputs, and how far apart two ways of computing its outputs may be."""
    model, inputs = family.build(), family.inputs(padded=family.maskable)
    if family.name in SINGLE:
        return model, inputs, 1e-5
    inputs = lift(model, inputs)
    compute_in_float64(monkeypatch)
    return model, inputs, 1e-12


def count_weights(heads: hw.Heads, removed: Removed) -> int:
    """The numbers of query, key, value and output weights that belong to these heads and their groups."""
    total = 0
    for site in heads:
        assert site.output is not None
        for part in (*site.slices, site.output):
            share = part.heads / site.num_heads
            total += round(len(removed[site.name]) * share) * part.head_size * part.across
    return total


@sweep(PRUNED)
def test_half_of_the_heads_are_removed_as_if_they_were_ablated(family: Family, monkeypatch: pytest.MonkeyPatch):
    model, inputs, tolerance = settle(family, monkeypatch)
    heads = hw.find_heads(model)
    removed = evenly(heads)
    whole, expected = compute(model, inputs), ablated(heads, removed, inputs)
    before, weights = sum(parameter.numel() for parameter in model.parameters()), count_weights(heads, removed)
    pruning = hw.prune(heads, removed, inputs=inputs if family.name in OWN else None)
    found = compute(model, inputs)
    assert apart(expected, found) <= tolerance
    assert apart(whole, found) > 1e-4
    again = hw.find_heads(model)
    counts = [site.num_heads - len(removed[site.name]) for site in heads]
    assert [site.num_heads for site in again] == counts == list(pruning.heads.values())
    assert pruning.parameters == (before, sum(parameter.numel() for parameter in model.parameters()))
    # with biases, position tables and norms
    assert weights <= before - pruning.parameters[1] <= 1.6 * weights


@sweep([family for family in PRUNED if family.name not in UNEVEN])
def test_other_heads_of_each_layer_are_removed_as_if_they_were_ablated(family: Family, monkeypatch: pytest.MonkeyPatch):
    model, inputs, tolerance = settle(family, monkeypatch)
    heads = hw.find_heads(model)
    removed = unevenly(heads)
    expected = ablated(heads, removed, inputs)
    hw.prune(heads, removed, inputs=inputs if family.name in OWN else None)
    assert apart(expected, compute(model, inputs)) <= tolerance
    counts = [site.num_heads - len(removed.get(site.name, ())) for site in heads]
    assert [site.num_heads for site in hw.find_heads(model)] == counts


@cases("family", named(FAMILIES, *REFUSED))
def test_a_family_whose_heads_are_not_apart_is_refused_and_left_as_it_was(family: Family):
    model = family.build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    heads = hw.find_heads(model)
    with pytest.raises(hw.errors.LayoutError, match=REFUSED[family.name]):
        hw.prune(heads, evenly(heads))
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    hw.find_heads(model)


@cases("family", named(FAMILIES, *UNEVEN))
def test_heads_that_depend_on_those_of_other_layers_are_refused(family: Family):
    model, inputs = family.build(), family.inputs()
    heads = hw.find_heads(model)
    expected = compute(model, inputs)
    with pytest.raises(hw.errors.LayoutError, match=UNEVEN[family.name]):
        hw.prune(heads, {**evenly(heads), heads.sites[0].name: (0, 1, 2)})
    assert apart(expected, compute(model, inputs)) == 0.0
