"""`aggregate` puts aggregators into the places of output projections, and its handle takes them out again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cases import cases
from equations.draws import random
from heads.attentions import SeparateAttention
from headwise.errors import HeadwiseError, LayoutError, SettingError
from headwise.heads.find import find_heads
from headwise.routing.aggregate import aggregate
from headwise.routing.modules import EMRouting, Gate, Residual, SimpleRouting, Trunk


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


@cases("setting", [SimpleRouting(), EMRouting(capsules=4), Trunk(), Residual(EMRouting())])
def test_aggregate_puts_one_aggregator_of_its_own_into_each_site(setting):
    model, x = encoder(), random(3, 5, 8, dtype=torch.float32)
    before = model(x)
    aggregation = aggregate(find_heads(model), setting)
    modules = [layer.self_attn.out_proj for layer in model.layers]
    assert [place.new for place in aggregation.replaced] == modules
    assert not {id(p) for p in modules[0].parameters()} & {id(p) for p in modules[1].parameters()}
    after = model(x)
    assert torch.equal(before, after) == isinstance(setting, Residual)
    after.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), after)


def test_the_handle_lists_its_sites_and_puts_the_old_projections_back():
    model, x = encoder(), random(3, 5, 8, dtype=torch.float32)
    before, keys = model(x), set(model.state_dict())
    aggregation = aggregate(find_heads(model).layer(1), EMRouting())
    text = str(aggregation)
    assert "layers.1.self_attn: out_proj is EMAggregator" in text
    assert "layers.0" not in text
    aggregation.remove()
    assert set(model.state_dict()) == keys
    torch.testing.assert_close(model(x), before)
    aggregation.remove()
    assert not aggregation.attached
    aggregation = aggregate(find_heads(model).layer(1), EMRouting())
    model.layers[1].self_attn.out_proj = torch.nn.Linear(8, 8)
    with pytest.raises(HeadwiseError, match=r"the output module is now a Linear.*it was replaced since"):
        aggregation.remove()
    assert aggregation.attached


def test_a_refused_aggregation_changes_nothing():
    model = encoder()
    heads = find_heads(model)
    first = aggregate(heads.layer(1), Trunk())
    before = model.layers[0].self_attn.out_proj
    for given, setting, error, message in (
        (heads, EMRouting(), LayoutError, "already has TrunkAggregator as its output"),
        (replace(heads, sites=heads.sites[:1] * 2), Trunk(), LayoutError, "shares its output projection"),
        (heads.layer(0), EMRouting(capsules=3), SettingError, "divisor"),
        (heads, "em", SettingError, "a str"),
    ):
        with pytest.raises(error, match=message):
            aggregate(given, setting)
        assert model.layers[0].self_attn.out_proj is before
    first.remove()
    aggregate(find_heads(model.eval()), EMRouting())
    assert not model.layers[0].self_attn.out_proj.training


class Quantized(nn.Module):
    """A projection by a matrix of integers."""

    def __init__(self, linear: nn.Linear, *, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


@cases(("dtype", "bias"), [(torch.float64, True), (torch.float32, False)])
@cases("setting", [EMRouting(capsules=4), Residual(SimpleRouting()), Gate()])
def test_a_quantized_projection_is_replaced_or_kept(setting, dtype: torch.dtype, bias: bool):
    model = SeparateAttention(8, 2, key_value_heads=2).to(dtype)
    model.o_proj = Quantized(model.o_proj, bias=bias)
    x = random(3, 5, 8, dtype=dtype)
    before = model(x)
    (place,) = aggregate(find_heads(model), setting).replaced
    assert {p.dtype for p in place.new.parameters()} - {torch.int8} == {dtype}
    after = model(x)
    assert after.dtype == dtype
    assert torch.allclose(after, before) == isinstance(setting, Residual | Gate)
