"""Particles, noise and settings of rules that are refused."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
from torch import Tensor

from equations.draws import draw
from headwise.errors import SettingError, ShapeError
from headwise.kernels import IMQ, RBF, Cosine, Fixed, Median, NormalizedRBF, RadialRBF
from headwise.repulsion.function_space import FunctionSVGD, SpanSVGD
from headwise.repulsion.rules import SGLD, SPOS, SVGD, CosinePenalty, CosineRepulsion, Rule, update
from headwise.strength import Relative, Target

NOISY = (SPOS, SGLD)


def test_noise_is_required_where_the_rule_adds_it_and_refused_elsewhere():
    theta, g = draw(4, 5), draw(4, 5, seed=1)
    with pytest.raises(SettingError, match=r"SGLD.* adds noise and none was given"):
        update(SGLD(1.7), theta, g)
    with pytest.raises(SettingError, match=r"SVGD.* adds no noise"):
        update(SVGD(), theta, g, theta)
    with pytest.raises(ShapeError, match="noise has shape"):
        update(SGLD(1.7), theta, g, draw(4, 6))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        *((rule, "rule is .*; expected a particle rule") for rule in ("svgd", None, SVGD)),
        *((kind(0.3), f"{kind.__name__}.* compares what heads span or compute") for kind in (SpanSVGD, FunctionSVGD)),
        (SVGD(Target(3.0)), "has no strength without a model"),
    ],
)
def test_what_is_no_rule_on_particles_is_refused(rule, message: str):
    with pytest.raises(SettingError, match=message):
        update(rule, draw(4, 5), draw(4, 5, seed=1))


@pytest.mark.parametrize(
    "rule", [SVGD(kernel=Cosine()), SVGD(kernel=NormalizedRBF()), CosinePenalty(), CosineRepulsion()]
)
def test_a_zero_particle_is_refused_where_directions_matter(rule: Rule):
    theta = draw(3, 4)
    theta[1] = 0
    with pytest.raises(ShapeError, match=r"particles \[1\] of 3 are zero"):
        update(rule, theta, draw(3, 4, seed=1))
    update(SVGD(), theta, draw(3, 4, seed=1))


@pytest.mark.parametrize(
    ("particles", "gradients", "message"),
    [
        (draw(4, 5), draw(4, 6), "gradients has shape"),
        (draw(4), draw(4), "particles has shape"),
        (draw(4, 5).long(), draw(4, 5), "particles has dtype"),
        (draw(4, 5), draw(4, 5).long(), "gradients has dtype"),
        (draw(4, 5) * math.nan, draw(4, 5), "particles holds values that are not finite"),
        (draw(4, 5), draw(4, 5) * math.inf, "gradients holds values that are not finite"),
        (draw(0, 5), draw(0, 5), "at least one particle"),
        (draw(4, 0), draw(4, 0), "at least one particle"),
        ([[1.0]], draw(1, 1), "particles is a list"),
    ],
)
def test_bad_particles_are_refused(particles: Tensor, gradients: Tensor, message: str):
    with pytest.raises(ShapeError, match=message):
        update(SVGD(), particles, gradients)


BAD = {
    "alpha": [-0.1, math.nan, None],
    "step_size": [0.0],
    "kernel": [RBF, "rbf"],
    "bandwidth": [Median, 2.0, None],
    "smoothing": [1],
    "prior_precision": [-1.0],
    "data_size": [0.0],
    "inverse_temperature": [0.0, math.inf],
    "value": [0.0, -1.0, math.nan, math.inf, True, "1"],
    "ratio": [0.0, -1.0, math.inf, True],
    "effective_heads": [0.5],
    "highest": [0.0],
    "proportional": [-1.0],
    "integral": [-1.0],
    "back": [-1.0],
    "decay": [1.0],
}
NEEDED = {
    SPOS: {"inverse_temperature": 1.7},
    SGLD: {"inverse_temperature": 1.7},
    Fixed: {"value": 1.0},
    Relative: {"ratio": 0.1},
    Target: {"effective_heads": 2.0},
}
OWNERS = (SVGD, SPOS, SGLD, CosinePenalty, CosineRepulsion, FunctionSVGD, SpanSVGD, RBF, IMQ, NormalizedRBF, RadialRBF)


@pytest.mark.parametrize("owner", [*OWNERS, Fixed, Relative, Target])
def test_settings_out_of_range_are_refused_by_name(owner: type):
    held = [field.name for field in fields(owner)]
    needed = NEEDED.get(owner, {})
    owner(**needed)
    checked = [(name, value) for name in held for value in BAD[name]]
    assert checked
    for name, value in checked:
        with pytest.raises(SettingError, match=rf"{owner.__name__}\.{name} is "):
            owner(**{**needed, name: value})


def test_the_temperature_of_a_noisy_rule_has_no_default():
    for owner in NOISY:
        with pytest.raises(TypeError, match="inverse_temperature"):
            owner()
