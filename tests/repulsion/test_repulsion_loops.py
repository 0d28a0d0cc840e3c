"""Repulsion in the loops people have equals the same loop with the rule's gradients written in by hand.

Also under optimizers of other libraries, by stand-ins of their shape (8-bit, schedule-free, Lightning's), and after a
step that raised: what comes next is acted on once, whether it is a retry or new gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Muon, Optimizer
from torch.utils.checkpoint import checkpoint

import headwise as hw
from cases import cases, thin, tiers
from heads.attentions import SeparateAttention
from repulsion.by_hand import RULE, assert_as_by_hand, batch, loss_of, repel_by_hand, run, trained

STEPS, RATE = 4, 0.05


def call(closure: Callable[[], Tensor] | None) -> Tensor | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class OwnOptimizer(Optimizer):
    """What a user writes: sign descent, with nothing of torch's own optimizers."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = call(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign() * parameter.grad.abs().sqrt(), alpha=group["lr"])
        return loss


class OwnAdamW(AdamW):
    """A step that calls its parent's: torch hooks both, as soon as anybody has made an AdamW."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                # rebound, as gradient centralization is often written
                parameter.grad = None if parameter.grad is None else 1.1 * parameter.grad
        return super().step(closure)


class CallsClosure(AdamW):
    """A step that calls the closure itself, and then its parent's step."""

    def step(self, closure=None):
        loss = call(closure)
        super().step()
        return loss


class EightBit(Optimizer):
    """As bitsandbytes has it: a torch optimizer whose moment is kept in uint8 with one scale, made in its step."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = call(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"moment": torch.full_like(parameter, 128, dtype=torch.uint8), "scale": torch.ones(())}
                moment = (state["moment"].to(parameter.dtype) - 128.0) / 127.0 * state["scale"]
                moment = 0.9 * moment + parameter.grad
                state["scale"] = scale = moment.abs().max()
                state["moment"] = (moment / scale * 127.0).round().add(128.0).to(torch.uint8)
                parameter.sub_(moment, alpha=group["lr"])
        return loss


class ScheduleFree(Optimizer):
    """As schedulefree has it: parameters are moved to an average and back, by `eval` and `train`."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr, "train_mode": True, "k": 0})

    def move(self, weight: float, train: bool) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.lerp_(self.state[parameter]["z"], weight)
            group["train_mode"] = train

    def train(self) -> None:
        self.move(1.0 - 0.9, True)

    def eval(self) -> None:
        self.move(1.0 - 1.0 / 0.9, False)

    @torch.no_grad()
    def step(self, closure=None):
        assert all(group["train_mode"] for group in self.param_groups)
        loss = call(closure)
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, 1.0 / group["k"])
                parameter.add_(parameter.grad, alpha=group["lr"] * (0.9 * (1.0 - 1.0 / group["k"]) - 1.0))
                z.sub_(parameter.grad, alpha=group["lr"])
        return loss


OPTIMIZERS = {
    "AdamW loop": partial(AdamW, foreach=False, fused=False),
    "AdamW foreach": partial(AdamW, foreach=True),
    "AdamW fused": partial(AdamW, fused=True),
    "AdamW capturable rate": lambda p, lr: AdamW(p, lr=torch.tensor(lr), foreach=False),
    "SGD momentum": partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": partial(LBFGS, max_iter=3, history_size=2),
    "own": OwnOptimizer,
    "own AdamW": OwnAdamW,
    "8-bit": EightBit,
    "schedule-free": ScheduleFree,
    "calls the closure": CallsClosure,
}


@tiers("closure", [""], ["given", "keyword"])
@cases("name", OPTIMIZERS)
def test_every_optimizer_steps_on_the_rules_gradients(name, closure):
    if not closure and name in ("LBFGS", "calls the closure"):
        closure = "given"
    AdamW([nn.Parameter(torch.zeros(1))])  # from now on torch calls hooks in AdamW.step too

    def loop(model, repel, edit):
        optimizer = OPTIMIZERS[name](list(model.parameters()), lr=RATE)
        repel(optimizer)

        def turn() -> None:
            if name == "schedule-free":
                optimizer.eval()
                optimizer.train()

        run(model, optimizer, edit, closure=closure, set_to_none=closure != "keyword", after=turn)

    # in eight bits a rounding may fall to the other side
    tolerance = {"8-bit": {"rtol": 1e-3, "atol": 1e-3}, "LBFGS": {"rtol": 1e-6, "atol": 1e-8}}
    assert_as_by_hand(loop, **tolerance.get(name, {}))


def scheduled(model, repel, edit, *, repel_first):
    optimizer = AdamW(model.parameters(), lr=RATE)
    if repel_first:
        repel(optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=STEPS)
    if not repel_first:
        repel(optimizer)
    run(model, optimizer, edit, after=scheduler.step)


