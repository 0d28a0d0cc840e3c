"""A head slice reads and writes the rows, biases and features of its heads, in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.heads.head_slice import HeadSlice, check_head_slice


@pytest.mark.parametrize(
    ("start", "stride"), [(0, 3), (12, 3), (3, 9), (6, 9)], ids=["block", "last block", "interleaved", "last of three"]
)
@pytest.mark.parametrize("axis", [0, 1])
def test_features_are_the_outputs_that_the_rows_of_a_head_compute(start: int, stride: int, axis: int):
    torch.manual_seed(0)
    linear = nn.Linear(4, 18 if stride == 3 else 20).double()
    weight, bias = linear.weight.detach(), linear.bias.detach()
    owner = nn.Module()
    owner.weight = nn.Parameter(weight if axis == 0 else weight.T.contiguous())
    head_slice = HeadSlice("value", "weight", owner, "weight", 2, 3, start=start, stride=stride, axis=axis)
    x = torch.randn(5, 7, 4, dtype=torch.float64)
    output = linear(x).detach()
    features = head_slice.features(output)
    rows = head_slice.view(owner.weight.detach())
    rows = rows if axis == 0 else rows.transpose(1, 2)
    expected = torch.einsum("bld,hed->blhe", x, rows) + head_slice.bias_view(bias)
    torch.testing.assert_close(features, expected)
    assert features.data_ptr() == output.data_ptr() + start * output.element_size()


def test_features_write_through_carry_gradients_and_need_no_contiguous_tensor():
    linear = nn.Linear(4, 18)
    head_slice = HeadSlice("key", "weight", linear, "weight", 2, 3, start=3, stride=9)
    tensor = torch.zeros(18, 5).t().requires_grad_()
    (2.0 * head_slice.features(tensor)[:, 1]).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.sum(0).nonzero().flatten().tolist() == [12, 13, 14]
    assert tensor.grad.unique().tolist() == [0.0, 2.0]
    plain = torch.zeros(5, 18)
    head_slice.features(plain)[:, 0] = 1.0
    assert plain.sum(0).nonzero().flatten().tolist() == [3, 4, 5]


def test_features_of_another_width_are_refused_with_both_numbers():
    head_slice = HeadSlice("key", "attention.qkv.weight", nn.Linear(4, 18), "weight", 2, 3, start=6)
    with pytest.raises(hw.LayoutError, match=r"attention\.qkv\.weight: a tensor of shape \(5, 17\).*expected 18"):
        head_slice.features(torch.zeros(5, 17))


def test_a_slice_of_nothing_or_beyond_its_weight_is_refused():
    with pytest.raises(hw.LayoutError, match=r"a\.w of Linear is not a plain floating-point matrix \(found nothing\)"):
        check_head_slice(HeadSlice("key", "a.w", nn.Linear(4, 18), "w", 2, 3))
    owner = nn.Module()
    owner.weight = nn.Parameter(torch.zeros(6, 2, 2))
    with pytest.raises(hw.LayoutError, match=r"found torch\.float32 of shape \(6, 2, 2\)"):
        check_head_slice(HeadSlice("key", "weight", owner, "weight", 2, 3))
    linear = nn.Linear(4, 18)
    with pytest.raises(hw.LayoutError, match="6 heads of 3 rows from 3 every 3 do not fit the 18 of the weight"):
        check_head_slice(HeadSlice("key", "weight", linear, "weight", 6, 3, start=3))
    with pytest.raises(hw.LayoutError, match="2 heads of 3 rows from 0 every 2 do not fit"):
        check_head_slice(HeadSlice("key", "weight", linear, "weight", 2, 3, stride=2))
    check_head_slice(HeadSlice("key", "weight", linear, "weight", 6, 3))


def test_what_stands_in_the_way_of_a_weight_is_said_whenever_it_is_asked_for():
    head_slice = HeadSlice(
        "key", "k.weight", nn.Linear(4, 6), "weight", 2, 3, obstacle="is quantized; use the full weights"
    )
    assert head_slice.features(torch.zeros(5, 6)).shape == (5, 2, 3)
    for ask in (lambda: head_slice.parameter, lambda: head_slice.view(torch.zeros(6, 4))):
        with pytest.raises(hw.LayoutError, match=r"^k\.weight is quantized; use the full weights\.$"):
            ask()
