"""Tensors given to `save` instead of the model's: under its names, in its shapes, and all of them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headwise as hw


def test_averaged_weights_are_written_under_the_models_names_and_refused_under_others(tmp_path: Path):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    hw.aggregate(hw.find_heads(encoder), hw.routing.SimpleRouting())
    averaged = torch.optim.swa_utils.AveragedModel(encoder)
    with torch.no_grad():
        averaged.update_parameters(encoder)
        for parameter in encoder.parameters():
            parameter.add_(0.5)
    with pytest.raises(hw.errors.DataError, match=r"not in the model; .*strip a prefix such as 'module\.'"):
        hw.save(encoder, tmp_path / "averaged", state_dict=averaged.state_dict())
    assert not (tmp_path / "averaged").exists()
    hw.save(encoder, tmp_path / "averaged", state_dict=averaged.module.state_dict())
    again = hw.load(tmp_path / "averaged", copy.deepcopy(encoder))
    for one, own, mean in zip(again.parameters(), encoder.parameters(), averaged.module.parameters(), strict=True):
        assert torch.equal(one, mean)
        assert not torch.equal(one, own)


class WithBuffers(nn.Module):
    """An attention beside a tied weight, a buffer that no state dict holds, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.register_buffer("places", torch.arange(3.0), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_a_given_state_dict_has_every_tensor_of_the_model_and_no_other(tmp_path: Path):
    model = WithBuffers()
    hw.aggregate(hw.find_heads(model), hw.routing.Trunk())
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "one.weight"}
    doubled = {name: 2 * tensor if isinstance(tensor, Tensor) else tensor for name, tensor in state.items()}
    hw.save(model, tmp_path, state_dict=doubled)
    again = hw.load(tmp_path, copy.deepcopy(model))
    assert torch.equal(again.get_parameter("one.weight"), 2 * model.one.weight)
    assert torch.equal(again.get_buffer("places"), model.get_buffer("places"))
    first = "layer.linear1.weight"
    for wrong, message in (
        ({}, r"fit WithBuffers: \[.*\] \(\d+\) are missing and \[\] \(0\)"),
        ({name: tensor for name, tensor in state.items() if name != first}, rf"\['{first}'\] \(1\) are missing"),
        ({**state, "bogus": torch.zeros(3)}, r"\['bogus'\] \(1\) are not in the model"),
        ({**state, first: torch.zeros(3)}, rf"{first} has shape \(3,\) in state_dict and \(16, 8\) in the model"),
    ):
        with pytest.raises(hw.errors.DataError, match=message):
            hw.save(model, tmp_path / "wrong", state_dict=wrong)
    assert not (tmp_path / "wrong").exists()
