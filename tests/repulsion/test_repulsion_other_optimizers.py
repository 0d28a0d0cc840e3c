"""Repulsion under optimizers of other libraries, by stand-ins of their shape: 8-bit, schedule-free, Lightning's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import headwise as hw
from heads.attentions import SeparateAttention
from repulsion.by_hand import RULE, assert_as_by_hand, loss_of, repel_by_hand, trained

STEPS, RATE = 4, 0.05


class EightBit(Optimizer):
    """As bitsandbytes has it: a torch optimizer whose moment is kept in uint8 with one scale, made in its step."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.initialized = False

    def init_state(self, parameter: nn.Parameter) -> None:
        self.state[parameter] = {"moment": torch.full_like(parameter, 128, dtype=torch.uint8), "scale": torch.ones(())}

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.init_state(parameter)
                self.update_step(group, parameter, self.state[parameter])
        return loss

    def update_step(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Tensor]) -> None:
        moment = (state["moment"].to(parameter.dtype) - 128.0) / 127.0 * state["scale"]
        moment = 0.9 * moment + parameter.grad
        scale = moment.abs().max()
        state["scale"] = scale
        state["moment"] = (moment / scale * 127.0).round().add(128.0).to(torch.uint8)
        parameter.sub_(moment, alpha=group["lr"])


class ScheduleFree(Optimizer):
    """As schedulefree has it: parameters are moved to an average and back, by `eval` and `train`."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr, "train_mode": False, "k": 0})

    def _move(self, weight: float, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.data.lerp_(self.state[parameter]["z"], weight)
            group["train_mode"] = train

    def train(self) -> None:
        self._move(1.0 - 0.9, True)

    def eval(self) -> None:
        self._move(1.0 - 1.0 / 0.9, False)

    @torch.no_grad()
    def step(self, closure=None):
        assert all(group["train_mode"] for group in self.param_groups)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, 1.0 / group["k"])
                parameter.add_(parameter.grad, alpha=group["lr"] * (0.9 * (1.0 - 1.0 / group["k"]) - 1.0))
                z.sub_(parameter.grad, alpha=group["lr"])
        return loss


class Around:
    """As schedulefree's wrapper has it: no torch optimizer, and the base steps with another point in the parameters."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self.z: dict[Tensor, Tensor] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    def zero_grad(self) -> None:
        self.base.zero_grad()

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


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("kind", [EightBit, ScheduleFree])
def test_optimizers_of_other_libraries_step_on_the_rules_gradients(kind, with_closure):
    def loop(model, repel, edit):
        optimizer = kind(model.parameters(), lr=RATE)
        repel(optimizer)
        for step in range(STEPS):
            if kind is ScheduleFree:
                optimizer.train()

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                edit()
                return loss

            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            if kind is ScheduleFree:
                optimizer.eval()

    if kind is EightBit:
        # a rounding may fall to the other side
        assert_as_by_hand(loop, rtol=1e-3, atol=1e-3)
    else:
        assert_as_by_hand(loop)


def test_a_wrapper_that_is_no_optimizer_is_refused_and_its_base_repelled_by_hand():
    model = SeparateAttention()
    with pytest.raises(
        hw.errors.SettingError, match=r"Around; expected .*wraps a SGD.*optimizer\.base.*when=\"manual\""
    ):
        hw.repel(hw.find_heads(model), RULE, Around(SGD(model.parameters(), lr=RATE)))
    results = []
    for how in ("by hand", "repelled"):
        torch.manual_seed(0)
        model = SeparateAttention().double()
        optimizer = Around(SGD(model.parameters(), lr=RATE, momentum=0.9))
        manual = partial(hw.repel, hw.find_heads(model), RULE, optimizer.base, when="manual")
        handle = manual() if how == "repelled" else None
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            repel_by_hand(model) if handle is None else handle.apply()
            optimizer.step()
        results.append(model.q_proj.weight.detach())
        assert handle is None or handle.steps == STEPS
    torch.testing.assert_close(*results)


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


@pytest.mark.parametrize("wrapped", [False, True], ids=["in configure_optimizers", "from self.optimizers()"])
@pytest.mark.parametrize("make", [lambda p: AdamW(p, lr=RATE), lambda p: torch.optim.LBFGS(p, lr=RATE, max_iter=3)])
def test_lightnings_closure_is_followed_by_the_rule(make, wrapped):
    def loop(model, repel, edit):
        inner = make(list(model.parameters()))
        optimizer = lightning_optimizer(inner)
        repel(optimizer if wrapped else inner)
        for step in range(STEPS):

            def backward(loss: Tensor) -> None:
                loss.backward()
                edit()

            closure = LightningClosure(partial(loss_of, model, step), backward, inner.zero_grad)
            optimizer.step(closure)

    assert_as_by_hand(loop, rtol=1e-6, atol=1e-8)


# torch's own, when it traces a step
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
    assert not torch.equal(trained(loop, "plain")["v_proj.weight"], trained(loop, "repelled")["v_proj.weight"])
