"""The handle from attachment to removal: copies, replaced and frozen parameters, saving and resuming."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import optimizer as hooks

import headwise as hw
from cases import cases
from heads.attentions import SeparateAttention
from headwise.repulsion import optimizers
from repulsion.by_hand import RULE, loss_of, model_with_gradients, run

NOISY = hw.SPOS(alpha=0.4, inverse_temperature=9.0, step_size=0.6)


def stepped(rule=RULE, **options):
    torch.manual_seed(0)
    model = SeparateAttention()
    optimizer = AdamW(model.parameters(), lr=0.01)
    handle = hw.repel(hw.find_heads(model), rule, optimizer, **options)
    take_steps(model, optimizer, 0, 2)
    handle.check(optimizer)
    return model, optimizer, handle


def take_steps(model, optimizer, first, last):
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


COPIES = {
    "copy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "built again": lambda pair: (pair[0], AdamW(pair[0].parameters(), lr=0.01)),
}


@cases("kind", COPIES)
def test_a_copy_of_model_and_optimizer_is_not_repelled_and_that_is_told(kind):
    model, optimizer, handle = stepped()
    twin, twins_optimizer = COPIES[kind]((model, optimizer))
    take_steps(twin, twins_optimizer, 2, 3)
    assert handle.steps == 2
    message = r"another optimizer was built.*copied or unpickled.*Call hw\.repel on the optimizer in use"
    with pytest.raises(hw.errors.NotFired, match=message):
        handle.check(twins_optimizer)
    handle.remove()
    again = hw.repel(hw.find_heads(twin), RULE, twins_optimizer)
    take_steps(twin, twins_optimizer, 3, 4)
    again.check(twins_optimizer)


def test_a_copy_of_the_handle_tells_that_its_hooks_are_lost():
    model, optimizer, handle = stepped()
    *_, twin = copy.deepcopy((model, optimizer, handle))
    with pytest.raises(hw.errors.NotFired, match="copied or unpickled"):
        twin.check()
    with pytest.raises(hw.errors.NotFired, match="not attached to its optimizer anymore"):
        twin.apply()
    handle.check(optimizer)


def test_a_new_rate_or_a_loaded_state_does_not_take_the_hook_away():
    model, optimizer, handle = stepped()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model.to(torch.float64).to(torch.float32)
    optimizer.param_groups[0]["lr"] = 0.5
    take_steps(model, optimizer, 2, 4)
    assert handle.steps == 4
    handle.check(optimizer)


def test_a_parameter_taken_out_of_the_optimizer_is_told():
    model, optimizer, handle = stepped()
    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p is not model.k_proj.weight]
    with pytest.raises(hw.errors.LayoutError, match=r"k_proj\.weight is no longer held by AdamW"):
        take_steps(model, optimizer, 2, 3)
    handle.remove()
    take_steps(model, optimizer, 3, 4)


@cases("set_to_none", [True, False])
def test_heads_frozen_later_stay_where_they_are(set_to_none):
    torch.manual_seed(0)
    model = SeparateAttention()
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = hw.repel(hw.find_heads(model), RULE, optimizer)
    take_steps(model, optimizer, 0, 2)
    model.k_proj.weight.requires_grad_(False)
    frozen, free = model.k_proj.weight.clone(), model.q_proj.weight.detach().clone()
    optimizer.zero_grad(set_to_none=set_to_none)
    loss_of(model, 2).backward()
    optimizer.step()
    assert torch.equal(model.k_proj.weight, frozen)
    assert not torch.equal(model.q_proj.weight, free)
    assert handle.last.skipped == ("key",)
    handle.check(optimizer)
    for weight in (model.q_proj.weight, model.v_proj.weight):
        weight.requires_grad_(False)
    with pytest.raises(hw.errors.NotFired, match=r"frozen for good, call \.remove\(\)"):
        optimizer.step()


def test_an_optimizer_that_is_dropped_is_freed_though_its_parameters_live_on():
    model, optimizer, handle = stepped()
    watched = weakref.ref(optimizer)
    del optimizer, handle
    gc.collect()
    assert watched() is None
    loss_of(model, 0).backward()


def test_nothing_is_acted_on_after_removal_nor_after_the_with_block():
    model, optimizer, handle = stepped()
    with handle as same:
        assert same is handle
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    take_steps(model, optimizer, 2, 3)
    assert handle.steps == 2
    for call in (handle.apply, handle.check):
        with pytest.raises(hw.errors.NotFired, match="not attached"):
            call()


def test_a_run_saved_to_disk_goes_on_bit_for_bit():
    def fresh():
        torch.manual_seed(7)
        model = SeparateAttention()
        optimizer = AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return model, optimizer, scheduler, hw.repel(hw.find_heads(model), NOISY, optimizer, seed=11)

    def train(parts, first, last):
        model, optimizer, scheduler, handle = parts
        for step in range(first, last):
            handle.strength = 0.9**step
            take_steps(model, optimizer, step, step + 1)
            scheduler.step()

    whole, halved = fresh(), fresh()
    train(whole, 0, 6)
    train(halved, 0, 3)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in halved], file)
    file.seek(0)
    resumed = fresh()
    for part, state in zip(resumed, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert resumed[3].strength == 0.9**2
    torch.randn(5)  # noise does not come from the global generator
    train(resumed, 3, 6)
    for name, parameter in whole[0].named_parameters():
        assert torch.equal(parameter, resumed[0].get_parameter(name)), name
    forgotten = fresh()
    for part, state in list(zip(forgotten, (p.state_dict() for p in halved), strict=True))[:3]:
        part.load_state_dict(state)
    train(forgotten, 3, 6)
    assert not torch.equal(forgotten[0].q_proj.weight, whole[0].q_proj.weight)


def noise_of_models(handles_of) -> list[torch.Tensor]:
    """The noise that each of three equal models of one optimizer receives."""
    models = [model_with_gradients() for _ in range(3)]
    optimizer = SGD(nn.ModuleList(models).parameters(), lr=0.25)
    handles_of(optimizer, models)
    for model in models:
        model.q_proj.weight.grad.zero_()
    optimizer.step()
    return [model.q_proj.weight.grad.clone() for model in models]


def test_models_with_equal_names_in_one_optimizer_draw_noise_apart():
    rule = hw.SGLD(inverse_temperature=5.0, step_size=0.3)

    def attach(optimizer, models):
        return [hw.repel(hw.find_heads(model), rule, optimizer, seed=3) for model in models]

    first, again = noise_of_models(attach), noise_of_models(attach)
    for index, noise in enumerate(first):
        assert torch.equal(noise, again[index])
        for other in first[index + 1 :]:
            assert abs(float(torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1])) < 0.3

    def removed_and_attached_again(optimizer, models):
        attach(optimizer, models)[1].remove()
        hw.repel(hw.find_heads(models[1]), rule, optimizer, seed=3)

    for noise, same in zip(first, noise_of_models(removed_and_attached_again), strict=True):
        assert torch.equal(noise, same)

    def resumed_in_another_order(optimizer, models):
        states = [handle.state_dict() for handle in attach(SGD(nn.ModuleList(models).parameters(), lr=0.25), models)]
        for index in (2, 0, 1):
            handle = hw.repel(hw.find_heads(models[index]), rule, optimizer, seed=3)
            handle.load_state_dict(states[index])

    for noise, same in zip(first, noise_of_models(resumed_in_another_order), strict=True):
        assert torch.equal(noise, same)


# Optimizers that were replaced


SAME_HEADS = r"another AdamW than the AdamW that hw\.repel was called on steps the same heads"
NEVER_STEPPED = r"called on an AdamW that never took a step, and another one.*headwise\.integrations"


def build() -> tuple[SeparateAttention, AdamW]:
    torch.manual_seed(0)
    model = SeparateAttention()
    return model, AdamW(model.parameters(), lr=0.01)


def attached() -> tuple[SeparateAttention, AdamW, hw.repulsion.Repulsion]:
    model, optimizer = build()
    return model, optimizer, hw.repel(hw.find_heads(model), RULE, optimizer)


@cases("steps_before", [0, 2])
def test_an_optimizer_built_anew_over_the_same_model_is_said_at_its_second_step_and_once(steps_before: int):
    model, optimizer, handle = attached()
    run(model, optimizer, steps=steps_before)
    rebuilt = AdamW(model.parameters(), lr=0.1)
    run(model, rebuilt, steps=1)
    with pytest.warns(UserWarning, match=SAME_HEADS) as said:
        run(model, rebuilt, steps=3)
    assert len(said) == 1
    assert f"({steps_before} steps with repulsion so far)" in str(said[0].message)
    assert handle.steps == steps_before


def test_an_optimizer_built_anew_after_a_step_whose_closure_raised_is_said_too():
    model, optimizer, _handle = attached()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    rebuilt = AdamW(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=SAME_HEADS):
        run(model, rebuilt, steps=4)


def test_a_model_and_optimizer_that_were_thrown_away_before_their_first_step_are_said_at_the_next_ones_step():
    # as Trainer(model_init=...) does with what trainer.create_optimizer() returned
    model, optimizer, _ = attached()
    del model, optimizer, _
    gc.collect()
    with pytest.warns(UserWarning, match=NEVER_STEPPED) as said:
        run(*build(), steps=3)
    assert len(said) == 1


def test_a_handle_that_is_kept_is_said_when_it_goes():
    model, optimizer, handle = attached()
    run(*build(), steps=3)  # until now this may be a model of its own
    assert handle.steps == 0
    del handle, model, optimizer
    with pytest.warns(UserWarning, match=NEVER_STEPPED):
        gc.collect()


@pytest.mark.full
def test_a_handle_that_is_kept_to_the_end_of_the_program_is_said_there():
    script = """
