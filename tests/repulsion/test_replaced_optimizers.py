"""A model or an optimizer that was built anew under a repulsion is said, and nothing else is."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import warnings

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import optimizer as hooks

import headwise as hw
from heads.attentions import SeparateAttention
from headwise.repulsion import optimizers
from repulsion.by_hand import RULE, run

SAME_HEADS = r"another AdamW than the AdamW that hw\.repel was called on steps the same heads"
NEVER_STEPPED = r"called on an AdamW that never took a step, and another one.*headwise\.integrations"


def build() -> tuple[SeparateAttention, AdamW]:
    torch.manual_seed(0)
    model = SeparateAttention()
    return model, AdamW(model.parameters(), lr=0.01)


def attached() -> tuple[SeparateAttention, AdamW, hw.repulsion.Repulsion]:
    model, optimizer = build()
    return model, optimizer, hw.repel(hw.find_heads(model), RULE, optimizer)


@pytest.mark.parametrize("steps_before", [0, 2])
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


@pytest.mark.parametrize(
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
