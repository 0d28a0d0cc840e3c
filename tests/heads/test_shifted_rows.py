"""Heads, or biases, read a few rows off, in other runs or in another order are refused in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.attentions import FusedAttention, GatedAttention, KeyValueAttention, SeparateAttention
from heads.families import BY_NAME, FAMILIES, sweep
from heads.family import Family
from headwise.heads.heads import Heads, Site

X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))
LAYOUTS = ("BERT", "GPT-2", "GPT-2 with cross-attention", "GPT-NeoX", "DeBERTa-v2", "ModernBERT", "Phi-3", "Llama")


class HeadGates(SeparateAttention):
    """Head h of one projection is [features; gate]: one number that multiplies all of its output."""

    def __init__(self, gated: str) -> None:
        super().__init__()
        self.gated = gated
        setattr(self, gated, nn.Linear(12, self.num_heads * (self.head_dim + 1)))

    def forward(self, x: Tensor) -> Tensor:
        parts = {name: getattr(self, name)(x) for name in ("q_proj", "k_proj", "v_proj")}
        split = parts[self.gated].unflatten(-1, (self.num_heads, self.head_dim + 1))
        parts[self.gated], gate = split[..., :-1].flatten(2), split[..., -1:]
        heads = F.scaled_dot_product_attention(*(self.split(part) for part in parts.values())).transpose(1, 2)
        return self.o_proj((heads * gate.sigmoid()).flatten(2))


def find_gated(gated: str) -> Heads:
    model = HeadGates(gated)
    linear = model._modules.pop(gated)
    setattr(model, gated, nn.Linear(12, model.num_heads * model.head_dim))
    (site,) = hw.find_heads(model).sites
    setattr(model, gated, linear)
    rows = model.head_dim + 1
    slices = [
        replace(own, owner=linear, module=linear, stride=rows, along=model.num_heads * rows, across=12)
        if own.name.startswith(gated)
        else own
        for own in site.slices
    ]
    return Heads(model, (replace(site, slices=tuple(slices), value_module=model.v_proj),))


def shifts(site: Site) -> Iterator[tuple[str, Site]]:
    """The site with one, two or all of its slices some rows off: label and site."""
    longest = max(head_slice.stride for head_slice in site.slices)
    for rows in (rows for rows in range(1 - longest, longest) if rows):
        for count in (1, 2, 3):
            for moved in combinations(range(3), count):
                slices = [
                    replace(own, start=own.start + rows, bias_start=own.bias_start + rows) if index in moved else own
                    for index, own in enumerate(site.slices)
                ]
                if all(own.start >= 0 for own in slices):
                    names = " and ".join(site.slices[index].projection for index in moved)
                    yield f"{names} by {rows}", replace(site, slices=tuple(slices))


def accept_shifts(heads: Heads, inputs: object) -> tuple[list[str], int]:
    """The shifts that `verify` accepts, and how many of those it refused took an experiment."""
    (site, *_) = heads.sites
    assert hw.verify(heads, inputs).sites
    accepted, by_experiment = [], 0
    for label, shifted in shifts(site):
        try:
            hw.verify(Heads(heads.model, (shifted,)), inputs)
        except hw.errors.LayoutError as error:
            by_experiment += "misreads" in str(error)
        else:
            accepted.append(label)
    return accepted, by_experiment


@cases(
    "model",
    [
        SeparateAttention(),
        GatedAttention(key_value_heads=2),
        KeyValueAttention(),
        FusedAttention(interleaved=True),
        FusedAttention(("query", "key", "value"), key_value_heads=2),
    ],
)
def test_no_shift_of_any_layout_is_accepted(model: nn.Module):
    row = hw.layouts.FusedLinear("mine", ("qkv",), ("proj",), interleaved=getattr(model, "interleaved", False))
    heads = hw.find_heads(model, (row, *hw.layouts.LAYOUTS))
    inputs = (X, X) if isinstance(model, KeyValueAttention) else (X,)
    accepted, _ = accept_shifts(heads, inputs)
    assert accepted == []


@sweep([f for f in FAMILIES if f.name in LAYOUTS])
def test_no_shift_in_any_family_is_accepted(family):
    heads = hw.find_heads(family.build())
    assert accept_shifts(heads, family.inputs())[0] == []


@cases("gated", ["q_proj", "k_proj", "v_proj"])
def test_a_gate_beside_a_head_is_no_feature_of_it(gated: str):
    accepted, by_experiment = accept_shifts(find_gated(gated), (X,))
    assert accepted == []
    assert by_experiment > 0


IN_RUNS = [family for family in FAMILIES if family.name.startswith(("Falcon", "CodeGen"))]


@cases("family", IN_RUNS)
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


def test_noise_of_heads_in_runs_is_each_runs_own():
    heads = hw.find_heads(IN_RUNS[0].build())
    query = heads.slices()[0]
    assert query.read().shape == (4, 8, 32)
    before = query.read()
    hw.repulsion.jitter(heads, 1e-3)
    noise = query.read() - before
    # of each run its own
    assert not torch.allclose(noise[0], noise[2], rtol=0.1)


FAST = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3)).double()


class FastAttention(nn.Module):
    """LayoutLMv2's fast attention: one projection without a bias, and biases of queries and values [1, 1, H e]."""

    def __init__(self, width: int = 12, num_heads: int = 4) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size = num_heads, width // num_heads
        self.qkv_proj, self.o_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(1, 1, width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).chunk(3, -1)
        split = [
            part.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for part in (q + self.q_bias, k, v + self.v_bias)
        ]
        return self.o_proj(F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2))


