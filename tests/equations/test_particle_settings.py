"""Particles, noise and settings of rules that are refused."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from equations.draws import draw
from headwise.errors import SettingError, ShapeError
from headwise.kernels import RBF, Cosine, NormalizedRBF
from headwise.repulsion.function_space import FunctionSVGD, SpanSVGD
from headwise.repulsion.rules import SGLD, SPOS, SVGD, CosinePenalty, CosineRepulsion, Rule, update
from headwise.strength import Relative

NOISY = (SPOS, SGLD)


def test_noise_is_required_where_the_rule_adds_it_and_refused_elsewhere():
    theta, g = draw(4, 5), draw(4, 5, seed=1)
    with pytest.raises(SettingError, match=r"SGLD.* adds noise and none was given"):
        update(SGLD(1.7), theta, g)
    with pytest.raises(SettingError, match=r"SVGD.* adds no noise"):
        update(SVGD(), theta, g, theta)
    with pytest.raises(ShapeError, match="noise has shape"):
        update(SGLD(1.7), theta, g, draw(4, 6))


@pytest.mark.parametrize("rule", ["svgd", None, SVGD])
def test_what_is_no_rule_is_refused(rule):
    with pytest.raises(SettingError, match=r"rule is .*; expected a particle rule"):
        update(rule, draw(4, 5), draw(4, 5, seed=1))


@pytest.mark.parametrize("rule", [SpanSVGD(alpha=0.3), FunctionSVGD(alpha=0.3)])
def test_a_rule_on_what_heads_span_or_compute_is_refused(rule: Rule):
    with pytest.raises(SettingError, match=f"{type(rule).__name__}.* compares what heads span or compute"):
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


BAD_SETTINGS = [
    ("alpha", -0.1),
    ("alpha", math.nan),
    ("alpha", None),
    ("step_size", 0.0),
    ("kernel", RBF),
    ("kernel", "rbf"),
    ("smoothing", 1),
    ("prior_precision", -1.0),
    ("data_size", 0.0),
    ("inverse_temperature", 0.0),
    ("inverse_temperature", math.inf),
]


@pytest.mark.parametrize(
    ("owner", "field", "value"),
    [
        (owner, field, value)
        for owner in (SVGD, SPOS, SGLD, CosinePenalty, CosineRepulsion)
        for field, value in BAD_SETTINGS
        if field in owner.__dataclass_fields__
    ],
)
def test_settings_out_of_range_are_refused_by_name(owner: type, field: str, value: object):
    needed = {"inverse_temperature": 1.7} if owner in NOISY else {}
    owner(**needed)
    with pytest.raises(SettingError, match=f"{owner.__name__}.{field}"):
        owner(**{**needed, field: value})


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.inf, True])
def test_a_relative_strength_is_positive(ratio: float):
    with pytest.raises(SettingError, match=r"Relative\.ratio"):
        Relative(ratio)


def test_the_temperature_of_a_noisy_rule_has_no_default():
    for owner in NOISY:
        with pytest.raises(TypeError, match="inverse_temperature"):
            owner()