import torch, headwise as hw
def build():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return layer, torch.optim.SGD(layer.parameters(), lr=0.1)
model, optimizer = build()
handle = hw.repel(hw.find_heads(model), hw.SVGD(), optimizer)
other, others = build()
other(torch.randn(2, 3, 8)).sum().backward()
others.step()
print(handle.steps)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout == "0\n"
    assert "called on an SGD that never took a step" in ended.stderr


class Outer(Optimizer):
    """Steps an inner optimizer twice, as SAM and Lookahead do."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.base = inner

    def step(self, _closure=None):
        self.base.step()
        self.base.step()


def rebuilt_and_attached_again() -> None:
    for _ in range(2):
        model, optimizer = build()
        hw.repel(hw.find_heads(model), RULE, optimizer)
        gc.collect()
    run(model, optimizer, steps=3)


def a_plain_twin_is_trained_first() -> None:
    (model, optimizer), (twin, twins) = build(), build()
    hw.repel(hw.find_heads(model), RULE, optimizer)
    run(twin, twins, steps=3)
    run(model, optimizer, steps=3)


def an_optimizer_around_the_one_attached_to() -> None:
    model, optimizer, _ = attached()
    run(model, Outer(optimizer), steps=3)


def an_optimizer_inside_the_one_attached_to() -> None:
    model, optimizer = build()
    outer = Outer(optimizer)
    hw.repel(hw.find_heads(model), RULE, outer)
    run(model, outer, steps=3)


def optimizers_that_take_turns() -> None:
    model, optimizer = build()
    other = SGD(model.parameters(), lr=0.01)
    hw.repel(hw.find_heads(model), RULE, optimizer)
    for _ in range(3):
        run(model, optimizer, steps=1)
        run(model, other, steps=1)


def a_handle_that_was_removed() -> None:
    model, _, handle = attached()
    handle.remove()
    run(model, AdamW(model.parameters()), steps=3)
    run(*build(), steps=3)


def a_copy_of_the_handle() -> None:
    model, optimizer, handle = attached()
    twin = copy.deepcopy((model, optimizer, handle))
    run(model, optimizer, steps=1)
    del twin
    gc.collect()
    run(model, optimizer, steps=3)


def another_model() -> None:
    model, optimizer, _ = attached()
    del model, optimizer, _
    gc.collect()
    other = SeparateAttention(num_heads=3)
    run(other, AdamW(other.parameters()), steps=3)


@cases(
    "loop",
    [
        rebuilt_and_attached_again,
        a_plain_twin_is_trained_first,
        an_optimizer_around_the_one_attached_to,
        an_optimizer_inside_the_one_attached_to,
        optimizers_that_take_turns,
        a_handle_that_was_removed,
        a_copy_of_the_handle,
        another_model,
    ],
)
def test_nothing_is_said_of(loop):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop()
        gc.collect()


def test_torch_calls_nothing_of_headwise_once_no_repulsion_is_left():
    model, optimizer, handle = attached()
    assert optimizers._look in hooks._global_optimizer_post_hooks.values()
    handle.remove()
    assert optimizers._look not in hooks._global_optimizer_post_hooks.values()
    model, optimizer, _ = attached()
    run(model, optimizer, steps=1)
    del model, optimizer, _
    gc.collect()
    assert optimizers._look not in hooks._global_optimizer_post_hooks.values()
