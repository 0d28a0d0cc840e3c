"""A step with repulsion: the equation of `particles.update` on exactly the heads' rows, nothing else."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import headwise as hw
from cases import cases
from heads.attentions import SeparateAttention
from headwise.repulsion.rules import acts_apart, update
from repulsion.by_hand import RULE, assert_gradients, expected_gradients, model_with_gradients, repelled

RULES = {
    "svgd": RULE,
    "unsmoothed": hw.SVGD(alpha=0.5, smoothing=False),
    "relative": hw.SVGD(alpha=hw.Relative(0.4), prior_precision=0.3),
    "normalized": hw.SVGD(alpha=0.6, kernel=hw.kernels.NormalizedRBF()),
    "radial": hw.SVGD(alpha=0.6, kernel=hw.kernels.RadialRBF()),
    "cosine": hw.SVGD(kernel=hw.kernels.Cosine()),
    "cosine repulsion": hw.repulsion.CosineRepulsion(alpha=0.3),
}


@cases("rule", RULES.values())
@cases("key_value_heads", [4, 2, 1])
def test_a_step_hands_the_optimizer_what_the_rule_says(rule, key_value_heads):
    model, optimizer, handle = repelled(rule, key_value_heads=key_value_heads)
    expected = expected_gradients(model, rule)
    optimizer.step()
    assert_gradients(model, expected)
    assert handle.steps == 1
    particles = dict(zip(handle.last.names, handle.last.particles, strict=True))
    assert particles == {"query": 4, "key": key_value_heads, "value": key_value_heads}


def test_only_the_selected_projection_changes():
    model = model_with_gradients()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    heads = hw.find_heads(model).projection("value")
    hw.repel(heads, RULE, torch.optim.SGD(model.parameters(), lr=0.0)).apply()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p.grad, before[name])}
    assert changed == {"v_proj.weight"}


@cases("kind", [hw.SVGD, hw.repulsion.SpanSVGD])
def test_one_head_beside_several_receives_its_scaled_gradient_and_that_is_told(kind):
    rule = kind(step_size=0.3)
    model, _, handle = repelled(rule, key_value_heads=1)
    before = model.k_proj.weight.grad.clone()
    handle.apply()
    torch.testing.assert_close(model.k_proj.weight.grad, 0.3 * before)
    assert handle.last.equal.tolist() == [False, False, False]
    told = [line.rpartition("  ")[2] for line in str(handle.last).splitlines() if "one head" in line]
    assert told == ["one head: nothing repels it"] * 2
    assert repr(handle) == (
        f"{rule} on 3 particle groups of 1, 4 heads, before each step of SGD; "
        "one head, so nothing repels it: key, value"
    )


def test_rules_that_move_each_head_by_itself_act_on_one():
    assert acts_apart(hw.SVGD(alpha=0.0, smoothing=False))
    assert not acts_apart(hw.SVGD(alpha=hw.Relative(0.1), smoothing=False))
    assert not acts_apart(hw.SPOS(inverse_temperature=4.0))
    model, optimizer, handle = repelled(hw.SGLD(inverse_temperature=4.0), lr=0.1, num_heads=1, key_value_heads=1)
    before = model.q_proj.weight.grad.clone()
    optimizer.step()
    handle.check()
    assert not torch.allclose(model.q_proj.weight.grad, before, atol=1e-3)
    assert not handle.last.equal.any()


@cases("later", [False, True])
def test_half_precision_parameters_are_mixed_in_single_precision(later):
    model, optimizer, handle = repelled(dtype=torch.float32 if later else torch.bfloat16)
    model.to(torch.bfloat16)
    expected = expected_gradients(model, RULE)
    optimizer.step()
    assert model.q_proj.weight.grad.dtype == torch.bfloat16
    assert_gradients(model, expected, rtol=2**-8, atol=1e-3)
    handle.check()


def test_apply_is_not_repeated_by_the_step_and_manual_insists_on_it():
    model, optimizer, handle = repelled(when="manual")
    for fresh in (False, True):
        if fresh:
            # the step before was skipped: fresh gradients are acted on
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
        expected = expected_gradients(model, RULE)
        handle.apply()
        handle.apply()
        assert_gradients(model, expected)
    optimizer.step()
    assert_gradients(model, expected)
    with pytest.raises(hw.errors.NotFired, match=r"apply\(\) was not called before optimizer\.step"):
        optimizer.step()


def test_a_closure_is_wrapped_so_that_the_rule_sees_its_gradients():
    model, optimizer, _ = repelled()
    expected = expected_gradients(model, RULE)
    given = {name: p.grad.clone() for name, p in model.named_parameters()}

    def closure():
        for name, parameter in model.named_parameters():
            parameter.grad = given[name].clone()
        return torch.tensor(3.0)

    for call in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        optimizer.zero_grad()
        assert call() == 3.0
        assert_gradients(model, expected)


class Twice(torch.optim.SGD):
    """Evaluates its closure twice in a step."""

    def step(self, closure):
        closure()
        return closure()


def test_gradients_that_a_closure_writes_in_place_are_acted_on_at_each_evaluation():
    model = model_with_gradients()
    expected = expected_gradients(model, RULE)
    given = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer = Twice(model.parameters(), lr=0.0)
    hw.repel(hw.find_heads(model), RULE, optimizer)

    def closure():
        for name, parameter in model.named_parameters():
            parameter.grad.copy_(given[name])

    optimizer.step(closure)
    assert_gradients(model, expected)


def test_a_scale_of_the_gradients_multiplies_all_and_is_left_out_of_the_record():
    model, scale = model_with_gradients(), torch.tensor(1024.0)
    expected = {name: 1024.0 * value for name, value in expected_gradients(model, RULE).items()}
    for parameter in model.parameters():
        parameter.grad *= scale
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = hw.repel(hw.find_heads(model), RULE, optimizer)
    handle._before_step(handle._attachments[0], scale=scale)
    assert_gradients(model, expected, atol=2e-3)
    _, _, other = repelled()
    other.apply()
    torch.testing.assert_close(handle.last.driving_norm, other.last.driving_norm)
    torch.testing.assert_close(handle.last.repulsion_norm, other.last.repulsion_norm)


@cases("rule", RULES.values())
@cases(("what", "bad"), [("gradient", torch.nan), ("gradient", torch.inf), ("heads", torch.nan)])
def test_what_is_not_finite_is_left_alone_and_reported(rule, what, bad):
    model, optimizer, handle = repelled(rule)
    expected = expected_gradients(model, rule)
    with torch.no_grad():
        weight = model.k_proj.weight
        (weight.grad if what == "gradient" else weight)[7, 3] = bad
    before = weight.grad.clone()
    optimizer.step()
    torch.testing.assert_close(weight.grad, before, rtol=0, atol=0, equal_nan=True)
    for name in ("q_proj.weight", "v_proj.weight"):
        torch.testing.assert_close(model.get_parameter(name).grad.double(), expected[name], rtol=2e-5, atol=2e-6)
    assert handle.last.finite.tolist() == [True, False, True]
    assert not handle.last.equal.any()
    assert f"{what} not finite, gradient unchanged" in str(handle.last)
    if what == "heads":
        message = r"k_proj\.weight holds NaN or infinity in key heads \[1\] of 4"
        with pytest.raises(hw.errors.HeadwiseError, match=message):
            handle.check()


def test_heads_without_a_gradient_are_skipped_and_none_at_all_is_an_error():
    model, optimizer, handle = repelled()
    model.k_proj.weight.grad = None
    optimizer.step()
    assert handle.last.skipped == ("key",)
    with pytest.raises(hw.errors.NotFired, match="key: no gradient at any step since repel"):
        handle.check()
    model.k_proj.weight.grad = torch.ones_like(model.k_proj.weight)
    optimizer.step()
    handle.check()
    optimizer.zero_grad()
    with pytest.raises(hw.errors.NotFired, match="none of the 3 particle groups has a gradient"):
        optimizer.step()


def test_equal_heads_are_refused_jitter_separates_them_and_later_collapse_is_told():
    model = model_with_gradients()

    def collapse():
        with torch.no_grad():
            for linear in (model.q_proj, model.k_proj, model.v_proj):
                linear.weight.view(4, 5, 12)[1:] = linear.weight.view(4, 5, 12)[:1]

    collapse()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    heads = hw.find_heads(model)
    with pytest.raises(hw.errors.HeadwiseError, match=r"all 4 heads are equal.*hw\.repulsion\.jitter"):
        hw.repel(heads, RULE, optimizer)
    hw.repulsion.jitter(heads, 1e-3, seed=4)
    handle = hw.repel(heads, RULE, optimizer)
    optimizer.step()
    handle.check()
    assert (handle.last.repulsion_norm > 0).all()
    collapse()
    optimizer.step()
    assert handle.last.equal.all()
    assert torch.isfinite(model.q_proj.weight.grad).all()
    with pytest.raises(hw.errors.HeadwiseError, match=r"query: all 4 heads are equal.*hw\.repulsion\.jitter"):
        handle.check()


def test_strength_is_a_factor_on_the_repulsion_alone_and_may_change_between_steps():
    model, _, handle = repelled()
    expected = expected_gradients(model, RULE, strength=2.5)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    handle.strength = 2.5
    handle.apply()
    assert_gradients(model, expected)
    first = handle.last
    handle.strength = 0
    assert (handle.strength, type(handle.strength)) == (0.0, float)
    handle.strength = 1.25
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    handle.apply()
    torch.testing.assert_close(handle.last.repulsion_norm, 0.5 * first.repulsion_norm)
    torch.testing.assert_close(handle.last.driving_norm, first.driving_norm)


def test_the_reported_norms_are_those_of_the_forces():
    model, _, handle = repelled()
    (head_slice, *_) = hw.find_heads(model).slices()
    particles = head_slice.of(head_slice.parameter.detach()).double().flatten(1)
    forces = update(RULE, particles, head_slice.of(head_slice.parameter.grad).double().flatten(1))
    handle.apply()
    record = handle.last
    wanted = {
        "driving_norm": forces.driving.norm(),
        "repulsion_norm": forces.repulsion.norm(),
        "particle_norm": particles.norm(dim=1).mean(),
        "force_ratio": forces.repulsion.norm() / forces.driving.norm(),
    }
    for name, norm in wanted.items():
        assert float(getattr(record, name)[0]) == pytest.approx(float(norm), rel=1e-5), name


def test_several_optimizers_share_the_heads_and_a_parameter_listed_twice_is_acted_on_once():
    model = model_with_gradients()
    expected = expected_gradients(model, RULE)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        first = torch.optim.SGD([model.q_proj.weight, model.k_proj.weight, model.q_proj.weight], lr=0.0)
    rest = torch.optim.Adam([model.v_proj.weight], lr=0.0)
    handle = hw.repel(hw.find_heads(model), RULE, [first, rest])
    first.step()
    rest.step()
    assert_gradients(model, expected)
    assert len(handle.last.names) == 3


def test_a_removed_handle_and_its_model_can_be_freed_and_its_heads_repelled_again():
    model, optimizer, handle = repelled()
    assert len(model.q_proj.weight._post_accumulate_grad_hooks) == 1
    handle.remove()
    assert not model.q_proj.weight._post_accumulate_grad_hooks
    before = model.q_proj.weight.grad.clone()
    optimizer.step()
    assert torch.equal(model.q_proj.weight.grad, before)
    watched = weakref.ref(handle)
    del handle
    gc.collect()
    assert watched() is None
    with pytest.raises(hw.errors.NotFired, match="no optimizer step has been taken"):
        _ = hw.repel(hw.find_heads(model), RULE, optimizer).last


def test_tied_parameters_are_acted_on_once():
    first, second = model_with_gradients(), SeparateAttention()
    second.q_proj.weight = first.q_proj.weight
    model = nn.ModuleList([first, second])
    expected = expected_gradients(first, RULE)["q_proj.weight"]
    handle = hw.repel(hw.find_heads(model), RULE, torch.optim.SGD(model.parameters(), lr=0.0))
    handle.apply()
    assert len(handle.groups) == 5
    torch.testing.assert_close(first.q_proj.weight.grad.double(), expected, rtol=2e-5, atol=2e-6)


# Noise


def noisy(noise="step", lr=0.25, optimizer=torch.optim.SGD, rule=None, seed=3):
    model = model_with_gradients()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    rule = rule or hw.SGLD(inverse_temperature=5.0, step_size=0.3)
    made = optimizer(model.parameters(), lr=lr)
    handle = hw.repel(hw.find_heads(model).projection("query"), rule, made, noise=noise, seed=seed)
    return model, before["q_proj.weight"], made, handle


def test_noise_is_langevin_under_sgd_and_left_as_it_is_under_adam():
    expected = (2 * 0.3 / 5.0) ** 0.5
    for optimizer, factor in ((torch.optim.SGD, 0.25**-0.5), (torch.optim.Adam, 1.0)):
        draws = []
        model, before, made, _ = noisy(optimizer=optimizer)
        for _step in range(60):
            model.q_proj.weight.grad = before.clone()
            made.step()
            draws.append(model.q_proj.weight.grad - 0.3 * before)
        noise = torch.stack(draws)
        # 60 * 240 normal draws: their standard deviation is known to 1/sqrt(2 * 14400) = 0.6 %
        assert float(noise.std()) == pytest.approx(expected * factor, rel=0.03)
        assert abs(float(noise.mean())) < 4 * expected * factor / len(noise.flatten()) ** 0.5


def test_each_parameter_of_a_particle_gets_the_noise_of_its_own_rate():
    rates = {"q_proj.weight": 0.25, "k_proj.weight": 1e-4}
    model = model_with_gradients(width=60)
    parts = [{"params": [model.get_parameter(name)], "lr": rate} for name, rate in rates.items()]
    optimizer = torch.optim.SGD([*parts, {"params": [model.v_proj.weight], "momentum": 0.9, "lr": 0.01}], lr=1.0)
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    hw.repel(hw.find_heads(model), hw.SGLD(inverse_temperature=5.0, step_size=0.3), optimizer, joint=True)
    optimizer.step()
    for name, rate in {**rates, "v_proj.weight": 1.0}.items():
        # the deviation of 1200 draws is known to 2 %
        noise = model.get_parameter(name).grad - 0.3 * before[name]
        assert float(noise.std()) == pytest.approx((2 * 0.3 / 5.0 / rate) ** 0.5, rel=0.1), name


def test_noise_depends_on_seed_step_and_parameter_alone():
    first, again, other = noisy(), noisy(), noisy(seed=4)
    torch.randn(17)
    for _, _, optimizer, _ in (first, again, other):
        optimizer.step()
    assert torch.equal(first[0].q_proj.weight.grad, again[0].q_proj.weight.grad)
    assert not torch.equal(first[0].q_proj.weight.grad, other[0].q_proj.weight.grad)
    before = first[0].q_proj.weight.grad.clone()
    first[0].q_proj.weight.grad = first[1].clone()
    first[2].step()
    assert not torch.equal(first[0].q_proj.weight.grad, before)


def test_noise_comes_at_the_step_after_clipping_unless_asked_for_with_the_forces():
    model, before, optimizer, handle = noisy()
    handle.apply()
    torch.testing.assert_close(model.q_proj.weight.grad, 0.3 * before)
    optimizer.step()
    assert not torch.allclose(model.q_proj.weight.grad, 0.3 * before)
    model, before, optimizer, handle = noisy(noise="apply")
    handle.apply()
    applied = model.q_proj.weight.grad.clone()
    assert not torch.allclose(applied, 0.3 * before)
    optimizer.step()
    assert torch.equal(model.q_proj.weight.grad, applied)


def test_a_tensor_rate_of_zero_gives_finite_noise():
    model, _, optimizer, _ = noisy(lr=torch.tensor(0.0))
    optimizer.step()
    assert torch.isfinite(model.q_proj.weight.grad).all()
