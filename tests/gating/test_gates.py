"""The equations of gates and of their balance, against float64 loops, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import headwise as hw
from cases import cases
from headwise.errors import MaskError, SettingError, ShapeError
from headwise.gating import MixtureGates, SigmoidGates, balance, build_gates, mixture_gates, sigmoid_gates
from reference.gating import balance_loop, mixture_gates_loop, sigmoid_gates_loop

HEADS, SIZE, WIDTH, TOKENS = 5, 3, 4, 7
MIXTURES = {
    "no shared head": hw.gating.MixtureOfHeads(0, 2),
    "one shared head": hw.gating.MixtureOfHeads(1, 3),
    "two shared heads": hw.gating.MixtureOfHeads(2, 2),
    "all heads": hw.gating.MixtureOfHeads(2, None),
    "random choice": hw.gating.MixtureOfHeads(2, 2, routing="random"),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomize(gates: torch.nn.Module) -> None:
    """Draw every parameter and buffer, so that none is neutral."""
    for seed, tensor in enumerate((*gates.parameters(), *gates.buffers()), start=10):
        tensor.data.copy_(draw(*tensor.shape, seed=seed))


@cases("token", [True, False])
@cases(("per", "count"), [("head", HEADS), ("element", HEADS * SIZE)])
@cases("scale", [2.0, 0.7])
def test_sigmoid_gates_are_those_of_the_loop(token: bool, per: str, count: int, scale: float):
    gates = build_gates(hw.gating.SigmoidGate(per, token, scale), HEADS, SIZE, WIDTH).double()
    randomize(gates)
    assert isinstance(gates, SigmoidGates)
    x = draw(TOKENS, WIDTH, seed=1)
    weight = [[0.0] * WIDTH] * count if gates.weight is None else gates.weight.tolist()
    expected = [sigmoid_gates_loop(row, weight, gates.bias.tolist(), scale) for row in x.tolist()]
    found = gates(x).weights.expand(TOKENS, count)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0.0, atol=1e-14)


@cases("name", MIXTURES)
def test_mixture_gates_are_those_of_the_loop(name: str):
    setting = MIXTURES[name]
    gates = build_gates(setting, HEADS, SIZE, WIDTH).double()
    randomize(gates)
    assert isinstance(gates, MixtureGates)
    x = draw(TOKENS, WIDTH, seed=2)
    shared = [[0.0] * WIDTH] * setting.shared if gates.shared is None else gates.shared.tolist()
    kinds = [] if gates.kinds is None else gates.kinds.tolist()
    fixed = None if gates.fixed is None else gates.fixed.tolist()
    active = HEADS - setting.shared if setting.active is None else setting.active
    expected = [mixture_gates_loop(row, gates.routed.tolist(), shared, kinds, active, fixed) for row in x.tolist()]
    found = gates(x)
    torch.testing.assert_close(found.weights, torch.tensor(expected, dtype=torch.float64), rtol=0.0, atol=1e-14)
    assert (found.weights > 0).sum(-1).tolist() == [setting.shared + active] * TOKENS
    assert torch.equal(found.chosen, found.weights[:, setting.shared :] > 0)
    torch.testing.assert_close(found.shares, (x @ gates.routed.T).softmax(-1))


def test_of_equal_scores_the_first_heads_are_chosen():
    logits = torch.zeros(3, 64)
    logits[1, 40] = 1.0
    logits[2, :30] = -1.0
    chosen = mixture_gates(logits, None, None, active=3).chosen
    assert [row.nonzero().flatten().tolist() for row in chosen] == [[0, 1, 2], [0, 1, 40], [30, 31, 32]]


@cases("padded", [False, True])
def test_the_balance_is_that_of_the_loop(padded: bool):
    shares = draw(2, TOKENS, HEADS, seed=3).softmax(-1)
    chosen = draw(2, TOKENS, HEADS, seed=4) > 0.3
    keep = draw(2, TOKENS, seed=5) > -0.5 if padded else None
    valid = [True] * (2 * TOKENS) if keep is None else keep.flatten().tolist()
    expected = balance_loop(shares.flatten(0, 1).tolist(), chosen.flatten(0, 1).tolist(), valid)
    assert float(balance(shares, chosen, keep)) == pytest.approx(expected, rel=1e-13)
    assert not padded or 0 < sum(valid) < len(valid)


def test_padded_tokens_may_hold_anything_and_get_no_gradient():
    shares = draw(3, HEADS, seed=6).softmax(-1)
    chosen, keep = draw(3, HEADS, seed=7) > 0, torch.tensor([True, False, True])
    expected = balance(shares[keep], chosen[keep])
    held = shares.clone().index_fill(0, torch.tensor([1]), math.nan).requires_grad_()
    found = balance(held, chosen, keep)
    assert found == expected
    (slope,) = torch.autograd.grad(found, held)
    assert slope[1].tolist() == [0.0] * HEADS
    assert slope[0].isfinite().all()
    assert balance(shares, chosen, torch.zeros(3, dtype=torch.bool)) == 0.0


@cases("setting", [hw.gating.SigmoidGate(), hw.gating.SigmoidGate("element", scale=0.6), *MIXTURES.values()])
def test_gradients_are_those_of_differences(setting: hw.gating.SigmoidGate | hw.gating.MixtureOfHeads):
    gates = build_gates(setting, HEADS, SIZE, WIDTH).double()
    randomize(gates)
    names = [name for name, _ in gates.named_parameters()]
    x = draw(3, WIDTH, seed=8).requires_grad_()

    def compute(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        found = torch.func.functional_call(gates, dict(zip(names, parameters, strict=True)), (x,))
        if found.shares is None:
            return (found.weights,)
        # the choice has no gradient, and stays as it is in a small neighborhood
        return found.weights, balance(found.shares, found.chosen)

    assert torch.autograd.gradcheck(compute, (x, *gates.parameters()))


@cases("dtype", [torch.bfloat16, torch.float16])
def test_gates_of_half_precision_are_computed_in_single(dtype: torch.dtype):
    logits = draw(TOKENS, HEADS, seed=9).to(dtype)
    assert torch.equal(sigmoid_gates(logits).weights, sigmoid_gates(logits.float()).weights)
    found, expected = (mixture_gates(one, None, None, 2) for one in (logits, logits.float()))
    assert found.weights.dtype == torch.float32
    assert torch.equal(found.weights, expected.weights)


MIXED, SIGMOID = hw.gating.MixtureOfHeads, hw.gating.SigmoidGate


@cases(
    ("build", "error", "message"),
    [
        (lambda: SIGMOID("token"), SettingError, "per is 'token'; expected one of head, element"),
        (lambda: SIGMOID(token=1), SettingError, "token is 1; expected True or False"),
        (lambda: SIGMOID(scale=0.0), SettingError, r"scale is 0\.0"),
        (lambda: MIXED(1, 0), SettingError, "active is 0; expected an integer of at least 1"),
        (lambda: MIXED(-1, 2), SettingError, "shared is -1"),
        (lambda: MIXED(1, 2, routing="hash"), SettingError, "routing is 'hash'"),
        (lambda: MIXED(1, 2, balance=-0.1), SettingError, r"balance is -0\.1"),
        (lambda: build_gates(MIXED(5, None), 5, SIZE, WIDTH), SettingError, "uses 6 heads of an attention that has 5"),
        (lambda: build_gates(MIXED(2, 4), 5, SIZE, WIDTH), SettingError, "uses 6 heads of .*; lower shared or active"),
        (lambda: mixture_gates(torch.zeros(5), None, None, active=6), SettingError, "active is 6"),
        (lambda: mixture_gates(torch.zeros(5), torch.zeros(1), None, 2), ShapeError, "shared and kinds were not given"),
        (
            lambda: balance(torch.rand(2, 5), torch.ones(2, 5) > 0, torch.ones(3, dtype=torch.bool)),
            *(MaskError, r"keep has shape \(3,\); expected \(2,\)"),
        ),
    ],
)
def test_settings_and_shapes_that_do_not_fit_are_refused(build: Callable[[], object], error: type, message: str):
    with pytest.raises(error, match=message):
        build()
