"""Heads that lie in several runs of one parameter: Falcon's groups, and the devices of CodeGen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import headwise as hw
from heads.families import FAMILIES
from heads.family import Family
from headwise.heads.heads import Heads

IN_RUNS = [family for family in FAMILIES if family.name.startswith(("Falcon", "CodeGen"))]


@pytest.mark.parametrize("family", IN_RUNS, ids=str)
def test_no_wrong_order_of_runs_and_no_shift_of_one_is_accepted(family: Family):
    heads = hw.find_heads(family.build())
    site = heads.sites[0]
    query, key, value = site.slices
    assert query.pieces
    first, *others = query.pieces
    moved = replace(first, start=first.start + 1, bias_start=first.bias_start + 1)
    wrong = (
        replace(first, heads=query.heads, start=0, bias_start=0),
        replace(query, pieces=query.pieces[::-1]),
        replace(query, pieces=(moved, *others)),
    )
    swapped = (query, replace(value, projection="key"), replace(key, projection="value"))
    for slices in (*((own, key, value) for own in wrong), swapped):
        with pytest.raises(hw.errors.LayoutError, match=r"misreads|is read as part of|do not fit"):
            hw.verify(Heads(heads.model, (replace(site, slices=slices),)), family.inputs())


def test_a_step_is_that_of_the_same_heads_in_one_block():
    """Falcon's queries, against those of an attention whose queries are one matrix."""
    torch.manual_seed(0)
    falcon = next(family for family in IN_RUNS if family.name.startswith("Falcon")).build().double()
    heads = hw.find_heads(falcon).layer(0).projection("query")
    (query,) = heads.slices()
    plain = nn.Module()
    plain.num_heads, plain.head_dim = query.heads, query.head_size
    plain.q_proj, plain.k_proj, plain.v_proj = (nn.Linear(32, 32, bias=False).double() for _ in range(3))
    weight, drawn = query.parameter, torch.randn_like(query.parameter)
    with torch.no_grad():
        plain.q_proj.weight.copy_(weight[query.rows])
    weight.grad, plain.q_proj.weight.grad = drawn.clone(), drawn[query.rows].clone()
    for model, chosen in ((falcon, heads), (plain, hw.find_heads(plain).projection("query"))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hw.repel(chosen, hw.SVGD(alpha=0.3), optimizer, when="manual").apply()
    others = torch.ones(len(weight), dtype=torch.bool)
    others[query.rows] = False
    assert torch.equal(weight.grad[others], drawn[others])
    assert not torch.equal(weight.grad[query.rows], drawn[query.rows])
    torch.testing.assert_close(weight.grad[query.rows], plain.q_proj.weight.grad)


def test_there_is_no_view_of_heads_in_runs():
    heads = hw.find_heads(IN_RUNS[0].build())
    query = heads.slices()[0]
    with pytest.raises(hw.errors.LayoutError, match="its query heads lie in 2 runs"):
        query.of(query.parameter)
    assert query.read().shape == (4, 8, 32)
    before = query.read()
    hw.repulsion.jitter(heads, 1e-3)
    noise = query.read() - before
    # of each run its own
    assert not torch.allclose(noise[0], noise[2], rtol=0.1)
