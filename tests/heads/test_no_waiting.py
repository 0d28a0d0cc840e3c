"""No forward and no step waits for the device or copies to it: on an accelerator each would stop the host.

What a model does on its own is not counted: torch and transformers look at the values of masks. That a model is one
graph whatever is attached is in `test_compiled`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw
from cases import cases, thin, tiers
from heads.test_compiled import HEADS, METHODS, MODELS, TOKENS, WIDTH, inputs_of, mask_of, output_of
from headwise.repulsion import step
from repulsion.launches import Launches, Waits

MORE: dict[str, Callable[[hw.Heads], Any]] = {
    "three terms": lambda heads: hw.Disagreement(
        heads, hw.similarity.Output() + hw.similarity.Subspace() + hw.similarity.Position()
    ),
    "kernels": lambda heads: hw.Disagreement(
        heads, hw.similarity.CKA() + hw.similarity.HSIC() + hw.similarity.CrossCorrelation()
    ),
    "determinant": lambda heads: hw.Disagreement(heads, hw.similarity.LogDeterminant() + hw.similarity.SquaredCosine()),
    "parameters": lambda heads: hw.Disagreement(heads, hw.similarity.SpanOverlap() + hw.similarity.MapCosine()),
    "gates": lambda heads: hw.gate_heads(heads, hw.gating.SigmoidGate()),
    "mixture": lambda heads: hw.gate_heads(heads, hw.gating.MixtureOfHeads(shared=1, active=2)),
    "talking heads": hw.mix_heads,
}
EVERY = METHODS | MORE


def train(model: nn.Module, handle: Any, inputs: dict[str, Any]) -> None:
    loss = output_of(model(**inputs)).square().mean()
    if isinstance(handle, hw.Disagreement):
        loss = loss + handle()
    if isinstance(handle, hw.Taps):
        handle.read()
    loss.backward()
    model.zero_grad()


def count_waits(name: str, attach: Callable[[hw.Heads], Any]) -> Counter[str]:
    """Return what a second step waits for: the first may move and make what stays."""
    model = MODELS[name]()
    handle = attach(hw.find_heads(model))
    inputs = inputs_of(model)
    mask = mask_of()
    guided = isinstance(handle, hw.roles.Guidance) and not handle.every_forward
    for _ in range(2):
        if guided:
            handle(mask)
        with Waits() as waits:
            train(model, handle, inputs)
    return waits.counts


@tiers(("name", "method"), *thin([(name, method) for name in MODELS for method in EVERY], 6))
def test_a_forward_and_its_backward_wait_for_nothing(name: str, method: str):
    assert count_waits(name, EVERY[method]) <= count_waits(name, EVERY["nothing"])


def test_a_forward_that_takes_numbers_from_the_host_is_seen():
    def attach(heads: hw.Heads) -> Any:
        return hw.bias_heads(heads, lambda _site, call: torch.tensor([1.0] * call.keys).expand(1, 1, 1, -1))

    assert not count_waits("torch", attach) <= count_waits("torch", EVERY["nothing"])


class Bare(nn.Module):
    """Two attentions and nothing else, which run on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for attention in (self.first, self.second):
            x = x + attention(x, x, x, need_weights=False)[0]
        return x


@cases("method", ["bias", "ablate", "taps", "guide every forward", "penalty", "gate"])
def test_what_was_given_on_another_device_is_moved_once(method: str):
    model = Bare()
    _ = EVERY[method](hw.find_heads(model))
    model.to("meta")
    x = torch.randn(2, TOKENS, WIDTH, device="meta")
    model(x)
    with Launches():
        model(x)


def test_a_bias_changed_in_place_or_trained_is_moved_again():
    bias = torch.zeros(1, HEADS, 1, TOKENS)
    handle = hw.bias_heads(hw.find_heads(Bare()), bias)
    meta = torch.device("meta")
    first = handle._move(bias, meta)
    assert handle._move(bias, meta) is first
    bias.add_(1.0)
    assert handle._move(bias, meta) is not first
    trained = bias.clone().requires_grad_()
    assert handle._move(trained, meta) is not handle._move(trained, meta)


@cases("name", MODELS)
@cases("rule", [hw.SVGD(), hw.SVGD(kernel=hw.kernels.NormalizedRBF()), hw.repulsion.CosineRepulsion()])
def test_an_optimizer_step_with_repulsion_waits_for_nothing(name: str, rule: Any, monkeypatch: pytest.MonkeyPatch):
    # as on an accelerator
    monkeypatch.setattr(step, "stacks_on", lambda _device: True)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    repulsion = hw.repel(hw.find_heads(model), rule, optimizer)
    output_of(model(**inputs_of(model))).square().mean().backward()
    optimizer.step()
    with Launches():
        optimizer.step()
    assert repulsion.steps == 2
