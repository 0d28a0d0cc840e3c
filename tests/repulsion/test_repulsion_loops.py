"""Repulsion in the loops people have equals the same loop with the rule's gradients written in by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.utils.checkpoint import checkpoint

import headwise as hw
from heads.attentions import SeparateAttention
from repulsion.by_hand import RULE, assert_as_by_hand, batch, loss_of, repel_by_hand, trained

STEPS = 4
RATE = 0.05


class OwnOptimizer(Optimizer):
    """What a user writes: sign descent, with nothing of torch's own optimizers."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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


OPTIMIZERS = {
    "AdamW loop": lambda p: AdamW(p, lr=RATE, foreach=False, fused=False),
    "AdamW foreach": lambda p: AdamW(p, lr=RATE, foreach=True),
    "AdamW fused": lambda p: AdamW(p, lr=RATE, fused=True),
    "AdamW capturable rate": lambda p: AdamW(p, lr=torch.tensor(RATE), foreach=False),
    "SGD momentum": lambda p: SGD(p, lr=RATE, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=RATE),
    "own": lambda p: OwnOptimizer(p, lr=RATE),
    "own AdamW": lambda p: OwnAdamW(p, lr=RATE),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_on_the_rules_gradients(name):
    AdamW([nn.Parameter(torch.zeros(1))])  # from now on torch calls hooks in AdamW.step too

    def loop(model, repel, edit):
        optimizer = OPTIMIZERS[name](model.parameters())
        repel(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            edit()
            optimizer.step()

    assert_as_by_hand(loop)


def test_a_step_that_calls_its_parents_counts_once_and_draws_noise_once():
    AdamW([nn.Parameter(torch.zeros(1))])
    results = []
    for kind in (AdamW, type("Thin", (AdamW,), {"step": lambda self, closure=None: AdamW.step(self, closure)})):
        torch.manual_seed(0)
        model = SeparateAttention()
        optimizer = kind(model.parameters(), lr=RATE)
        handle = hw.repel(hw.find_heads(model), hw.SPOS(inverse_temperature=7.0), optimizer)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        assert handle.steps == 3
        results.append(model.k_proj.weight.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("repel_first", [True, False])
def test_learning_rate_schedulers_wrap_the_step_without_hiding_it(repel_first):
    def loop(model, repel, edit):
        optimizer = AdamW(model.parameters(), lr=RATE)
        if repel_first:
            repel(optimizer)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=STEPS)
        if not repel_first:
            repel(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            edit()
            optimizer.step()
            scheduler.step()

    assert_as_by_hand(loop)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_micro_batches_are_acted_on_once_when_they_are_whole(set_to_none):
    def loop(model, repel, edit):
        optimizer = SGD(model.parameters(), lr=RATE, momentum=0.9)
        repel(optimizer)
        for step in range(3 * STEPS):
            (loss_of(model, step) / 3).backward()
            if step % 3 == 2:
                edit()
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)

    assert_as_by_hand(loop)


def test_clipping_in_the_loop_comes_before_the_rule():
    def loop(model, repel, edit):
        optimizer = SGD(model.parameters(), lr=RATE)
        repel(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
            edit()
            optimizer.step()

    assert_as_by_hand(loop)


@pytest.mark.parametrize("when", ["step", "manual"])
def test_clipping_after_apply_sees_the_rules_gradients(when):
    results = []
    for how in ("by hand", "repelled"):
        torch.manual_seed(0)
        model = SeparateAttention().double()
        optimizer = SGD(model.parameters(), lr=RATE)
        handle = hw.repel(hw.find_heads(model), RULE, optimizer, when=when) if how == "repelled" else None
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if handle is None:
                repel_by_hand(model)
            else:
                handle.apply()
            # below what the repulsion alone amounts to, so that the order shows
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.1
            optimizer.step()
        results.append(model.q_proj.weight.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
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


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p, lr=RATE),
        lambda p: OwnOptimizer(p, lr=RATE),
        lambda p: torch.optim.LBFGS(p, lr=RATE, max_iter=3, history_size=2),
    ],
    ids=["AdamW", "own", "LBFGS"],
)
def test_a_closure_is_followed_by_the_rule_each_time_the_optimizer_calls_it(make, keyword):
    def loop(model, repel, edit):
        optimizer = make(list(model.parameters()))
        repel(optimizer)
        for step in range(STEPS):

            def closure(step=step):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                loss = loss_of(model, step)
                loss.backward()
                edit()
                return loss

            loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
            assert loss.requires_grad

    assert_as_by_hand(loop, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_apply_in_a_closure_acts_at_each_evaluation(set_to_none):
    results = []
    for how in ("by hand", "repelled"):
        torch.manual_seed(0)
        model = SeparateAttention().double()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=RATE, max_iter=3)
        handle = hw.repel(hw.find_heads(model), RULE, optimizer, when="manual") if how == "repelled" else None

        def closure(model=model, optimizer=optimizer, handle=handle):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(model, 0)
            loss.backward()
            if handle is None:
                repel_by_hand(model)
            else:
                handle.apply()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        results.append(model.q_proj.weight.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-8)


def test_an_own_step_that_calls_the_closure_and_then_its_parent_is_acted_on_once():
    AdamW([nn.Parameter(torch.zeros(1))])

    class Calls(AdamW):
        def step(self, closure=None):
            with torch.enable_grad():
                loss = closure()
            super().step()
            return loss

    def loop(model, repel, edit):
        optimizer = Calls(model.parameters(), lr=RATE)
        repel(optimizer)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            edit()
            return loss

        for _ in range(STEPS):
            optimizer.step(closure)

    assert_as_by_hand(loop)


def test_after_a_closure_that_raised_the_next_step_is_acted_on():
    def loop(model, repel, edit):
        optimizer = AdamW(model.parameters(), lr=RATE)
        repel(optimizer)

        def fails():
            raise ArithmeticError

        with pytest.raises(ArithmeticError):
            optimizer.step(fails)
        loss_of(model, 0).backward()
        edit()
        optimizer.step()

    assert_as_by_hand(loop)


@pytest.mark.parametrize("repel_first", [True, False])
def test_a_compiled_model_is_repelled(repel_first):
    def loop(model, repel, edit):
        optimizer = AdamW(model.parameters(), lr=RATE)
        if repel_first:
            repel(optimizer)
        compiled = torch.compile(model, backend="aot_eager")
        for step in range(STEPS):
            optimizer.zero_grad()
            (compiled(batch(step, model)) - 1.0).square().mean().backward()
            if step == 0 and not repel_first:
                repel(optimizer)
            edit()
            optimizer.step()

    assert_as_by_hand(loop)


# torch's own, when it traces a step
@pytest.mark.filterwarnings("ignore:Profiler record function", "ignore:`torch.jit")
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


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_of_both_kinds_changes_nothing(reentrant):
    def loop(model, repel, edit, checkpointed=True):
        optimizer = AdamW(model.parameters(), lr=RATE)
        repel(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = batch(step, model).requires_grad_()
            output = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
            (output - 1.0).square().mean().backward()
            edit()
            optimizer.step()

    assert_as_by_hand(loop)
    kept = trained(lambda *given: loop(*given, checkpointed=False), "repelled")
    torch.testing.assert_close(trained(loop, "repelled"), kept)


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


def test_a_schedule_of_the_strength_is_followed_step_by_step():
    torch.manual_seed(0)
    model = SeparateAttention()
    optimizer = SGD(model.parameters(), lr=0.0)
    handle = hw.repel(hw.find_heads(model), RULE, optimizer)
    norms = []
    for step in range(STEPS):
        handle.strength = 0.5**step
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        optimizer.step()
        norms.append(handle.last.repulsion_norm)
        torch.testing.assert_close(handle.last.force_ratio, handle.last.repulsion_norm / handle.last.driving_norm)
    for now, later in pairwise(norms):
        torch.testing.assert_close(later, 0.5 * now)
