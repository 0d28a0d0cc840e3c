"""A head slice reads and writes the rows, biases and features of its heads, in place."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from cases import cases
from headwise.heads.view import COLUMNS, ROWS, HeadAxes, HeadView, check_head_views


# one head after another, with something between them, or feature by feature
@cases(("start", "stride", "step"), [(0, 2, 1), (18, 2, 1), (3, 9, 1), (0, 1, 3), (3, 1, 9), (1, 9, 3)])
@cases("axis", [0, 1])
def test_features_are_the_outputs_that_the_rows_of_a_head_compute(start: int, stride: int, step: int, axis: int):
    torch.manual_seed(0)
    linear = nn.Linear(4, 27).double()
    owner = held(linear.weight.detach() if axis == 0 else linear.weight.detach().T.contiguous())
    settings = {"start": start, "stride": stride, "step": step, "axes": COLUMNS if axis else ROWS}
    head_slice = HeadView("value", "weight", owner, "weight", 3, 2, **settings)
    check_head_views([head_slice])
    x = torch.randn(5, 7, 4, dtype=torch.float64)
    output = linear(x)
    features = head_slice.features(output)
    expected = torch.einsum("bld,hed->bhle", x, head_slice.read().mT if axis else head_slice.read()).transpose(1, 2)
    torch.testing.assert_close(features, expected + head_slice.bias_view(linear.bias))
    assert features.data_ptr() == output.data_ptr() + start * output.element_size()
    (own,) = torch.autograd.grad(features[:, :, 1].sum(), output)
    assert own.sum((0, 1)).nonzero().flatten().tolist() == [start + stride, start + stride + step]


def test_features_write_through_carry_gradients_and_need_no_contiguous_tensor():
    linear = nn.Linear(4, 18)
    head_slice = HeadView("key", "weight", linear, "weight", 2, 3, start=3, stride=9)
    tensor = torch.zeros(18, 5).t().requires_grad_()
    (2.0 * head_slice.features(tensor)[:, 1]).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.sum(0).nonzero().flatten().tolist() == [12, 13, 14]
    assert tensor.grad.unique().tolist() == [0.0, 2.0]
    plain = torch.zeros(5, 18)
    head_slice.features(plain)[:, 0] = 1.0
    assert plain.sum(0).nonzero().flatten().tolist() == [3, 4, 5]


def held(tensor: Tensor) -> nn.Module:
    owner = nn.Module()
    owner.weight = nn.Parameter(tensor)
    return owner


# how 3 heads of 2 features on 5 inputs lie in a parameter, and the same heads as [M, e, d] or [M, d, e]
ARRANGED = {
    "[H, d, e]": ((3, 5, 2), {"axes": HeadAxes(0, 2, 1, 0)}, lambda w: w),
    "[H, e, d]": ((3, 2, 5), {"axes": HeadAxes(0, 1, 2, 0)}, lambda w: w),
    "[d, H, e]": ((5, 3, 2), {"axes": HeadAxes(1, 2, 0, 1)}, lambda w: w.transpose(0, 1)),
    "[e, d, H]": ((2, 5, 3), {"axes": HeadAxes(2, 0, 1, 2)}, lambda w: w.permute(2, 0, 1)),
    "[4, d, H, e], the third": (
        (4, 5, 3, 2),
        {"axes": HeadAxes(2, 3, 1, 0), "start": 2},
        lambda w: w[2].transpose(0, 1),
    ),
    "[d, 4, H e], the third": (
        (5, 4, 6),
        {"axes": HeadAxes(2, 2, 0, 1), "start": 2},
        lambda w: w[:, 2].unflatten(1, (3, 2)).transpose(0, 1),
    ),
    "rows (e h)": ((6, 5), {"stride": 1, "step": 3}, lambda w: w.unflatten(0, (2, 3)).transpose(0, 1)),
    "columns (e h)": (
        (5, 6),
        {"axes": COLUMNS, "stride": 1, "step": 3},
        lambda w: w.unflatten(1, (2, 3)).permute(2, 0, 1),
    ),
    "rows (e 4 h), the third": (
        (24, 5),
        {"start": 6, "stride": 1, "step": 12},
        lambda w: w.unflatten(0, (2, 4, 3))[:, 2].transpose(0, 1),
    ),
}


@cases("transposed", [False, True])
@cases("arranged", ARRANGED)
def test_heads_of_any_strides_are_viewed_in_place(arranged: str, transposed: bool):
    shape, settings, expected = ARRANGED[arranged]
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    if transposed:
        tensor = tensor.mT.contiguous().mT
    owner = held(tensor)
    head_slice = HeadView("query", "w", owner, "weight", 3, 2, **settings)
    check_head_views([head_slice])
    view = head_slice.of(tensor)
    assert view.shape == ((3, 5, 2) if head_slice.transposed else (3, 2, 5))
    torch.testing.assert_close(view, expected(tensor))
    torch.testing.assert_close(head_slice.read(), expected(tensor))
    view[1] = -1.0
    assert int((tensor == -1.0).sum()) == 10
    assert bool((expected(tensor)[1] == -1.0).all())


def test_a_bias_of_several_axes_is_read_as_its_weight_is():
    bias = torch.arange(12.0).view(2, 3, 2)
    head_slice = HeadView("key", "w", held(torch.zeros(3, 5, 2)), "weight", 3, 2, axes=HeadAxes(0, 2, 1, 0))
    torch.testing.assert_close(head_slice.bias_view(bias[0]), bias[0])
    second = replace(head_slice, bias_start=6, bias_stride=2)
    torch.testing.assert_close(second.bias_view(bias), bias[1])


def test_a_stack_reads_heads_that_are_parameters_of_their_own():
    linears = nn.ModuleList([nn.Linear(5, 2) for _ in range(3)])
    members = [HeadView("query", f"{i}.weight", linear, "weight", 1, 2) for i, linear in enumerate(linears)]
    stack = HeadView.stack("heads.*.weight", linears, members)
    check_head_views([stack])
    assert (stack.heads, stack.head_size, stack.across, stack.module, stack.transposed) == (3, 2, 5, None, False)
    torch.testing.assert_close(stack.read(), torch.stack([linear.weight.detach() for linear in linears]))
    assert stack.map(lambda member: replace(member, run=1)).parts[2].owner is linears[2]
