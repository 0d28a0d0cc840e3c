"""The arms that lengthen queries change how queries start, or how fast they learn, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import headwise as hw
from cases import cases
from headwise.nn.additive import AdditiveAttention
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.training.attach import Methods


def build(arm: str, kind: str = "additive") -> tuple[nn.Module, Methods]:
    model = AdditiveAttention(6, 5, 3) if kind == "additive" else nn.TransformerEncoderLayer(6, 2, 8)
    return model, Methods(parse_arm(arm), model, model, seed=4)


@cases("kind", ["additive", "packed"])
def test_queries_are_drawn_longer_and_nothing_else_is(kind: str):
    plain, _ = build("plain", kind)
    longer, methods = build("queries-longer:drawn=2.5", kind)
    assert methods.heads is not None
    (query,) = methods.heads.projection("query").slices()
    with torch.no_grad():
        query.of(query.parameter).div_(2.5)
    for one, other in zip(plain.parameters(), longer.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_queries_alone_are_trained_faster():
    model, methods = build("queries-faster:rate=3.0")
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "weight_decay": 0.1}], lr=0.2)
    methods.repel(optimizer)
    rates = {id(one): group["lr"] for group in optimizer.param_groups for one in group["params"]}
    assert {name: round(rates[id(one)], 9) for name, one in model.named_parameters()} == {
        "hidden.weight": 0.2,
        "score.weight": 0.6,
    }
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1]


def test_queries_that_share_a_parameter_are_refused():
    model, methods = build("queries-faster", "packed")
    with pytest.raises(hw.errors.SettingError, match="holds more than queries"):
        methods.repel(torch.optim.SGD(model.parameters(), lr=0.1))
