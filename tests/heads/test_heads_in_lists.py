"""Heads in a list of modules are one attention: found, proved, repelled, read and removed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.own import HEADS, RULE, SIZE, WIDTH, ListAttention, ParameterAttention, ThreeLists, X, forces, with_gradients
from headwise.heads.heads import Heads


@cases("joint", [False, True])
def test_the_force_on_heads_in_a_list_is_that_of_loops_over_pairs(joint: bool):
    torch.manual_seed(5)
    model = with_gradients(ListAttention())
    kinds = ("query", "key", "value")

    def gather(read) -> list[Tensor]:
        parts = [torch.stack([read(getattr(head, kind).weight) for head in model.heads]) for kind in kinds]
        return [torch.cat(parts, 1)] if joint else parts

    expected = [
        forces(theta, gradient)
        for theta, gradient in zip(gather(lambda w: w.detach().clone()), gather(lambda w: w.grad.clone()), strict=True)
    ]
    rest = model.proj.weight.grad.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    repulsion = hw.repel(hw.find_heads(model), RULE, optimizer, joint=joint)
    optimizer.step()
    torch.testing.assert_close(gather(lambda w: w.grad), expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(model.proj.weight.grad, rest)
    assert repulsion.last.names == (("query+key+value",) if joint else kinds)
    repulsion.check()


def test_functions_of_heads_in_a_list_are_repelled_as_those_of_one_matrix():
    torch.manual_seed(5)
    model = with_gradients(ListAttention())
    whole = with_gradients(ParameterAttention("(h e) d"))
    with torch.no_grad():
        for kind, name in (("query", "W_Q"), ("key", "W_K"), ("value", "W_V")):
            getattr(whole, name).copy_(torch.cat([getattr(head, kind).weight for head in model.heads]))
            getattr(whole, name).grad.copy_(torch.cat([getattr(head, kind).weight.grad for head in model.heads]))
        whole.proj.load_state_dict(model.proj.state_dict())
        for name in ("weight", "bias"):
            getattr(whole.proj, name).grad.copy_(getattr(model.proj, name).grad)
    for one, row in ((model, hw.layouts.LAYOUTS), (whole, hw.layouts.SeparateParameters(axes="(h e) d"))):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.0)
        hw.repel(hw.find_heads(one, row), hw.repulsion.FunctionSVGD(alpha=0.5), optimizer)
        optimizer.step()
    for kind, name in (("query", "W_Q"), ("key", "W_K"), ("value", "W_V")):
        joined = torch.cat([getattr(head, kind).weight.grad for head in model.heads])
        torch.testing.assert_close(joined, getattr(whole, name).grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model.proj.weight.grad, whole.proj.weight.grad, rtol=1e-10, atol=1e-12)


def test_noise_and_jitter_reach_every_head_of_a_list():
    torch.manual_seed(5)
    model = ListAttention()
    with torch.no_grad():
        for head in model.heads[1:]:
            head.load_state_dict(model.heads[0].state_dict())
    heads = hw.find_heads(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hw.errors.HeadwiseError, match="all 4 heads are equal"):
        hw.repel(heads, hw.SVGD(), optimizer)
    hw.repulsion.jitter(heads, 1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    hw.repel(heads, hw.SPOS(alpha=0.0, inverse_temperature=4.0), optimizer)
    optimizer.step()
    drawn = [head.query.weight.grad for head in model.heads]
    assert all(float(grad.std()) > 0.1 for grad in drawn)
    assert not torch.allclose(drawn[0], drawn[1])
    with torch.no_grad():
        model.heads[2].key.weight[0, 0] = torch.nan
    with pytest.raises(hw.errors.HeadwiseError, match=r"heads\.2\.key\.weight holds NaN"):
        hw.repulsion.jitter(heads, 1e-2)


def test_a_list_of_heads_is_one_attention():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sa, self.ln = ListAttention(), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.sa(self.ln(x))

    model = nn.Sequential(Block(), Block()).eval()
    heads = hw.find_heads(model)
    assert [(site.name, site.layer, site.num_heads, site.head_size, site.layout) for site in heads] == [
        ("0.sa", 0, HEADS, SIZE, "list"),
        ("1.sa", 1, HEADS, SIZE, "list"),
    ]
    assert heads.layer(1).slices()[0].name == "1.sa.heads.*.query.weight"
    assert "0.sa" in str(heads)
    assert "proj: Linear" in str(heads)
    assert hw.verify(heads, (X,)).sites == ("0.sa", "1.sa")
    assert hw.find_heads(ThreeLists()).sites[0].slices[2].name == "v_mappings.*.weight"
    assert hw.verify(hw.find_heads(ThreeLists()), (torch.randn(2, 5, 12),)).sites == ("",)
    assert hw.verify(hw.find_heads(ListAttention(projected=False)), (X,)).sites == ("",)


def test_heads_of_a_list_in_another_order_are_disproved():
    model = ListAttention().eval()
    (site,) = hw.find_heads(model).sites
    query, key, value = site.slices
    for slices in (
        (replace(query, pieces=query.parts[::-1]), key, value),
        (replace(key, pieces=query.parts), replace(query, pieces=key.parts), value),
        (query, replace(key, pieces=value.parts), replace(value, pieces=key.parts)),
    ):
        with pytest.raises(hw.errors.LayoutError, match="layout 'list' with 4 heads of 3 misreads ListAttention"):
            hw.verify(Heads(model, (replace(site, slices=slices),)), (X,))


def test_what_heads_of_a_list_compute_is_read_penalized_and_removed():
    torch.manual_seed(5)
    model = ListAttention().double()
    heads, x = hw.find_heads(model), X.double()
    with hw.Taps(heads, outputs=True, values=True) as taps:
        torch.manual_seed(1)
        model(x)
        torch.manual_seed(1)
        outputs = torch.stack([head(x) for head in model.heads], 2)
        captures = taps.read()
        torch.manual_seed(1)
        model(x)
        (second,) = taps.read()
    torch.testing.assert_close(captures[0].outputs, outputs)
    torch.testing.assert_close(captures[0].values, torch.stack([head.value(x) for head in model.heads], 2))
    torch.testing.assert_close(second.values, captures[0].values)
    penalty = hw.Disagreement(heads, hw.similarity.Subspace())
    model(x)
    value = penalty()
    directions = torch.stack([nn.functional.normalize(head.value(x), dim=-1) for head in model.heads], 2)
    torch.testing.assert_close(value, (directions.mean(2) ** 2).sum(-1).mean())
    value.backward()
    assert float(model.heads[0].value.weight.grad.abs().max()) > 0.0
    penalty.remove()
    model.eval()
    with hw.ablate(heads, 1, 3):
        ablated = model(x)
    joined = torch.cat([head(x) * (index in (0, 2)) for index, head in enumerate(model.heads)], -1)
    torch.testing.assert_close(ablated, model.proj(joined))
    drops = hw.importance(heads, lambda: float(model(x).std())).drops["(model)"]
    assert drops.shape == (HEADS,)
    report = hw.measure(heads, [x], score=lambda output, _: output.std((1, 2)))
    assert {"query_cosine", "value_cosine", "output_cosine"} <= set(report.layers[0].pairs)
    assert any("attention weights of ListAttention cannot be read" in note for note in report.notes)
