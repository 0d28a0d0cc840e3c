"""Attention that hands its weights to torch's function: its projections are called, and nothing else changes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import headwise as hw
from heads.families import FAMILIES
from heads.wrappers import LoraLinear

X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))


class FunctionalAttention(nn.Module):
    """WavLM's attention without its positions: fairseq's, which calls no projection."""

    def __init__(self, width: int = 12, num_heads: int = 3) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        x = x.transpose(0, 1)
        output, _ = F.multi_head_attention_forward(
            x,
            x,
            x,
            x.shape[-1],
            self.num_heads,
            torch.empty([0]),
            torch.cat((self.q_proj.bias, self.k_proj.bias, self.v_proj.bias)),
            None,
            None,
            False,
            0.0,
            self.out_proj.weight,
            self.out_proj.bias,
            self.training,
            key_padding_mask,
            use_separate_proj_weight=True,
            q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
        )
        return output.transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_attached_reads_batches_and_changes_no_bit(dtype: torch.dtype):
    model, x = FunctionalAttention().to(dtype), X.to(dtype)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    plain = model(x, padding)
    plain.float().square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with hw.Taps(hw.find_heads(model), outputs=True, values=True) as taps:
        tapped = model(x, padding)
        (capture,) = taps.read()
    assert torch.equal(tapped, plain)
    tolerance = {"atol": 4e-3, "rtol": 5e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(model.v_proj(x).unflatten(-1, (3, 4)), capture.values, **tolerance)
    torch.testing.assert_close(model.out_proj(capture.outputs.flatten(2)), plain, **tolerance)
    assert torch.equal(capture.key_keep, ~padding)
    tapped.float().square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, **tolerance)


def test_a_head_is_removed_where_its_outputs_reach_w_o():
    model = FunctionalAttention().eval()
    with hw.ablate(hw.find_heads(model), 1):
        without = model(X)
    with torch.no_grad():
        model.out_proj.weight[:, 4:8] = 0.0
    torch.testing.assert_close(model(X), without)


def test_copies_pickles_and_failed_forwards_leave_no_trace():
    model = FunctionalAttention()
    [site.expose() for site in hw.find_heads(model)]
    expected = model(X)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X), expected)
        assert len(hw.verify(hw.find_heads(twin), (X,)).sites) == 1
        with hw.Taps(hw.find_heads(twin), outputs=True) as taps:
            twin(X)
            assert len(taps.read()) == 1
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 6, 12)[..., :11])
    assert _get_current_function_mode_stack() == []


def test_a_wrapped_projection_whose_adapter_the_function_never_saw_stays_unseen():
    model = FunctionalAttention()
    model.v_proj = LoraLinear(model.v_proj)
    nn.init.normal_(model.v_proj.lora_B["default"].weight)
    plain = model(X)
    with hw.Taps(hw.find_heads(model), values=True) as taps:
        assert torch.equal(model(X), plain)
        with pytest.raises(hw.errors.NotFired, match="its values were not computed in the call"):
            taps.read()


def test_nothing_takes_the_place_of_a_w_o_that_is_not_called():
    model = next(family for family in FAMILIES if family.name == "WavLM").build()
    with pytest.raises(
        hw.errors.LayoutError, match=r"encoder\.layers\.0\.attention \(WavLMAttention\) hands the weight of"
    ):
        hw.aggregate(hw.find_heads(model), hw.routing.Residual(hw.routing.Trunk()))