def accumulated(model, repel, edit, *, set_to_none):
    optimizer = SGD(model.parameters(), lr=RATE, momentum=0.9)
    repel(optimizer)
    for step in range(3 * STEPS):
        (loss_of(model, step) / 3).backward()
        if step % 3 == 2:
            edit()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)


def clipped(model, repel, edit):
    optimizer = SGD(model.parameters(), lr=RATE)
    repel(optimizer)
    run(model, optimizer, edit, before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def checkpointed(model, repel, edit, *, reentrant):
    optimizer = AdamW(model.parameters(), lr=RATE)
    repel(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step, model).requires_grad_()
        (checkpoint(model, x, use_reentrant=reentrant) - 1.0).square().mean().backward()
        edit()
        optimizer.step()


def compiled(model, repel, edit, *, repel_first):
    optimizer = AdamW(model.parameters(), lr=RATE)
    if repel_first:
        repel(optimizer)
    called = torch.compile(model, backend="aot_eager")
    for step in range(STEPS):
        optimizer.zero_grad()
        (called(batch(step, model)) - 1.0).square().mean().backward()
        if step == 0 and not repel_first:
            repel(optimizer)
        edit()
        optimizer.step()


def moved_by_swapping(model, repel, edit):
    optimizer = SGD(model.parameters(), lr=0.5)
    repel(optimizer)

    def move() -> None:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.to(torch.float32).to(torch.float64)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    run(model, optimizer, edit, steps=3, after=move)


def with_a_closure_that_raises(model, repel, edit):
    optimizer = AdamW(model.parameters(), lr=RATE)
    repel(optimizer)

    def raises():
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(raises)
    run(model, optimizer, edit, steps=1)


LOOPS = {
    "schedule, repel first": partial(scheduled, repel_first=True),
    "schedule, repel last": partial(scheduled, repel_first=False),
    "micro-batches, None": partial(accumulated, set_to_none=True),
    "micro-batches, zeros": partial(accumulated, set_to_none=False),
    "clipped before": clipped,
    "checkpoint": partial(checkpointed, reentrant=False),
    "reentrant checkpoint": partial(checkpointed, reentrant=True),
    "compiled, repel first": partial(compiled, repel_first=True),
    "compiled, repel last": partial(compiled, repel_first=False),
    "moved": moved_by_swapping,
    "closure that raises": with_a_closure_that_raises,
}


@tiers("name", *thin(LOOPS, 3))
def test_every_loop_is_the_one_by_hand(name):
    assert_as_by_hand(LOOPS[name])


def test_a_step_that_calls_its_parents_counts_once_and_draws_noise_once():
    AdamW([nn.Parameter(torch.zeros(1))])
    results = []
    for kind in (AdamW, type("Thin", (AdamW,), {"step": lambda self, closure=None: AdamW.step(self, closure)})):
        torch.manual_seed(0)
        model = SeparateAttention()
        optimizer = kind(model.parameters(), lr=RATE)
        handle = hw.repel(hw.find_heads(model), hw.SPOS(inverse_temperature=7.0), optimizer)
        run(model, optimizer, steps=3)
        assert handle.steps == 3
        results.append(model.k_proj.weight.detach())
    assert torch.equal(*results)


def assert_apply_is_by_hand(train: Callable[[nn.Module, Callable], None], when: str = "manual", **tolerance: float):
    """Assert that a loop in which `attach(optimizer)()` calls `apply` is the one in which it writes by hand."""
    results = []
    for repelled in (False, True):
        torch.manual_seed(0)
        model = SeparateAttention().double()

        def attach(optimizer, model=model, repelled=repelled):
            return (
                hw.repel(hw.find_heads(model), RULE, optimizer, when=when).apply
                if repelled
                else (partial(repel_by_hand, model))
            )

        train(model, attach)
        results.append(model.q_proj.weight.detach())
    torch.testing.assert_close(*results, **tolerance)


@cases("when", ["step", "manual"])
def test_clipping_after_apply_sees_the_rules_gradients(when):
    def train(model, attach):
        optimizer = SGD(model.parameters(), lr=RATE)
        act = attach(optimizer)

        def act_and_clip() -> None:
            act()
            # below what the repulsion alone amounts to, so that the order shows
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.1

        run(model, optimizer, act_and_clip)

    assert_apply_is_by_hand(train, when)


@cases("set_to_none", [True, False])
def test_apply_in_a_closure_acts_at_each_evaluation(set_to_none):
    def train(model, attach):
        optimizer = LBFGS(model.parameters(), lr=RATE, max_iter=3)
        run(model, optimizer, attach(optimizer), steps=2, closure="given", set_to_none=set_to_none)

    assert_apply_is_by_hand(train, rtol=1e-6, atol=1e-8)


def test_applied_gradients_of_a_skipped_step_make_way_for_those_of_the_next_backward():
    def train(model, attach):
        optimizer = SGD(model.parameters(), lr=RATE)
        act = attach(optimizer)
        for step in range(3):
            loss_of(model, step).backward()
            act()
            if step != 1:  # the loop found an overflow, say
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    assert_apply_is_by_hand(train)


class Around:
    """As schedulefree's wrapper has it: no torch optimizer, and the base steps with another point in the parameters."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.param_groups, self.zero_grad = base, base.param_groups, base.zero_grad
        self.z: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in held:
            z = self.z.setdefault(parameter, parameter.clone())
            kept = parameter.clone()
            parameter.copy_(z)
            z.copy_(kept)
        self.base.step()
        for parameter in held:
            stepped = parameter.clone()
            parameter.copy_(0.6 * self.z[parameter] + 0.4 * stepped)
            self.z[parameter].copy_(stepped)


def test_a_wrapper_that_is_no_optimizer_is_refused_and_its_base_repelled_by_hand():
    model = SeparateAttention()
    message = r"Around; expected .*wraps a SGD.*optimizer\.base.*when=\"manual\""
    with pytest.raises(hw.errors.SettingError, match=message):
        hw.repel(hw.find_heads(model), RULE, Around(SGD(model.parameters(), lr=RATE)))

    def train(model, attach):
        optimizer = Around(SGD(model.parameters(), lr=RATE, momentum=0.9))
        run(model, optimizer, attach(optimizer.base))

    assert_apply_is_by_hand(train)


@cases("unscale", [False, True])
@cases("fused", [False, True])
def test_a_grad_scaler_changes_nothing_also_when_it_skips_a_step_that_overflowed(fused, unscale):
    overflowing = 2

    def loop(model, repel, edit, enabled):
        optimizer = AdamW(model.parameters(), lr=RATE, fused=fused)
        repel(optimizer)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=512.0, growth_interval=1)
        for step in range(STEPS + 1):
            if not enabled and step == overflowing:
                continue
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step == overflowing:
                # fused and other optimizers differ in who notices this
                model.k_proj.weight.grad[1, 2] = torch.inf
            if unscale:
                scaler.unscale_(optimizer)
            if unscale and step != overflowing:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if not enabled:
                edit()
            scaler.step(optimizer)
            scaler.update()

    by_hand = trained(lambda *given: loop(*given, enabled=False), "by hand", torch.float32)
    scaled = trained(lambda *given: loop(*given, enabled=True), "repelled", torch.float32)
    plain = trained(lambda *given: loop(*given, enabled=True), "plain", torch.float32)
    assert not torch.allclose(plain["q_proj.weight"], by_hand["q_proj.weight"], atol=1e-3)
    for name, expected in by_hand.items():
        # Adam divides by the root of small squares: differences of rounding in a gradient are seen whole in its step
        torch.testing.assert_close(scaled[name], expected, rtol=1e-3, atol=1e-4)


# torch's own, when it traces a step
@pytest.mark.filterwarnings("ignore:Profiler record function", "ignore:`torch.jit")
@pytest.mark.full
@pytest.mark.parametrize("with_closure", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_step_is_repelled(with_closure):
    def loop(model, repel, edit):
        torch.compiler.reset()
        # what is written by hand finds the heads anew, which is not for tracing
        edit = torch.compiler.disable(edit)
        optimizer = SGD(model.parameters(), lr=RATE, momentum=0.9)
        repel(optimizer)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            edit()
            return loss

        compiled = torch.compile(lambda: optimizer.step(closure if with_closure else None), backend="eager")
        for _ in range(STEPS):
            if not with_closure:
                closure()
            compiled()

    assert_as_by_hand(loop)


# torch's own, when it traces a step
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Profiler record function", "ignore:`torch.jit")
def test_a_step_that_was_compiled_before_is_repelled_afterwards():
    def loop(model, repel, edit):
        torch.compiler.reset()
        optimizer = SGD(model.parameters(), lr=RATE, momentum=0.9)
        compiled = torch.compile(optimizer.step, backend="eager")
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step == 1:
                repel(optimizer)
            if step >= 1:
                edit()
            compiled()

    assert_as_by_hand(loop)


def test_muon_for_matrices_and_adamw_for_the_rest_act_as_one_repulsion():
    def loop(model, repel, edit):
        matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith("k_proj")]
        rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        # a keyword or two that shows: Muon makes the repelled gradient orthogonal before it steps
        optimizers = [Muon(matrices, lr=RATE, momentum=0.8), AdamW(rest, lr=RATE)]
        repel(optimizers)
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, step).backward()
            edit()
            for optimizer in optimizers:
                optimizer.step()

    # the iteration that makes an update orthogonal is computed in bfloat16
    assert_as_by_hand(loop, rtol=1e-2, atol=1e-3)


class LightningClosure:
    """As Lightning makes it: an object that zeroes, runs the training step and goes backward, and returns the loss."""

    def __init__(self, training_step, backward, zero_grad) -> None:
        self.training_step, self.backward, self.zero_grad = training_step, backward, zero_grad

    def __call__(self) -> Tensor:
        loss = self.training_step()
        self.zero_grad()
        self.backward(loss)
        return loss


def lightning_optimizer(optimizer: Optimizer) -> Any:
    """As Lightning makes it: an object of a class made for it, with the optimizer's own attributes and another step."""

    class LightningOptimizer:
        def __init__(self) -> None:
            held = {name: value for name, value in vars(optimizer).items() if name not in ("step", "__del__")}
            vars(self).update(held)
            self._optimizer = optimizer

        @property
        def optimizer(self) -> Optimizer:
            return optimizer

        def step(self, closure, **given: Any) -> Any:
            return optimizer.step(closure=partial(lambda _model, own: own(), "the model", closure), **given)

    made = type(f"Lightning{type(optimizer).__name__}", (LightningOptimizer, type(optimizer)), {})
    return made()


@cases("wrapped", [False, True])
@cases("make", [AdamW, partial(LBFGS, max_iter=3)])
def test_lightnings_closure_is_followed_by_the_rule(make, wrapped):
    def loop(model, repel, edit):
        inner = make(list(model.parameters()), lr=RATE)
        optimizer = lightning_optimizer(inner)
        repel(optimizer if wrapped else inner)

        def backward(loss: Tensor) -> None:
            loss.backward()
            edit()

        for step in range(STEPS):
            optimizer.step(LightningClosure(partial(loss_of, model, step), backward, inner.zero_grad))

    assert_as_by_hand(loop, rtol=1e-6, atol=1e-8)


class Flaky(SGD):
    """An optimizer that runs out of memory in its first step."""

    failures = 1

    @torch.no_grad()
    def step(self, closure=None):
        loss = call(closure)
        if self.failures > 0:
            self.failures -= 1
            raise MemoryError("out of memory")
        super().step()
        return loss


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


def new_gradients(model, repel, edit, *, kind, set_to_none):
    SGD([nn.Parameter(torch.zeros(1))])
    Flaky([nn.Parameter(torch.zeros(1))])
    optimizer = kind(model.parameters(), lr=0.5)
    repel(optimizer)
    loss_of(model, 0).backward()
    fails(optimizer.step)
    run(model, optimizer, edit, steps=2, set_to_none=set_to_none)


def gradients_assigned_by_hand(model, repel, edit):
    optimizer = Flaky(model.parameters(), lr=0.5)
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


def a_closure(model, repel, edit):
    optimizer = Flaky(model.parameters(), lr=0.5)
    repel(optimizer)
    fails(lambda: run(model, optimizer, edit, steps=1, closure="given"))
    run(model, optimizer, edit, steps=1, closure="given")


def a_scaler_and_a_patched_step(model, repel, edit):
    optimizer = Flaky(model.parameters(), lr=0.5)
    repel(optimizer)
    # what accelerate does to know whether a step was skipped
    optimizer.step = MethodType(type(optimizer).step, optimizer)
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


AFTER_A_FAILURE = [
    *(partial(new_gradients, kind=kind, set_to_none=none) for kind in (Flaky, Thin) for none in (True, False)),
    *(gradients_assigned_by_hand, a_closure, a_scaler_and_a_patched_step),
]


@cases("loop", AFTER_A_FAILURE)
def test_what_comes_after_a_step_that_raised_is_acted_on(loop):
    assert_as_by_hand(loop)


def run_with_a_retry(rule, when: str, noise: str, *, failing: bool):
    """The steps counted, and the parameters after two steps, the first of which is tried twice where `failing`."""
    torch.manual_seed(0)
    model = SeparateAttention()
    optimizer = Flaky(model.parameters(), lr=0.5)
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
    return handle.steps, [parameter.detach().clone() for parameter in model.parameters()]


@cases("rule", [RULE, hw.SPOS(alpha=0.4, inverse_temperature=9.0, step_size=0.6)])
@cases("when", ["step", "manual"])
@cases("noise", ["step", "apply"])
def test_the_same_gradients_tried_again_are_not_acted_on_twice_and_have_their_noise_once(rule, when, noise):
    (steps, expected), (retried, found) = (run_with_a_retry(rule, when, noise, failing=f) for f in (False, True))
    assert steps == retried == 2
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
