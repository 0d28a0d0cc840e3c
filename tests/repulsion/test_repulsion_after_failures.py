"""A step that raised: what comes next is acted on once, whether it is a retry or new gradients."""

from __future__ import annotations

import gc
import weakref
from types import MethodType

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import headwise as hw
from heads.attentions import SeparateAttention
from repulsion.by_hand import RULE, assert_as_by_hand, loss_of, model_with_gradients, repel_by_hand

RATE = 0.5
NOISY = hw.SPOS(alpha=0.4, inverse_temperature=9.0, step_size=0.6)


class Flaky(SGD):
    """An optimizer that runs out of memory in its first step."""

    failures = 1

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        if self.failures > 0:
            self.failures -= 1
            raise MemoryError("out of memory")
        return super().step()


class Thin(Flaky):
    """A class whose step calls its parent's, which has hooks of its own, after work of its own on the gradients."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0)
                    parameter.grad = parameter.grad.clone()
        return super().step(closure)


def fails(step) -> None:
    with pytest.raises(MemoryError):
        step()


@pytest.mark.parametrize("kind", [Flaky, Thin])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_new_gradients_after_a_step_that_raised_are_acted_on(kind, set_to_none):
    SGD([nn.Parameter(torch.zeros(1))])
    Flaky([nn.Parameter(torch.zeros(1))])

    def loop(model, repel, edit):
        optimizer = kind(model.parameters(), lr=RATE)
        repel(optimizer)
        loss_of(model, 0).backward()
        fails(optimizer.step)
        for step in (1, 2):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, step).backward()
            edit()
            optimizer.step()

    assert_as_by_hand(loop)


def test_gradients_assigned_by_hand_after_a_step_that_raised_are_acted_on():
    def loop(model, repel, edit):
        optimizer = Flaky(model.parameters(), lr=RATE)
        repel(optimizer)
        for step in (0, 1):
            gradients = torch.autograd.grad(loss_of(model, step), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            if step == 0:
                fails(optimizer.step)
            else:
                edit()
                optimizer.step()

    assert_as_by_hand(loop)


def test_a_closure_after_a_step_that_raised_is_wrapped_again():
    def loop(model, repel, edit):
        optimizer = Flaky(model.parameters(), lr=RATE)
        repel(optimizer)

        def closure():
            optimizer.zero_grad()
            loss_of(model, 0).backward()
            edit()

        fails(lambda: optimizer.step(closure))
        optimizer.step(closure)

    assert_as_by_hand(loop)


def run_with_a_retry(rule, when: str, noise: str, *, failing: bool):
    """Parameters after two steps, the first of which is tried twice where `failing`; the handle; the gradients."""
    torch.manual_seed(0)
    model = SeparateAttention()
    optimizer = Flaky(model.parameters(), lr=RATE)
    optimizer.failures = int(failing)
    handle = hw.repel(hw.find_heads(model), rule, optimizer, when=when, noise=noise, seed=5)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if when == "manual":
            handle.apply()
        try:
            optimizer.step()
        except MemoryError:
            optimizer.step()  # inside the handler, while the failed step's frames are alive
    return handle, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "rule", [RULE, hw.SPOS(alpha=0.4, inverse_temperature=9.0, step_size=0.6)], ids=["svgd", "spos"]
)
@pytest.mark.parametrize("when", ["step", "manual"])
@pytest.mark.parametrize("noise", ["step", "apply"])
def test_the_same_gradients_tried_again_are_not_acted_on_twice_and_have_their_noise_once(rule, when, noise):
    whole, expected = run_with_a_retry(rule, when, noise, failing=False)
    retried, found = run_with_a_retry(rule, when, noise, failing=True)
    assert retried.steps == whole.steps == 2
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_scaler_and_a_patched_step_stand_between_and_change_nothing():
    def loop(model, repel, edit):
        optimizer = Flaky(model.parameters(), lr=RATE)
        repel(optimizer)
        # what accelerate does to know whether a step was skipped
        step = type(optimizer).step
        optimizer.step = MethodType(step, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        scaler.scale(loss_of(model, 0)).backward()
        fails(lambda: scaler.step(optimizer))
        scaler.update()
        for index in (1, 2):
            optimizer.zero_grad(set_to_none=index == 1)
            scaler.scale(loss_of(model, index)).backward()
            scaler.unscale_(optimizer)
            edit()
            scaler.step(optimizer)
            scaler.update()

    assert_as_by_hand(loop)


def test_applied_gradients_of_a_skipped_step_make_way_for_those_of_the_next_backward():
    results = []
    for how in ("by hand", "repelled"):
        torch.manual_seed(0)
        model = SeparateAttention().double()
        optimizer = SGD(model.parameters(), lr=RATE)
        handle = hw.repel(hw.find_heads(model), RULE, optimizer, when="manual") if how == "repelled" else None
        for step in range(3):
            loss_of(model, step).backward()
            repel_by_hand(model) if handle is None else handle.apply()
            if step != 1:  # the loop found an overflow, say
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        results.append(model.q_proj.weight.detach())
    torch.testing.assert_close(*results)


def test_an_optimizer_that_is_dropped_is_freed_though_its_parameters_live_on():
    model = model_with_gradients()
    optimizer = AdamW(model.parameters(), lr=RATE)
    handle = hw.repel(hw.find_heads(model), RULE, optimizer)
    optimizer.step()
    watched = weakref.ref(optimizer)
    del optimizer, handle
    gc.collect()
    assert watched() is None
    loss_of(model, 0).backward()


def test_removal_takes_the_hooks_off_the_parameters_too():
    model = model_with_gradients()
    handle = hw.repel(hw.find_heads(model), RULE, SGD(model.parameters(), lr=RATE))
    assert len(model.q_proj.weight._post_accumulate_grad_hooks) == 1
    handle.remove()
    assert not model.q_proj.weight._post_accumulate_grad_hooks
