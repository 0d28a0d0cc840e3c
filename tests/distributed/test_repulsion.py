"""Repulsion of a model that several processes train together equals repulsion in one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

import headwise as hw
from distributed.engines import ENGINES, HEADS, LAYERS, as_it_is, batch, examples, fsdp_columns, fused, gathered, made
from distributed.processes import Processes

RATE, STEPS = 0.05, 3
RULES = {
    "SVGD": hw.SVGD(alpha=0.7, step_size=0.3, data_size=3.0),
    "prior": hw.SVGD(alpha=0.7, step_size=0.3, prior_precision=0.2, data_size=3.0, inverse_temperature=1.7),
    "relative": hw.SVGD(alpha=hw.Relative(0.4), step_size=0.3, prior_precision=0.2),
    "SPOS": hw.SPOS(alpha=0.5, step_size=0.3, inverse_temperature=7.0),
    "SGLD": hw.SGLD(step_size=0.3, inverse_temperature=7.0, prior_precision=0.1),
    "cosine": hw.CosineRepulsion(alpha=0.3),
}


def trained(engine: str, rule: hw.Rule, model: nn.Module, divide: Any, **options: Any) -> tuple[dict[str, Tensor], Any]:
    """Parameters after some steps, and what the repulsion recorded of the last."""
    model = divide(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    repulsion = hw.repel(optimizer, hw.find_heads(model), rule, seed=11, **options)
    for step in range(STEPS):
        # ranks that have drawn different amounts of randomness draw the same noise all the same
        torch.rand(step + (dist.get_rank() if engine != "alone" else 0))
        optimizer.zero_grad()
        (model(batch(engine, step)) - 1.0).square().mean().backward()
        if options.get("when") == "manual":
            repulsion.apply()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    repulsion.verify(optimizer)
    return gathered(model), repulsion.last


def assert_as_alone(engine: str, rule: str, make: Any, **options: Any) -> None:
    alone, expected = trained("alone", RULES[rule], make(), as_it_is, **options)
    together, found = trained(engine, RULES[rule], make(), ENGINES[engine], **options)
    for name, parameter in alone.items():
        torch.testing.assert_close(together[name], parameter, rtol=0.0, atol=1e-9, msg=lambda t, n=name: f"{n}: {t}")
    assert sorted(found.names) == sorted(expected.names)
    order = [expected.names.index(name) for name in found.names]
    for norm in ("drive_norm", "repulsion_norm", "particle_norm"):
        torch.testing.assert_close(getattr(found, norm), getattr(expected, norm)[order], rtol=1e-6, atol=1e-9)
    assert found.finite.all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("engine", ENGINES)
def test_repulsion_equals_one_process(two: Processes, engine: str, rule: str):
    two.run(assert_as_alone, engine, rule, made)
