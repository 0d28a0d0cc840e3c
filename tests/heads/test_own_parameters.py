"""Heads in a user's own parameters are found, proved, repelled and read, or refused in a sentence."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases, thin, tiers
from heads.own import HEADS, RULE, SIZE, ParameterAttention, X, forces, with_gradients
from heads.refused import REFUSED
from headwise.heads.heads import Heads
from headwise.heads.layouts.parameters import Axes

SEPARATE = ("h d e", "h e d", "d h e", "e d h", "(h e) d", "d (h e)", "(e h) d", "d (e h)")
PACKED = (
    *("p d h e", "p h d e", "d p h e", "(p h e) d", "(h p e) d", "(h e p) d", "(p e h) d", "d (p h e)", "d (h p e)"),
    *("p (h e) d", "p d (h e)", "(p h) d e", "d p (e h)"),
)


def separate(axes: str, output_axes: str = "", **settings) -> tuple[ParameterAttention, hw.layouts.SeparateParameters]:
    row = hw.layouts.SeparateParameters("mine", axes=axes, output_axes=output_axes)
    return ParameterAttention(axes, output_axes, **settings).eval(), row


def packed(axes: str, output_axes: str = "", **settings) -> tuple[ParameterAttention, hw.layouts.FusedParameter]:
    order = settings.get("order", ("query", "key", "value"))
    row = hw.layouts.FusedParameter("mine", axes=axes, output_axes=output_axes, order=order)
    return ParameterAttention(axes, output_axes, packed=True, **settings).eval(), row


CASES = {
    **{f"separate {axes}": separate(axes) for axes in SEPARATE},
    **{f"packed {axes}": packed(axes) for axes in PACKED},
    "grouped": separate("h d e", key_value_heads=2),
    "one key-value head": separate("(h e) d", "h e d", key_value_heads=1, causal=True),
    "grouped in one": packed("h d e", key_value_heads=2),
    "grouped rows in one": packed("(h e) d", "d h e", key_value_heads=2),
    "another order": packed("p d h e", order=("value", "query", "key")),
    "W_O h e d": separate("h d e", "h e d"),
    "W_O (h e) d": separate("d (h e)", "(h e) d", causal=True),
    "W_O d (e h)": packed("p h d e", "d (e h)"),
    # more features of heads than W_O has outputs: they are read in several calls
    "wide heads": separate("h d e", "h e d", width=4),
}


def readings(case: str) -> list[tuple[str, tuple[str, ...]]]:
    """Every other reading that the shapes of a case allow."""
    model, row = CASES[case]
    parameter = model.w_qkv if isinstance(row, hw.layouts.FusedParameter) else model.W_Q
    patterns = PACKED if "p" in row.axes else SEPARATE
    known = {"h": HEADS, **({"p": 3} if "p" in row.axes else {})}
    fitting = [axes for axes in patterns if Axes.read(axes).bind(parameter.shape, known) is not None]
    orders = [("query", "key", "value"), ("key", "query", "value"), ("query", "value", "key")]
    given = getattr(row, "order", orders[0])
    return [(axes, order) for axes in fitting for order in orders if (axes, order) != (row.axes, given)]


@tiers("case", *thin([case for case in CASES if "separate" in case or "packed" in case], 4))
def test_every_wrong_order_of_axes_is_disproved(case: str):
    model, row = CASES[case]
    x = X[..., : model.sizes["d"]]
    for axes, order in readings(case):
        if isinstance(row, hw.layouts.FusedParameter):
            wrong = hw.layouts.FusedParameter("wrong", axes=axes, order=order)
        else:
            names = {"query": ("W_Q",), "key": ("W_K",), "value": ("W_V",)}
            swapped = dict(zip(("query", "key", "value"), (names[kind] for kind in order), strict=True))
            wrong = hw.layouts.SeparateParameters("wrong", axes=axes, **swapped)
        with pytest.raises(hw.errors.LayoutError):
            hw.verify(hw.find_heads(model, wrong), (x,))
    assert readings(case)


@cases("shift", [-1, 1, 2])
@cases("projection", [0, 1, 2])
def test_rows_shifted_by_a_few_are_disproved(projection: int, shift: int, monkeypatch: pytest.MonkeyPatch):
    model, row = packed("(h p e) d")
    (site,) = hw.find_heads(model, row).sites
    slices = list(site.slices)
    start = slices[projection].start + shift
    if not 0 <= start <= slices[projection].stride - SIZE:
        start -= 2 * shift
    slices[projection] = replace(slices[projection], start=start)
    heads = Heads(model, (replace(site, slices=tuple(slices)),))
    with pytest.raises(hw.errors.LayoutError, match="as part of its"):
        hw.verify(heads, (X,))
    monkeypatch.setattr(import_module("headwise.heads.experiments.verify"), "check_head_views", lambda _: None)
    with pytest.raises(hw.errors.LayoutError, match="misreads"):
        hw.verify(heads, (X,))


def test_keys_of_other_heads_than_the_queries_are_disproved():
    class Crossed(ParameterAttention):
        def weights(self) -> dict[str, Tensor]:
            found = super().weights()
            return {**found, "key": found["key"].flip(0)}

    heads = hw.find_heads(Crossed().eval(), hw.layouts.SeparateParameters(axes="h d e"))
    with pytest.raises(
        hw.errors.LayoutError, match=r"changing the key weights of head 0 changed heads \[3\], not \[0\]"
    ):
        hw.verify(heads, (X,))


@cases("axes", ["h d e", "d h e", "h e d", "p d h e", "p h d e", "d p h e", "(p h e) d"])
def test_shapes_that_allow_one_reading_need_no_axes(axes: str):
    # heads of 3 features could be 3 projections
    model = ParameterAttention(axes, packed="p" in axes, head_size=2, width=2 * HEADS).eval()
    (site,) = hw.find_heads(model).sites
    assert (site.num_heads, site.head_size, site.layout) == (HEADS, 2, "parameter" if "p" in axes else "parameters")
    for head_slice in site.slices:
        read = head_slice.read()
        expected = model.weights()[head_slice.projection].detach()
        torch.testing.assert_close(read.mT if head_slice.transposed else read, expected)
    assert hw.verify(hw.find_heads(model), (X[..., :8],)).sites == ("",)


@tiers("case", *thin(CASES, 3))
def test_heads_of_any_axes_are_read_proved_and_repelled_as_loops_over_pairs_say(case: str):
    model, row = CASES[case]
    heads = hw.find_heads(model, row)
    for head_slice in heads.slices():
        expected = model.weights()[head_slice.projection].detach()
        torch.testing.assert_close(head_slice.read().mT if head_slice.transposed else head_slice.read(), expected)
    assert hw.verify(heads, (X[..., : model.sizes["d"]],)).sites == ("",)
    torch.manual_seed(5)
    width = {"width": model.sizes["d"]}
    model = with_gradients(type(model)(model.axes, model.output_axes, **width, **settings_of(model)))
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    weights, gradients = model.weights(), model.split(before)
    expected = {kind: forces(weights[kind].detach(), gradients[kind]) for kind in weights}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hw.repel(hw.find_heads(model, row), RULE, optimizer)
    optimizer.step()
    after = {name: parameter.grad for name, parameter in model.named_parameters()}
    for kind, gradient in model.split(after).items():
        torch.testing.assert_close(gradient, expected[kind], rtol=1e-10, atol=1e-12)
        if len(gradient) > 1:
            assert not torch.allclose(gradient, gradients[kind])
    for name in set(after) - {"w_qkv", "W_Q", "W_K", "W_V"}:
        assert torch.equal(after[name], before[name])


def settings_of(model: ParameterAttention) -> dict:
    return {"key_value_heads": model.counts["key"]["h"], "packed": hasattr(model, "w_qkv"), "order": model.order}


def test_a_number_of_heads_is_given_where_the_module_does_not_tell_it():
    model = nn.Module()
    model.q_proj, model.k_proj, model.v_proj, model.o_proj = (nn.Linear(12, 12) for _ in range(4))
    for heads in (
        hw.find_heads(model, num_heads=3),
        hw.find_heads(model, hw.layouts.SeparateLinears(num_heads=3)),
        hw.find_heads(model, hw.layouts.SeparateLinears(num_heads=("nope", 3))),
    ):
        assert (heads.sites[0].num_heads, heads.sites[0].head_size) == (3, 4)
    model.head_dim = 4
    assert hw.find_heads(model, hw.layouts.SeparateLinears(num_heads=2)).sites[0].head_size == 6
    fused = nn.Module()
    fused.qkv, fused.proj = nn.Linear(12, 36), nn.Linear(12, 12)
    assert hw.find_heads(fused, num_heads=6).sites[0].head_size == 2


def test_heads_of_parameters_print_their_w_o_and_outputs_of_their_values_are_penalized():
    row = hw.layouts.SeparateParameters(axes="h d e", output_axes="h e d")
    assert "W_O: parameter" in str(hw.find_heads(ParameterAttention("h d e", "h e d"), row))
    module = ParameterAttention("h d e")
    heads = hw.find_heads(module, hw.layouts.SeparateParameters(axes="h d e"))
    penalty = hw.Disagreement(heads, hw.similarity.Output())
    module(X)
    assert 1 / HEADS / HEADS < float(penalty().detach()) < 1.0


def test_xlnet_is_repelled_with_a_row_of_its_own():
    model = next(entry for entry in REFUSED if entry.families == "XLNet").build()
    row = hw.layouts.SeparateParameters(
        query=("q",), key=("k",), value=("v",), output=("o",), axes="d h e", output_axes="d h e"
    )
    heads = hw.find_heads(model, row, num_heads=4)
    assert [(site.num_heads, site.head_size) for site in heads] == [(4, 8), (4, 8)]
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hw.repel(heads, RULE, optimizer)
    weight = model.layer[1].rel_attn.k
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    expected = forces(weight.detach().transpose(0, 1), weight.grad.transpose(0, 1).clone())
    optimizer.step()
    torch.testing.assert_close(weight.grad.transpose(0, 1), expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(hw.errors.HeadwiseError, match=r"W_O, .*, is a parameter, and its output is not linear in that"):
        hw.verify(heads, {"input_ids": torch.arange(14).view(2, 7)})