def deberta() -> nn.Module:
    model = BY_NAME["DeBERTa"].build()
    with torch.no_grad():
        for layer in model.encoder.layer:
            for bias in (layer.attention.self.q_bias, layer.attention.self.v_bias):
                bias.copy_(torch.randn(bias.shape))
    return model


def test_the_biases_of_deberta_belong_to_the_slices_of_its_queries_and_to_the_values_it_weighs():
    model = deberta()
    heads = hw.find_heads(model)
    (site, _) = heads.sites
    query, key, value = site.slices
    assert (query.bias, key.bias, value.bias) == ("q_bias", None, "v_bias")
    for head_slice in (query, value):
        bias = getattr(site.module, head_slice.bias)
        assert head_slice.bias_owner is site.module
        torch.testing.assert_close(head_slice.bias_view(bias), bias.view(4, 8))
        torch.testing.assert_close(head_slice.added_bias, bias.view(4, 8))
    assert key.added_bias is None
    with hw.Taps(heads.layer(0), values=True, outputs=True) as taps:
        weights = model(**BY_NAME["DeBERTa"].inputs(), output_attentions=True).attentions[0]
        (capture,) = taps.read()
    torch.testing.assert_close(torch.einsum("bhqk,bkhe->bqhe", weights, capture.values), capture.outputs)


def test_values_are_read_with_the_bias_that_is_added_to_them():
    torch.manual_seed(0)
    model = FastAttention().double()
    heads = hw.find_heads(model)
    with hw.Taps(heads, values=True) as taps:
        model(FAST)
        (capture,) = taps.read()
    expected = model.qkv_proj(FAST)[..., 24:] + model.v_bias
    torch.testing.assert_close(capture.values, expected.unflatten(-1, (4, 3)))
    penalty = hw.Disagreement(heads, hw.similarity.Subspace())
    model(FAST)
    penalty().backward()
    assert float(model.v_bias.grad.abs().max()) > 0.0


@cases("projection", ["query", "value"])
def test_a_bias_in_another_order_is_disproved(projection: str):
    model = FastAttention().eval()
    heads = hw.find_heads(model)
    assert hw.verify(heads, (FAST.float(),)).sites == ("",)
    (site,) = heads.sites
    # read as if it were in the order (e h), and as if its heads came one feature later
    for change in ({"bias_stride": 1}, {"bias_start": 1, "bias_stride": 2}):
        slices = tuple(replace(s, **change) if s.projection == projection else s for s in site.slices)
        with pytest.raises(
            hw.errors.LayoutError, match=rf"changing the {projection} bias of head \d changed the heads of heads \d"
        ):
            hw.verify(Heads(model, (replace(site, slices=slices),)), (FAST.float(),))
