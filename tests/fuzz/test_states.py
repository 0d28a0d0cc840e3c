"""Mutated states of handles, as checkpoints keep them: taken or refused in a sentence, and then nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw
from fuzz.mutate import INPUTS, fuzz, mutate_json
from headwise.attached import Attached
from headwise.errors import SettingError
from headwise.input_files import parse_json


def make() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def repulsion(rule: Any, model: nn.Module) -> hw.repulsion.Repulsion:
    return hw.repel(hw.find_heads(model), rule, torch.optim.SGD(model.parameters(), lr=0.1))


def penalty(strength: Any, model: nn.Module) -> hw.Disagreement:
    return hw.Disagreement(hw.find_heads(model), hw.similarity.CKA(), strength=strength)


def attached(model: nn.Module) -> Attached:
    methods = hw.attached.Attached(
        [hw.Repel(hw.SVGD(alpha=hw.Target(2.0))), hw.Penalize(hw.similarity.Output(), weight=hw.Relative(0.2))]
    )
    methods.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return methods


HANDLES: dict[str, Callable[[nn.Module], Any]] = {
    "repulsion with noise": lambda model: repulsion(hw.SPOS(alpha=0.4, inverse_temperature=9.0, step_size=0.6), model),
    "repulsion with a target": lambda model: repulsion(hw.SVGD(alpha=hw.Target(2.0)), model),
    "penalty with a share": lambda model: penalty(hw.Relative(0.2), model),
    "penalty with a target": lambda model: penalty(hw.Target(2.0), model),
    "integrations": attached,
}


def train(model: nn.Module, handle: Any) -> None:
    """Two steps, after which controllers and weights have values."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for seed in (1, 2):
        x = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(seed))
        loss = model(x).square().mean()
        add = getattr(handle, "loss", None)
        (loss if add is None else add(loss)).backward()
        optimizer.zero_grad()


@pytest.mark.parametrize("inputs", [100, pytest.param(INPUTS, marks=pytest.mark.slow)])
def test_a_mutated_state(inputs: int, tmp_path: Path):
    for name in HANDLES:
        fuzz_state(name, inputs, tmp_path)


def fuzz_state(name: str, inputs: int, tmp_path: Path) -> None:
    model = make().train()
    handle = HANDLES[name](model)
    train(model, handle)
    path = tmp_path / "state.json"
    path.write_text(json.dumps(handle.state_dict()))

    def read() -> None:
        try:
            state = parse_json(path.read_bytes())
        except ValueError as error:
            raise SettingError("no JSON") from error
        before = json.dumps(handle.state_dict())
        try:
            handle.load_state_dict(state)
        except SettingError:
            assert json.dumps(handle.state_dict()) == before
            raise
        # no NaN came in
        json.dumps(handle.state_dict(), allow_nan=False)

    tally = fuzz(read, path, mutate=mutate_json, inputs=inputs)
    assert tally.read > inputs // 50, name
    assert tally.refused > inputs // 4, name
