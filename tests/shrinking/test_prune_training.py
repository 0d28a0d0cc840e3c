"""Training goes on after heads were removed: as it would with these heads ablated."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases, thin, tiers
from heads.families import FAMILIES
from heads.family import Family
from shrinking.cutting import evenly, lift, named, only

OPTIMIZERS: dict[str, Callable] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True, amsgrad=True),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5, centered=True, eps=1e-3),
}


def train(model: nn.Module, inputs: dict[str, Tensor], optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(**inputs)[0].square().mean().backward()
        optimizer.step()


@tiers("family", *thin(named(FAMILIES, "BERT", "GPT-2", "Llama", "ALBERT"), 4))
@cases("optimizer", OPTIMIZERS)
def test_steps_after_the_cut_are_those_of_the_ablated_model(family: Family, optimizer: str):
    model: Any = family.build()
    inputs = lift(model, family.inputs())
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    own = OPTIMIZERS[optimizer](model.parameters())
    train(model, inputs, own, 3)
    twin = copy.deepcopy(model)
    other = OPTIMIZERS[optimizer](twin.parameters())
    other.load_state_dict(copy.deepcopy(own.state_dict()))

    heads = hw.find_heads(model)
    removed = evenly(heads)
    hw.prune(heads, removed, optimizer=own)
    train(model, inputs, own, 3)
    kept = hw.find_heads(twin)
    with ExitStack() as stack:
        for site in kept:
            stack.enter_context(hw.ablate(only(kept, site), removed[site.name]))
        train(twin, inputs, other, 3)

    for state in own.state.values():
        assert all(value.dim() in (0, 1, 2) for value in state.values() if isinstance(value, Tensor))
    # the pooler, which the loss does not reach, has none
    for parameter in (parameter for parameter in model.parameters() if own.state[parameter]):
        shapes = {value.shape for value in own.state[parameter].values() if isinstance(value, Tensor) and value.dim()}
        assert shapes == {parameter.shape}
    # cut, the trained twin is the trained model
    kept = hw.find_heads(twin)
    hw.prune(kept, removed)
    for (name, one), two in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9, msg=name)


def test_averages_over_an_axis_keep_what_stays_of_the_other():
    from transformers.optimization import Adafactor

    def build() -> tuple[Any, dict[str, Tensor]]:
        family = named(FAMILIES, "BERT")[0]
        return family.build(), family.inputs()

    for make in (
        lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
        lambda parameters: Adafactor(parameters, scale_parameter=False, relative_step=False, lr=1e-2),
    ):
        model, inputs = build()
        own = make(model.parameters())
        train(model, inputs, own, 2)
        attention = model.encoder.layer[0].attention
        before = {
            name: {key: value.clone() for key, value in own.state[weight].items() if isinstance(value, Tensor)}
            for name, weight in (("rows", attention.self.query.weight), ("columns", attention.output.dense.weight))
        }
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hw.prune(hw.find_heads(model), {0: [1]}, optimizer=own)
        keep = [row for row in range(32) if not 8 <= row < 16]
        for name, weight in (("rows", attention.self.query.weight), ("columns", attention.output.dense.weight)):
            for key, value in own.state[weight].items():
                if not isinstance(value, Tensor) or value.numel() == 1:
                    continue
                row = "row" in key
                expected = before[name][key]
                if row == (name == "rows"):
                    expected = expected.flatten()[keep].view(value.shape)
                torch.testing.assert_close(value, expected, rtol=0, atol=0)
        train(model, inputs, own, 2)
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_state_that_has_no_entries_of_rows_is_dropped_with_a_warning():
    family = named(FAMILIES, "BERT")[0]
    model: Any = family.build()
    inputs = family.inputs()
    own = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    train(model, inputs, own, 1)
    weight = model.encoder.layer[0].attention.self.query.weight
    own.state[weight]["basis"] = torch.eye(32)[:, :31]
    with pytest.warns(
        UserWarning, match=r"keeps a state of 1 parameters \(encoder.layer.0.attention.self.query.weight"
    ):
        hw.prune(hw.find_heads(model), {0: [1]}, optimizer=own)
    assert weight not in own.state
    assert own.state[model.encoder.layer[0].attention.self.key.weight]["momentum_buffer"].shape == (24, 32)
    train(model, inputs, own, 1)


def test_a_loss_of_before_may_still_be_alive():
    family = named(FAMILIES, "BERT")[0]
    model: Any = family.build()
    inputs = family.inputs()
    loss = model(**inputs)[0].square().mean()
    hw.prune(hw.find_heads(model), {0: [1]})
    model(**inputs)[0].square().mean().backward()
    assert model.encoder.layer[0].attention.self.query.weight.grad.shape == (24, 32)
    assert loss.grad_fn is not None
