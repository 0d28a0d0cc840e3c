"""Methods in a loop under Accelerate: accumulation, clipping, a GradScaler, checkpoints, a model built anew."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from torch.optim import SGD, AdamW

import headwise as hw
from cases import cases
from headwise.integrations import accelerate
from integrations.loops import (
    ACCUMULATED,
    CLIP,
    FIXED,
    NOISY,
    PENALTY,
    RATE,
    ROUTED,
    UPDATES,
    assert_same,
    build_bert,
    collate,
    differ,
    make_rows,
    train_by_hand,
)


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def prepare(model, optimizer=None, **settings):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, **settings)
    return accelerator, *accelerator.prepare(model, optimizer or SGD(model.parameters(), lr=RATE))


def train(accelerator, model, optimizer, attached, first=0, last=UPDATES) -> None:
    rows, size = make_rows(), 2 * ACCUMULATED
    for start in range(first * size, last * size, 2):
        model.train()
        with accelerator.accumulate(model):
            loss = model(**collate(rows[start : start + 2])).loss
            accelerator.backward(attached.loss(loss))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        alone = model(**collate(rows[:2])).loss
        assert attached.loss(alone) is alone


def test_penalty_and_repulsion_equal_the_loop_by_hand():
    model, expected, plain = (build_bert(dropout=0.0) for _ in range(3))
    accelerator, prepared, optimizer = prepare(model)
    attached = accelerate.attach(accelerator, prepared, optimizer, PENALTY, FIXED)
    train(accelerator, prepared, optimizer, attached)
    train_by_hand(expected, PENALTY, FIXED)
    train_by_hand(plain)
    assert_same(model, expected, exactly=False)
    assert differ(model, plain)
    attached.check(optimizer)
    assert attached.steps == UPDATES
    metrics = attached.stats()
    assert float(metrics["penalty"]) == pytest.approx(PENALTY.weight * float(metrics["similarity"]))
    assert float(metrics["force_ratio"]) == pytest.approx(0.3, rel=0.2)
    assert set(attached.stats()) == {"force_ratio"}


def build_routed():
    model = build_bert()
    torch.manual_seed(5)
    ROUTED.attach(hw.find_heads(model))
    return model


def test_a_state_that_was_saved_goes_on_bit_for_bit_with_noise_strength_and_aggregators(tmp_path):
    def start():
        model = build_routed()
        accelerator, prepared, optimizer = prepare(model, AdamW(model.parameters(), lr=RATE))
        attached = accelerate.attach(accelerator, prepared, optimizer, PENALTY, NOISY, seed=4)
        return accelerator, prepared, optimizer, attached

    torch.manual_seed(1)
    whole = start()
    whole[3].of(hw.repulsion.Repulsion)[0].strength = 0.5
    train(*whole, 0, 2)
    whole[0].save_state(str(tmp_path))
    train(*whole, 2, UPDATES)
    AcceleratorState._reset_state(True)
    torch.manual_seed(2)
    resumed = start()
    train(*resumed, 0, 1)
    resumed[0].load_state(str(tmp_path))
    assert (resumed[3].steps, resumed[3].of(hw.repulsion.Repulsion)[0].strength) == (2, 0.5)
    train(*resumed, 2, UPDATES)
    assert_same(whole[1], resumed[1])
    assert whole[3].steps == resumed[3].steps == UPDATES


@cases("penalty", [PENALTY, hw.Penalize(hw.similarity.MapCosine(), weight=0.1)])
def test_a_model_built_anew_is_attached_again_and_said_where_it_is_not(penalty):
    accelerator, model, optimizer = prepare(build_bert())
    attached = accelerate.attach(accelerator, model, optimizer, penalty, FIXED)
    train(accelerator, model, optimizer, attached)
    old = model
    model, optimizer = accelerator.prepare(again := build_bert(), SGD(again.parameters(), lr=RATE))
    with pytest.raises(hw.errors.NotFired, match=r"a model that was not called since the last loss: another one runs"):
        train(accelerator, model, optimizer, attached)
    optimizer.zero_grad()
    attached.attach(model, optimizer)
    train(accelerator, model, optimizer, attached)
    attached.check(optimizer)
    assert attached.steps == UPDATES
    # nothing of headwise is left on the old model
    old.train()
    assert not old._forward_pre_hooks


def test_an_overflow_under_a_grad_scaler_skips_the_step_and_the_repulsion_counts_those_taken():
    model, expected = build_bert(dropout=0.0), build_bert(dropout=0.0)
    accelerator, prepared, _ = prepare(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    optimizer = AcceleratedOptimizer(SGD(model.parameters(), lr=RATE), scaler=scaler)
    attached = accelerate.attach(accelerator, prepared, optimizer, PENALTY, FIXED)
    rows = make_rows()
    for update, overflows in enumerate((False, True, False)):
        loss = attached.loss(prepared(**collate(rows[2 * update : 2 * update + 2])).loss)
        scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped == overflows
    assert attached.steps == 2
    by_hand, heads = SGD(expected.parameters(), lr=RATE), hw.find_heads(expected)
    penalty = PENALTY.attach(heads)
    FIXED.attach(heads, by_hand)
    for update in (0, 2):
        loss = expected(**collate(rows[2 * update : 2 * update + 2])).loss + PENALTY.weight * penalty()
        loss.backward()
        by_hand.step()
        by_hand.zero_grad()
    assert_same(model, expected, exactly=False)


def test_what_does_not_fit_is_refused_in_a_sentence():
    accelerator, model, optimizer = prepare(build_bert())
    with pytest.raises(hw.errors.SettingError, match="accelerator is a BertForSequenceClassification"):
        accelerate.attach(model, model, optimizer, PENALTY)
    with pytest.raises(hw.errors.SettingError, match=r"call hw\.aggregate"):
        accelerate.attach(accelerator, model, optimizer, ROUTED)
    with pytest.raises(hw.errors.SettingError, match="was given no method"):
        accelerate.attach(accelerator, model, optimizer)
    other = build_bert()
    with pytest.raises(hw.errors.LayoutError, match="not held by the optimizer"):
        accelerate.attach(accelerator, other, optimizer, FIXED)
