"""Methods as settings: where they act, and what they refuse on construction."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import nn

import headwise as hw
from cases import cases
from headwise.api import MOVED


def transformer() -> nn.Transformer:
    torch.manual_seed(0)
    return nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)


def test_a_rule_acts_on_layers_of_each_kind_and_on_projections():
    model = transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = hw.Repel(hw.SVGD(), layers=(1,), kinds=("self", "cross"), projections=("query", "value"))
    handle = method.attach(hw.find_heads(model), optimizer, seed=7)
    assert [group.name for group in handle.groups] == [
        f"{site} {projection}"
        for site in ("encoder.layers.1.self_attn", "decoder.layers.1.multihead_attn")
        for projection in ("query", "value")
    ]
    assert handle.seed == 7


def test_a_penalty_is_the_disagreement_of_the_same_heads_with_the_same_weights():
    model = transformer()
    heads = hw.find_heads(model)
    method = hw.Penalize(hw.similarity.Output(), weight=0.3, kind_weights=(1.0, 0.25, 0.5), layers=(0,))
    penalty = method.attach(heads)
    chosen = [heads.kind(kind).layer(0) for kind in ("self", "decoder", "cross")]
    apart = [hw.Disagreement(one, hw.similarity.Output()) for one in chosen]
    model(torch.randn(3, 5, 8), torch.randn(3, 4, 8))
    expected = sum(weight * one() for weight, one in zip((1.0, 0.25, 0.5), apart, strict=True))
    torch.testing.assert_close(penalty(), expected)


def test_aggregators_are_put_into_the_layers_that_are_named():
    model = transformer()
    aggregation = hw.Aggregate(hw.routing.Gate(), layers=(0,), kinds=("self",)).attach(hw.find_heads(model))
    assert [place.name for place in aggregation.replaced] == ["encoder.layers.0.self_attn"]


@cases(
    ("build", "message"),
    [
        (lambda: hw.Repel(hw.SVGD), r"rule is <class .*SVGD.*expected a particle rule such as hw\.SVGD\(alpha=0\.01\)"),
        (lambda: hw.Repel(hw.SVGD(), layers=0), r"layers is 0; expected a tuple such as \(0, 1\), or None for all"),
        (lambda: hw.Repel(hw.SVGD(), layers=(-1,)), r"layers is -1; expected an integer of at least 0"),
        (lambda: hw.Repel(hw.SVGD(), kinds="self"), r"kinds is 'self'; expected a tuple such as \('self',\)"),
        (lambda: hw.Repel(hw.SVGD(), projections="query"), r"projections is 'query'; expected a tuple"),
        (lambda: hw.Repel(hw.SVGD(), projections=("key", "values")), r"projections is 'values'"),
        (lambda: hw.Penalize(hw.SVGD()), r"term is SVGD.*expected .*Output\(\)"),
        (lambda: hw.Penalize(hw.similarity.Output(), weight=float("nan")), r"Penalize.weight is nan"),
        (
            lambda: hw.Penalize(hw.similarity.Output(), kind_weights=(1.0, 2.0)),
            r"kind_weights is \(1\.0, 2\.0\); expected one number",
        ),
        (lambda: hw.Penalize(hw.similarity.Output(), kinds=("selfish",)), r"kinds is 'selfish'"),
        (lambda: hw.Aggregate(hw.similarity.Output()), r"Output"),
        (lambda: hw.Aggregate(hw.routing.Gate(), layers=[0]), r"layers is \[0\]; expected a tuple"),
    ],
)
def test_a_wrong_setting_is_refused_when_it_is_made(build, message: str):
    with pytest.raises(hw.errors.SettingError, match=message):
        build()


def test_a_name_that_is_in_a_namespace_now_works_where_it_was_with_a_warning():
    for name, space in MOVED.items():
        shown = f"headwise.{name} is now headwise.{space.__name__.rpartition('.')[2]}.{name}, and goes in version 0.4"
        with pytest.warns(DeprecationWarning, match=re.escape(shown)):
            assert getattr(hw, name) is getattr(space, name)
        assert space is hw.attached or name in space.__all__


def test_what_was_called_otherwise_before_works_with_a_warning():
    model = transformer().encoder.train()
    heads, x = hw.find_heads(model), torch.randn(3, 5, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    renamed = partial(pytest.warns, DeprecationWarning, match=r" is now .*, and goes in version 0\.4")
    with renamed():
        repulsion = hw.repel(optimizer, heads, hw.SVGD(), seed=3)
    assert (repulsion.heads, repulsion.seed) == (heads, 3)
    query = heads.slices()[0]
    with renamed():
        assert query.view(query.parameter).equal(query.of(query.parameter))
    with renamed():
        assert hw.heads.HeadSlice is type(query)
    with renamed():
        assert str(hw.measure(model, heads, [x])) == str(hw.measure(heads, [x]))
    penalty = hw.Disagreement(heads, hw.similarity.Output(), strength=0.5)
    loss = model(x).square().mean()
    with renamed():
        assert penalty.add_to(loss) > loss
    with renamed():
        penalty.verify()
    with renamed():
        attached = hw.integrations.Attached([hw.integrations.Penalize(hw.similarity.Output())])
    attached.attach(model)
    loss = model(x).square().mean()
    with renamed():
        assert attached.add_penalty(loss) >= loss
    with renamed():
        assert attached.penalties == attached.of(hw.Disagreement)
    with renamed():
        assert {*attached.read_metrics()} == {"penalty", "similarity"}
    for name in ("aggregate", "nonsense"):
        with pytest.raises(AttributeError, match=f"'Disagreement' object has no attribute '{name}'"):
            getattr(penalty, name)
