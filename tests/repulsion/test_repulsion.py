"""Repulsion in the loops people have: the equation of `particles.update` on exactly the heads' rows, nothing else."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import headwise as hw
from heads.attentions import SeparateAttention
from headwise.repulsion.rules import update
from repulsion.by_hand import RULE, expected_gradients, model_with_gradients


def assert_gradients(model: nn.Module, expected: dict[str, torch.Tensor], **tolerance) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad.double(), expected[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


@pytest.mark.parametrize(
    "rule",
    [
        RULE,
        hw.SVGD(alpha=0.5, smoothing=False),
        hw.SVGD(alpha=hw.Relative(0.4), prior_precision=0.3),
        hw.SVGD(alpha=0.6, kernel=hw.kernels.NormalizedRBF()),
        hw.SVGD(alpha=0.6, kernel=hw.kernels.RadialRBF()),
    ],
    ids=["svgd", "unsmoothed", "relative", "normalized", "radial"],
)
@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
def test_a_step_hands_the_optimizer_what_the_rule_says(rule, key_value_heads):
    model = model_with_gradients(key_value_heads=key_value_heads)
    expected = expected_gradients(model, rule)
    handle = hw.repel(hw.find_heads(model), rule, torch.optim.SGD(model.parameters(), lr=0.0))
    handle._attachments[0].optimizer.step()
    assert_gradients(model, expected, rtol=2e-5, atol=2e-6)
    assert handle.steps == 1


def test_a_fused_weight_steps_exactly_like_its_per_head_twin():
    torch.manual_seed(0)
    fused = nn.MultiheadAttention(8, 2, bias=False)
    twins = [nn.Parameter(block.detach().clone().view(2, 4, 8)) for block in fused.in_proj_weight.chunk(3)]
    optimizer = torch.optim.AdamW([fused.in_proj_weight], lr=0.05)
    twin_optimizer = torch.optim.AdamW(twins, lr=0.05)
    hw.repel(hw.find_heads(fused), RULE, optimizer)
    for step in range(4):
        gradient = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))
        fused.in_proj_weight.grad = gradient.clone()
        for twin, block in zip(twins, gradient.chunk(3), strict=True):
            flat = update(RULE, twin.detach().flatten(1), block.reshape(2, 32))
            twin.grad = flat.gradient.view(2, 4, 8)
        optimizer.step()
        twin_optimizer.step()
    for twin, block in zip(twins, fused.in_proj_weight.chunk(3), strict=True):
        torch.testing.assert_close(block.detach().view(2, 4, 8), twin.detach())


def test_joint_particles_share_one_kernel():
    model = model_with_gradients()
    heads = hw.find_heads(model)
    slices = heads.slices()
    particles = torch.cat([s.of(s.parameter.detach()).flatten(1) for s in slices], 1).double()
    gradients = torch.cat([s.of(s.parameter.grad).flatten(1) for s in slices], 1).double()
    forces = update(RULE, particles, gradients)
    hw.repel(heads, RULE, torch.optim.SGD(model.parameters(), lr=0.0), joint=True).apply()
    result = torch.cat([s.of(s.parameter.grad).flatten(1) for s in slices], 1)
    torch.testing.assert_close(result.double(), forces.gradient, rtol=2e-5, atol=2e-6)
    grouped = SeparateAttention(key_value_heads=2)
    optimizer = torch.optim.SGD(grouped.parameters(), lr=0.1)
    with pytest.raises(hw.errors.SettingError, match="4 query heads and 2 key/value heads cannot be joined"):
        hw.repel(hw.find_heads(grouped), RULE, optimizer, joint=True)


def test_only_the_selected_projection_changes():
    model = model_with_gradients()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    heads = hw.find_heads(model).projection("value")
    hw.repel(heads, RULE, torch.optim.SGD(model.parameters(), lr=0.0)).apply()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p.grad, before[name])}
    assert changed == {"v_proj.weight"}


def test_one_head_beside_several_receives_its_scaled_gradient_and_that_is_told():
    model = model_with_gradients(key_value_heads=1)
    before = model.k_proj.weight.grad.clone()
    rule = hw.SVGD(step_size=0.3)
    handle = hw.repel(hw.find_heads(model), rule, torch.optim.SGD(model.parameters(), lr=0.0))
    handle.apply()
    torch.testing.assert_close(model.k_proj.weight.grad, 0.3 * before)
    assert handle.last.equal.tolist() == [False, False, False]
    assert handle.last.particles == (4, 1, 1)
    told = [line.rpartition("  ")[2] for line in str(handle.last).splitlines() if "one head" in line]
    assert told == ["one head: nothing repels it"] * 2
    assert repr(handle) == (
        f"{rule} on 3 particle groups of 1, 4 heads, before each step of SGD; "
        "one head, so nothing repels it: key, value"
    )


def test_half_precision_parameters_are_mixed_in_single_precision():
    model = model_with_gradients(dtype=torch.bfloat16)
    expected = expected_gradients(model, RULE)
    hw.repel(hw.find_heads(model), RULE, torch.optim.SGD(model.parameters(), lr=0.0)).apply()
    assert model.q_proj.weight.grad.dtype == torch.bfloat16
    assert_gradients(model, expected, rtol=2**-8, atol=1e-3)


def test_apply_before_clipping_is_not_repeated_by_the_step_and_manual_insists_on_it():
    model = model_with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = hw.repel(hw.find_heads(model), RULE, optimizer, when="manual")
    expected = expected_gradients(model, RULE)
    handle.apply()
    handle.apply()
    optimizer.step()
    assert_gradients(model, expected, rtol=2e-5, atol=2e-6)
    with pytest.raises(hw.errors.NotFired, match=r"apply\(\) was not called before optimizer\.step"):
        optimizer.step()


def test_a_closure_is_wrapped_so_that_the_rule_sees_its_gradients():
    model = model_with_gradients()
    expected = expected_gradients(model, RULE)
    given = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = hw.repel(hw.find_heads(model), RULE, optimizer)

    def closure():
        for name, parameter in model.named_parameters():
            parameter.grad = given[name].clone()
        return torch.tensor(3.0)

    for call in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        optimizer.zero_grad()
        assert call() == 3.0
        assert_gradients(model, expected, rtol=2e-5, atol=2e-6)
    assert handle.steps == 2


def test_gradients_still_scaled_by_a_fused_optimizers_scaler_are_mixed_as_if_unscaled():
    model, scale = model_with_gradients(), torch.tensor(1024.0)
    expected = {name: 1024.0 * value for name, value in expected_gradients(model, RULE).items()}
    untouched = {name for name in expected if "_proj.weight" not in name or name == "o_proj.weight"}
    for parameter in model.parameters():
        parameter.grad *= scale
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = hw.repel(hw.find_heads(model), RULE, optimizer)
    optimizer.grad_scale = scale
    handle._before_step(handle._attachments[0], scale=optimizer.grad_scale)
    assert untouched
    assert_gradients(model, expected, rtol=2e-5, atol=2e-3)
    plain = model_with_gradients()
    other = hw.repel(hw.find_heads(plain), RULE, torch.optim.SGD(plain.parameters(), lr=0.0))
    other.apply()
    torch.testing.assert_close(handle.last.driving_norm, other.last.driving_norm)
    torch.testing.assert_close(handle.last.repulsion_norm, other.last.repulsion_norm)


def test_a_real_grad_scaler_with_fused_adam_equals_no_scaler():
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = SeparateAttention()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        hw.repel(hw.find_heads(model), RULE, optimizer)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        for step in range(3):
            x = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(model.q_proj.weight.detach().clone())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_left_alone_and_reported(bad):
    model = model_with_gradients()
    expected = expected_gradients(model, RULE)
    model.k_proj.weight.grad[3, 2] = bad
    before = model.k_proj.weight.grad.clone()
    handle = hw.repel(hw.find_heads(model), RULE, torch.optim.SGD(model.parameters(), lr=0.0))
    handle.apply()
    torch.testing.assert_close(model.k_proj.weight.grad, before, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(model.q_proj.weight.grad.double(), expected["q_proj.weight"], rtol=2e-5, atol=2e-6)
    assert handle.last.finite.tolist() == [True, False, True]
    assert "gradient not finite, gradient unchanged" in str(handle.last)


def test_heads_without_a_gradient_are_skipped_and_none_at_all_is_an_error():
    model = model_with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = hw.repel(hw.find_heads(model), RULE, optimizer)
    model.k_proj.weight.grad = None
    handle.apply()
    assert handle.last.skipped == ("key",)
    optimizer.step()
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


def test_strength_is_a_schedule_on_the_repulsion_alone():
    model = model_with_gradients()
    expected = expected_gradients(model, RULE, strength=2.5)
    handle = hw.repel(hw.find_heads(model), RULE, torch.optim.SGD(model.parameters(), lr=0.0))
    handle.strength = 2.5
    handle.apply()
    assert_gradients(model, expected, rtol=2e-5, atol=2e-6)


def test_the_reported_norms_are_those_of_the_forces():
    model = model_with_gradients()
    (head_slice, *_) = hw.find_heads(model).slices()
    particles = head_slice.of(head_slice.parameter.detach()).double().flatten(1)
    forces = update(RULE, particles, head_slice.of(head_slice.parameter.grad).double().flatten(1))
    handle = hw.repel(hw.find_heads(model), RULE, torch.optim.SGD(model.parameters(), lr=0.0))
    handle.apply()
    record = handle.last
    assert float(record.driving_norm[0]) == pytest.approx(float(forces.driving.norm()), rel=1e-5)
    assert float(record.repulsion_norm[0]) == pytest.approx(float(forces.repulsion.norm()), rel=1e-5)
    assert float(record.particle_norm[0]) == pytest.approx(float(particles.norm(dim=1).mean()), rel=1e-5)
    assert float(record.force_ratio[0]) == pytest.approx(
        float(forces.repulsion.norm() / forces.driving.norm()), rel=1e-5
    )


def test_parameters_the_optimizer_does_not_hold_are_refused_and_several_optimizers_accepted():
    model = model_with_gradients()
    heads = hw.find_heads(model)
    matrices = torch.optim.SGD([model.q_proj.weight, model.k_proj.weight], lr=0.0)
    with pytest.raises(hw.errors.LayoutError, match="value: its parameters are not held by the optimizer"):
        hw.repel(heads, RULE, matrices)
    expected = expected_gradients(model, RULE)
    rest = torch.optim.Adam([model.v_proj.weight], lr=0.0)
    handle = hw.repel(heads, RULE, [matrices, rest])
    matrices.step()
    rest.step()
    assert_gradients(model, expected, rtol=2e-5, atol=2e-6)
    assert len(handle.last.names) == 3


def test_a_removed_handle_and_its_model_can_be_freed():
    model = model_with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = hw.repel(hw.find_heads(model), RULE, optimizer)
    handle.remove()
    watched = weakref.ref(handle)
    del handle
    gc.collect()
    assert watched() is None
    with pytest.raises(hw.errors.NotFired, match="no optimizer step has been taken"):
        _ = hw.repel(hw.find_heads(model), RULE, optimizer).last


def test_columns_as_heads_are_mixed_without_a_copy():
    from dataclasses import replace

    from headwise.heads.heads import Heads
    from headwise.heads.view import COLUMNS, HeadView

    owner = nn.Module()
    owner.weight = nn.Parameter(torch.randn(6, 12))
    owner.weight.grad = torch.randn(6, 12)
    head_slice = HeadView("query", "weight", owner, "weight", 3, 4, axes=COLUMNS)
    site = replace(hw.find_heads(SeparateAttention()).sites[0], module=owner, slices=(head_slice,), num_heads=3)
    particles = head_slice.of(owner.weight.detach()).flatten(1).double()
    gradients = head_slice.of(owner.weight.grad).flatten(1).double()
    expected = update(RULE, particles, gradients).gradient
    handle = hw.repel(Heads(owner, (site,)), RULE, torch.optim.SGD(owner.parameters(), lr=0.0))
    handle.apply()
    result = head_slice.of(owner.weight.grad).flatten(1).double()
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("far", [None, 0, 1, 2, 3])
def test_near_heads_keep_their_repulsion_in_single_precision(far):
    from headwise.testing import particles_near_collapse

    name = "near" if far is None else f"far {far}"
    model = model_with_gradients()
    head_slice = hw.find_heads(model).slices()[0]
    with torch.no_grad():
        head_slice.of(head_slice.parameter).copy_(particles_near_collapse(4, 60, seed=1)[name].view(4, 5, 12))
    head_slice.parameter.grad.zero_()
    expected = expected_gradients(model, hw.SVGD(alpha=0.7))["q_proj.weight"]
    hw.repel(hw.find_heads(model), hw.SVGD(alpha=0.7), torch.optim.SGD(model.parameters(), lr=0.0)).apply()
    error = (head_slice.parameter.grad.double() - expected).abs().max() / expected.abs().max()
    # coefficients times the parameters themselves, in single precision, would be off by 4e-5
    assert error < 1e-6


def test_a_zero_head_is_refused_where_the_kernel_compares_directions():
    model = model_with_gradients()
    with torch.no_grad():
        model.v_proj.weight[5:10] = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(hw.errors.ShapeError, match=r"value: heads \[1\] of 4 are zero"):
        hw.repel(hw.find_heads(model), hw.SVGD(kernel=hw.kernels.NormalizedRBF()), optimizer)
    hw.repel(hw.find_heads(model), hw.SVGD(), optimizer)


def test_after_a_skipped_step_fresh_gradients_are_acted_on_again():
    model = model_with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = hw.repel(hw.find_heads(model), RULE, optimizer, when="manual")
    handle.apply()
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    expected = expected_gradients(model, RULE)
    handle.apply()
    optimizer.step()
    assert_gradients(model, expected, rtol=2e-5, atol=2e-6)


def test_tied_parameters_are_acted_on_once():
    first, second = model_with_gradients(), SeparateAttention()
    second.q_proj.weight = first.q_proj.weight
    model = nn.ModuleList([first, second])
    expected = expected_gradients(first, RULE)["q_proj.weight"]
    handle = hw.repel(hw.find_heads(model), RULE, torch.optim.SGD(model.parameters(), lr=0.0))
    handle.apply()
    assert len(handle.groups) == 5
    torch.testing.assert_close(first.q_proj.weight.grad.double(), expected, rtol=2e-5, atol=2e-6)


def test_two_models_in_one_optimizer_are_told_apart_and_one_model_found_twice_is_not():
    models = nn.ModuleList([model_with_gradients(), model_with_gradients(seed=1)])
    optimizer = torch.optim.SGD(models.parameters(), lr=0.0)
    for model in models:
        hw.repel(hw.find_heads(model), RULE, optimizer)
    with pytest.raises(hw.errors.SettingError, match="repelled by this optimizer already"):
        hw.repel(hw.find_heads(models), RULE, optimizer)


def test_what_is_no_rule_and_an_optimizer_that_maximizes_are_refused():
    model = model_with_gradients()
    heads = hw.find_heads(model)
    with pytest.raises(hw.errors.SettingError, match="expected a particle rule"):
        hw.repel(heads, hw.SVGD, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(hw.errors.SettingError, match="maximize=True"):
        hw.repel(heads, RULE, torch.optim.SGD(model.parameters(), lr=0.1, maximize=True))
