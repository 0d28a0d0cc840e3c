"""The noise of Langevin rules: its size, its keys, its place in a step."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from repulsion.by_hand import model_with_gradients


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
