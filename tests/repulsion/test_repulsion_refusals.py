"""Repulsion that would do nothing, or nonsense, without a word: each is refused in a sentence, or works."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD

import headwise as hw
from heads.attentions import SeparateAttention
from heads.wrappers import LoraLinear, wrap
from headwise.repulsion.groups import find_groups
from headwise.repulsion.rules import acts_apart
from headwise.repulsion.step import apply_rule
from repulsion.by_hand import RULE, assert_as_by_hand, expected_gradients, loss_of, model_with_gradients


def sgd(model: nn.Module, lr: float = 0.1) -> SGD:
    return SGD(model.parameters(), lr=lr)


def repelled(rule=RULE, **sizes):
    model = model_with_gradients(**sizes)
    optimizer = sgd(model)
    return model, optimizer, hw.repel(hw.find_heads(model), rule, optimizer)


@pytest.mark.parametrize(
    "rule", [RULE, hw.SVGD(alpha=0.0), hw.repulsion.CosinePenalty(alpha=0.3)], ids=["svgd", "smooth", "cosine"]
)
def test_one_particle_everywhere_is_refused_with_the_projection_to_choose(rule):
    shared = model_with_gradients(key_value_heads=1)
    heads = hw.find_heads(shared)
    with pytest.raises(
        hw.errors.LayoutError,
        match=r"^no particle group has more than one particle \(key: 1, value: 1\), and one head has nothing to be "
        r"repelled from; choose heads\.projection\('query'\), with 4 heads per layer\.$",
    ):
        hw.repel(heads.projection("key", "value"), rule, sgd(shared))
    assert hw.repel(heads.projection("query"), rule, sgd(shared))
    single = model_with_gradients(num_heads=1, key_value_heads=1)
    with pytest.raises(
        hw.errors.LayoutError, match=r"\(query\+key\+value: 1\).*; select an attention with more heads\.$"
    ):
        hw.repel(hw.find_heads(single), rule, sgd(single), joint=True)


def test_rules_that_move_each_head_by_itself_act_on_one():
    assert acts_apart(hw.SVGD(alpha=0.0, smoothing=False))
    assert not acts_apart(hw.SVGD(alpha=hw.Relative(0.1), smoothing=False))
    assert not acts_apart(hw.SPOS(inverse_temperature=4.0))
    model, optimizer, handle = repelled(hw.SGLD(inverse_temperature=4.0), num_heads=1, key_value_heads=1)
    before = model.q_proj.weight.grad.clone()
    optimizer.step()
    handle.check()
    assert not torch.allclose(model.q_proj.weight.grad, before, atol=1e-3)
    assert not handle.last.equal.any()


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -1.0, "a", None, True, torch.tensor(1.0), lambda _step: 1.0]
)
def test_a_strength_that_is_no_number_from_zero_is_refused_when_assigned(value):
    _, optimizer, handle = repelled()
    with pytest.raises(hw.errors.SettingError, match=r"^strength is .*; expected a finite number in \[0, inf\]\.$"):
        handle.strength = value
    assert handle.strength == 1.0
    optimizer.step()
    handle.strength = 0
    assert (handle.strength, type(handle.strength)) == (0.0, float)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "the state holds a NoneType; expected steps, turns, strength"),
        ({}, "the state holds nothing; expected"),
        ({"steps": [1], "turns": [0]}, "the state holds steps, turns; expected steps, turns, strength"),
        ({"state": {}, "param_groups": []}, "the state holds state, param_groups; expected"),
        ({"steps": [4], "turns": [0], "strength": float("nan")}, "strength is nan"),
        ({"steps": 4, "turns": [0], "strength": 1.0}, r"steps=4 and turns=\[0\]; expected lists of 1"),
        ({"steps": [4], "turns": [-1], "strength": 2.0}, "turns is -1; expected an integer of at least 0"),
        ({"steps": ["4"], "turns": [0], "strength": 2.0}, "steps is '4'; expected an integer of at least 0"),
    ],
)
def test_a_state_that_is_none_of_a_repulsion_changes_nothing(state, message):
    _, optimizer, handle = repelled()
    optimizer.step()
    before = handle.state_dict()
    with pytest.raises(hw.errors.SettingError, match=message):
        handle.load_state_dict(state)
    assert handle.state_dict() == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_heads_that_are_not_finite_are_named_and_never_called_equal(bad):
    model = model_with_gradients()
    with torch.no_grad():
        model.k_proj.weight[[7, 13]] = bad
    message = r"^k_proj\.weight holds NaN or infinity in key heads \[1, 2\] of 4; repulsion needs finite heads"
    with pytest.raises(hw.errors.HeadwiseError, match=message):
        hw.repel(hw.find_heads(model), RULE, sgd(model))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hw.errors.HeadwiseError, match=message):
        hw.repulsion.jitter(hw.find_heads(model), 0.5)
    assert all(torch.equal(before[n].nan_to_num(5.0), p.nan_to_num(5.0)) for n, p in model.state_dict().items())


@pytest.mark.parametrize(
    "rule",
    [
        RULE,
        hw.SVGD(alpha=0.5, smoothing=False),
        hw.SVGD(alpha=hw.Relative(0.3), smoothing=False),
        hw.SVGD(kernel=hw.kernels.Cosine()),
        hw.repulsion.CosineRepulsion(alpha=0.3),
    ],
    ids=["svgd", "unsmoothed", "relative", "cosine", "cosine repulsion"],
)
def test_heads_that_become_nan_leave_their_gradient_alone_and_are_told(rule):
    model = model_with_gradients()
    expected = expected_gradients(model, rule)
    optimizer = sgd(model)
    handle = hw.repel(hw.find_heads(model), rule, optimizer)
    with torch.no_grad():
        model.k_proj.weight[7, 3] = torch.nan
    before = model.k_proj.weight.grad.clone()
    optimizer.step()
    assert torch.equal(model.k_proj.weight.grad, before)
    for name in ("q_proj.weight", "v_proj.weight"):
        torch.testing.assert_close(model.get_parameter(name).grad.double(), expected[name], rtol=2e-5, atol=2e-6)
    assert handle.last.finite.tolist() == [True, False, True]
    assert not handle.last.equal.any()
    assert "heads not finite, gradient unchanged" in str(handle.last)
    with pytest.raises(hw.errors.HeadwiseError, match=r"k_proj\.weight holds NaN or infinity in key heads \[1\] of 4"):
        handle.check()


def test_heads_held_by_two_of_the_optimizers_are_refused():
    model = model_with_gradients()
    heads = hw.find_heads(model)
    both, one = sgd(model), SGD([model.q_proj.weight, nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(hw.errors.SettingError, match=r"query: its parameters are held by 2 of the 2 optimizers"):
        hw.repel(heads, RULE, [both, one])
    assert hw.repel(heads.projection("key", "value"), RULE, [both, one])
    assert hw.repel(heads.projection("query"), RULE, [both, both])


def test_a_parameter_listed_twice_is_acted_on_once():
    model = model_with_gradients()
    expected = expected_gradients(model, RULE)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = SGD([*model.parameters(), model.q_proj.weight], lr=0.0)
    hw.repel(hw.find_heads(model), RULE, optimizer)
    optimizer.step()
    torch.testing.assert_close(model.q_proj.weight.grad.double(), expected["q_proj.weight"], rtol=2e-5, atol=2e-6)


def test_a_sparse_gradient_is_refused_before_any_is_changed():
    model, optimizer, _ = repelled()
    model.v_proj.weight.grad = model.v_proj.weight.grad.to_sparse()
    before = model.q_proj.weight.grad.clone()
    with pytest.raises(
        hw.errors.LayoutError, match=r"v_proj\.weight has a sparse gradient; repulsion needs a dense one"
    ):
        optimizer.step()
    assert torch.equal(model.q_proj.weight.grad, before)


def test_heads_without_values_are_refused():
    model = SeparateAttention().to("meta")
    for act in (
        lambda: hw.repel(hw.find_heads(model), RULE, sgd(model)),
        lambda: hw.repulsion.jitter(hw.find_heads(model), 0.1),
    ):
        with pytest.raises(hw.errors.LayoutError, match=r"q_proj\.weight is on the meta device and has no values"):
            act()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: wrap(m, "v_proj"), r"v_proj\.weight .* a LoraLinear has taken its place"),
        (lambda m: setattr(m, "v_proj", nn.Linear(12, 20)), r"v_proj\.weight .* a Linear has taken its place"),
        (
            lambda m: nn.utils.parametrizations.weight_norm(m.v_proj),
            r"v_proj\.weight is no longer a parameter of ParametrizedLinear: it was replaced",
        ),
    ],
    ids=["wrapped", "replaced", "parametrized"],
)
def test_a_layer_changed_after_repel_is_told_at_the_next_step_and_by_verify(change, message):
    model, optimizer, handle = repelled()
    optimizer.step()
    change(model)
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    before = model.q_proj.weight.grad.clone()
    for act in (optimizer.step, handle.apply, handle.check):
        with pytest.raises(hw.errors.LayoutError, match=message):
            act()
    assert torch.equal(model.q_proj.weight.grad, before)


def test_verify_tells_of_a_wrapper_whose_base_still_trains():
    model, optimizer, handle = repelled()
    optimizer.step()
    model.v_proj = LoraLinear(model.v_proj)
    model.v_proj.base_layer.requires_grad_(True)
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(hw.errors.LayoutError, match=r"v_proj\.weight is not where the model calls it anymore"):
        handle.check()


def test_a_model_made_half_after_repel_is_repelled():
    model, optimizer, handle = repelled()
    model.to(torch.bfloat16)
    expected = expected_gradients(model, RULE)
    optimizer.step()
    assert model.q_proj.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(model.q_proj.weight.grad.double(), expected["q_proj.weight"], rtol=2**-8, atol=1e-3)
    handle.check()


def test_a_model_moved_by_swapping_its_tensors_is_repelled():
    def loop(model, repel, edit):
        optimizer = sgd(model, lr=0.5)
        repel(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            edit()
            optimizer.step()
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                model.to(torch.float32).to(torch.float64)
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)

    assert_as_by_hand(loop)


def test_a_model_moved_to_new_parameters_is_told():
    model, optimizer, _ = repelled()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    with pytest.raises(hw.errors.LayoutError, match=r"q_proj\.weight is another tensor than when hw\.repel was called"):
        optimizer.step()


def test_a_setting_that_python_would_take_for_true_is_refused():
    model = model_with_gradients()
    with pytest.raises(hw.errors.SettingError, match="joint is 'no'; expected True or False"):
        hw.repel(hw.find_heads(model), RULE, sgd(model), joint="no")


@pytest.mark.parametrize("every", [0, -3, 2.5])
def test_a_number_of_steps_is_refused_whatever_the_strength(every):
    model = model_with_gradients()
    with pytest.raises(hw.errors.SettingError, match=f"every is {every}"):
        hw.repel(hw.find_heads(model), RULE, sgd(model), every=every)


def test_the_record_of_a_step_counts_the_particles_of_each_group():
    model = model_with_gradients(key_value_heads=2)
    groups = find_groups(hw.find_heads(model), joint=False)
    forces = apply_rule(RULE, groups, strength=1.0, scale=None)
    assert dict(zip(forces.names, forces.particles, strict=True)) == {"query": 4, "key": 2, "value": 2}


def test_a_wrapped_optimizer_is_unwrapped_and_anything_else_refused():
    model = model_with_gradients()
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(original_optimizer=inner))
    handle = hw.repel(hw.find_heads(model), RULE, [wrapped])
    inner.step()
    assert handle.steps == 1
    assert str(handle) == f"{RULE} on 3 particle groups of 4 heads, before each step of SGD"
    with pytest.raises(hw.errors.SettingError, match="optimizer is str"):
        hw.repel(hw.find_heads(model), RULE, "adam")


def test_the_same_heads_are_not_repelled_twice_until_removed():
    model = model_with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    heads = hw.find_heads(model)
    handle = hw.repel(heads, RULE, optimizer)
    with pytest.raises(hw.errors.SettingError, match="repelled by this optimizer already"):
        hw.repel(heads.projection("key"), RULE, optimizer)
    handle.remove()
    before = model.q_proj.weight.grad.clone()
    optimizer.step()
    assert torch.equal(model.q_proj.weight.grad, before)
    hw.repel(heads, RULE, optimizer)


def test_frozen_heads_are_refused_by_name():
    model = model_with_gradients()
    model.k_proj.weight.requires_grad_(False)
    with pytest.raises(hw.errors.LayoutError, match=r"k_proj\.weight does not require a gradient"):
        hw.repel(hw.find_heads(model), RULE, torch.optim.SGD(model.parameters(), lr=0.1))
