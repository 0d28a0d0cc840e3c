"""What makes no particles, votes, heads, weights or probabilities is refused in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from torch import nn

from cases import cases
from equations.draws import D, E, H, draw, random, seeded
from headwise import metrics
from headwise.errors import HeadwiseError, MaskError, SettingError, ShapeError
from headwise.kernels import IMQ, RBF, Cosine, Fixed, Median, NormalizedRBF, RadialRBF, geometry, require_nonzero
from headwise.metrics.calibration import predictive_entropy, reliability, reliability_of
from headwise.metrics.intervals import mean_interval
from headwise.metrics.pairs import distance_pairs, mean_over_pairs
from headwise.metrics.roles import role_shares
from headwise.nn.average_weights import mean_weights
from headwise.repulsion.function_space import FunctionSVGD, SpanSVGD
from headwise.repulsion.rules import SGLD, SPOS, SVGD, CosinePenalty, CosineRepulsion, update
from headwise.routing.algorithms import SharedTrunk
from headwise.routing.modules import (
    Chunks,
    EMRouting,
    Residual,
    SimpleRouting,
    Trunk,
    build,
    em_routing,
    simple_routing,
    uniform_routing,
)
from headwise.strength import Relative, Target

Refusals = list[tuple[Callable[[], object], type[Exception], str]]
THETA, G = draw(4, 5), draw(4, 5, seed=1)
ZERO = THETA * torch.tensor([1.0, 0.0, 1.0, 0.0])[:, None]
BETA, VOTES = torch.zeros(6, dtype=torch.float64), random(2, 3, 6, 1)
HALF, TRUE = torch.tensor([0.5]), torch.tensor([True])
ROLES, WEIGHTS = torch.ones(3, 2, 7, 7).bool(), draw(3, 4, 7, 7).softmax(-1)


class NoVotes:
    """One of the two methods of a parameterization."""

    def compute(self) -> None:
        pass


WRONG_VOTES = (SharedTrunk, "shared", None, NoVotes())


def step(rule, particles=THETA, gradients=G, *noise) -> Callable[[], object]:
    return lambda: update(rule, particles, gradients, *noise)


def average(keys=(2, 3, 7, 4), mask=None, dtype: torch.dtype = torch.float32) -> Callable[[], object]:
    return lambda: mean_weights(torch.zeros(2, 6, 5, 4), torch.zeros(keys, dtype=dtype), mask)


def twice(make: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> Callable[[], object]:
    given = random(*shape).requires_grad_()
    return lambda: torch.autograd.grad(make(given).square().sum(), given, create_graph=True)


PARTICLES: Refusals = [
    (step(SGLD(1.7)), SettingError, r"SGLD.* adds noise and none was given"),
    (step(SVGD(), THETA, G, THETA), SettingError, r"SVGD.* adds no noise"),
    (step(SGLD(1.7), THETA, G, draw(4, 6)), ShapeError, "noise has shape"),
    *((step(rule), SettingError, "rule is .*; expected a particle rule") for rule in ("svgd", None, SVGD)),
    (step(SpanSVGD(0.3)), SettingError, "SpanSVGD.* compares what heads span or compute"),
    (step(FunctionSVGD(0.3)), SettingError, "FunctionSVGD.* compares what heads span or compute"),
    (step(SVGD(Target(3.0))), SettingError, "has no strength without a model"),
    *(
        (step(rule, ZERO), ShapeError, r"particles \[1, 3\] of 4 are zero")
        for rule in (SVGD(kernel=Cosine()), SVGD(kernel=NormalizedRBF()), CosinePenalty(), CosineRepulsion())
    ),
    (lambda: require_nonzero("particles", [ZERO]), ShapeError, r"particles \[1, 3\] of 4 are zero"),
    (step(SVGD(), THETA, draw(4, 6)), ShapeError, "gradients has shape"),
    (step(SVGD(), draw(4), draw(4)), ShapeError, "particles has shape"),
    (step(SVGD(), THETA.long()), ShapeError, "particles has dtype"),
    (step(SVGD(), THETA, G.long()), ShapeError, "gradients has dtype"),
    (step(SVGD(), THETA * math.nan), ShapeError, "particles holds values that are not finite"),
    (step(SVGD(), THETA, G * math.inf), ShapeError, "gradients holds values that are not finite"),
    (step(SVGD(), draw(0, 5), draw(0, 5)), ShapeError, "at least one particle"),
    (step(SVGD(), draw(4, 0), draw(4, 0)), ShapeError, "at least one particle"),
    (step(SVGD(), [[1.0]], draw(1, 1)), ShapeError, "particles is a list"),
    *(
        (lambda kernel=kernel: kernel.matrices(geometry(THETA, inner=False)), SettingError, "inner=True")
        for kernel in (Cosine(), NormalizedRBF(), RadialRBF())
    ),
    *((kind, TypeError, "inverse_temperature") for kind in (SPOS, SGLD)),
]
ROUTING: Refusals = [
    *(
        (lambda kind=kind, wrong=wrong: kind(**wrong), SettingError, next(iter(wrong)))
        for kind, wrong in (
            *((EMRouting, {"iterations": wrong}) for wrong in (0, 1.5)),
            (EMRouting, {"capsules": 0}),
            *((EMRouting, {"floor": wrong}) for wrong in (0.0, 1e-3)),
            *((EMRouting, {"activation": wrong}) for wrong in ("no", 1, None)),
            *((SimpleRouting, wrong) for wrong in ({"iterations": 0}, {"capsules": -1}, {"floor": -1e-9})),
            (SimpleRouting, {"softmax_over": "tokens"}),
            *((Chunks, {name: 0}) for name in ("tokens", "routed")),
        )
    ),
    *(
        (lambda wrong=wrong: EMRouting(inverse_temperature=wrong), SettingError, r"EMRouting\.inverse_temperature is")
        for wrong in ((0.0, 3.0), (1.0, 0.0), (1.0,), 2.0)
    ),
    *(
        (lambda kind=kind, wrong=wrong: kind(**wrong), SettingError, message)
        for kind in (SimpleRouting, EMRouting, Trunk)
        for wrong, message in (
            *(({"votes": w}, r"votes is .*; expected for example SharedTrunk\(\)") for w in WRONG_VOTES),
            *(({"chunks": w}, r"chunks is .*; expected for example Chunks\(tokens=64\)") for w in (8, Chunks, None)),
        )
    ),
    *(
        (lambda route=route, votes=votes: route(votes), ShapeError, "votes")
        for votes in (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, 0), torch.zeros(2, 3, 4, 1).long())
        for route in (
            lambda votes: simple_routing(votes, SimpleRouting()),
            lambda votes: em_routing(votes, EMRouting()),
            uniform_routing,
        )
    ),
    (lambda: em_routing(VOTES, EMRouting()), SettingError, "beta_a"),
    (lambda: em_routing(VOTES, EMRouting(activation=False), BETA, BETA), SettingError, "activation is False"),
    (lambda: em_routing(VOTES, EMRouting(), BETA), SettingError, "beta_mu"),
    (lambda: em_routing(VOTES, EMRouting(), BETA, BETA[:5]), ShapeError, "beta_mu"),
    (lambda: build(EMRouting(capsules=3), H, E, D), SettingError, "divisor of the width"),
    (lambda: build(Trunk(), 0, E, D), SettingError, "num_heads is 0"),
    (lambda: build("em", H, E, D), SettingError, "a str"),
    (lambda: build(Residual(Trunk()), H, E, D), SettingError, "projection it keeps"),
    (lambda: build(Trunk(), H, E, D, nn.Linear(8, 8)), SettingError, "no projection"),
    (lambda: Residual(Residual(Trunk())), SettingError, "itself a Residual"),
    (lambda: seeded(Trunk())(torch.zeros(3, 7)), ShapeError, "2 heads of 4"),
    (twice(seeded(EMRouting()).double(), 3, 8), HeadwiseError, "differentiable once"),
]
ATTENTION: Refusals = [
    (average((2, 4, 7, 4)), ShapeError, "with G dividing H"),
    (average((2, 3, 7, 5)), ShapeError, "expected"),
    (average(dtype=torch.float64), ShapeError, "one floating dtype"),
    (average(mask=torch.zeros(2, 3, 5, 7)), MaskError, r"broadcasts to \(2, 6, 5, 7\)"),
    (average(mask=torch.zeros(5, 7, dtype=torch.int64)), MaskError, "expected bool"),
    (
        twice(lambda queries: mean_weights(queries, draw(2, 3, 7, 4)), 2, 6, 5, 4),
        HeadwiseError,
        "differentiable once",
    ),
]
METRICS: Refusals = [
    *(
        (lambda name=name: getattr(metrics, name)(draw(2, 3, 1, 5)), ShapeError, "has 1 head; expected at least")
        for name in ("head_distance", "output_cosine", "linear_cka", "rbf_hsic", "prediction_disagreement")
    ),
    *(
        (lambda name=name: getattr(metrics, name)(draw(2, 1, 3, 5)), ShapeError, "has 1 head; expected at least")
        for name in ("attention_jensen_shannon", "generalized_jensen_shannon")
    ),
    (lambda: metrics.parameter_cosine(draw(1, 5)), ShapeError, "particles has 1 head; expected at least two"),
    (lambda: metrics.particle_norms(draw(5)), ShapeError, r"particles has shape \(5,\)"),
    (lambda: metrics.effective_heads(draw(3, 2, 4)), ShapeError, "are of 3 tokens; debiased CKA needs at least 4"),
    (
        lambda: metrics.effective_heads(draw(5, 2, 4), output_weights=draw(2, 7, 3)),
        ShapeError,
        r"output_weights has shape \(2, 7, 3\); expected \[2, d, 4\]",
    ),
    (lambda: metrics.linear_cka(draw(1, 3, 4)), ShapeError, "the moments are of 1 token"),
    (
        lambda: metrics.output_moments(draw(5, 3, 4)) + metrics.output_moments(draw(5, 2, 4)),
        ShapeError,
        r"\(3, 4\) and \(2, 4\) were added",
    ),
    *(
        (lambda most=most: metrics.rbf_hsic(draw(5, 3, 2), tokens=most), SettingError, f"tokens is {most}; expected an")
        for most in (1, 0, -3)
    ),
    (lambda: mean_over_pairs(torch.ones(1, 1)), ShapeError, "1 head"),
    (lambda: distance_pairs(draw(3, 7, 4, 6), ROLES[:, 0, 0] ^ True).mean, MaskError, "no valid token"),
    (lambda: role_shares(WEIGHTS, ROLES[:2]), ShapeError, r"expected \(3 or 1, roles, 7 or 1, 7\)"),
    (lambda: role_shares(WEIGHTS, ROLES.float()), MaskError, r"expected torch\.bool"),
    (
        lambda: role_shares(WEIGHTS, ROLES, ROLES[0, 0, 0]),
        MaskError,
        r"keep has shape \(7,\); expected \(3, 7\)",
    ),
    (
        lambda: role_shares(WEIGHTS, ROLES, ROLES[:, 0, 0].double()),
        MaskError,
        r"keep is torch\.float64; expected a bool tensor",
    ),
    (lambda: mean_interval(draw(0)), ShapeError, "one number per item"),
    *(
        (
            lambda level=level: mean_interval(draw(12), level=level),
            SettingError,
            rf"level is {level}; expected a number",
        )
        for level in (1.0, 1 - 1e-16)
    ),
    (lambda: reliability(torch.tensor([1.2]), TRUE), SettingError, r"between 1\.2 and 1\.2"),
    (lambda: reliability(torch.tensor([math.nan]), TRUE), SettingError, "between nan and nan"),
    (lambda: reliability(torch.zeros(0), torch.ones(0).bool()), ShapeError, "floats"),
    (lambda: reliability(HALF, torch.ones(1)), ShapeError, r"correct is torch\.float32"),
    (lambda: reliability(HALF, TRUE) + reliability(HALF, TRUE, bins=3), SettingError, "15 and 3"),
    (lambda: predictive_entropy(torch.tensor([[0.5, 0.5], [1.0, 2.0]])), SettingError, "row 1 .* sums to 3"),
    (lambda: reliability_of(torch.tensor([[0.5, 0.5]]), torch.tensor([0.0])), ShapeError, "labels are"),
    (lambda: reliability_of(torch.tensor([[0.5, 0.5]]), torch.tensor([0, 1])), ShapeError, "labels are"),
]


@cases(("call", "error", "message"), [*PARTICLES, *ROUTING, *ATTENTION, *METRICS])
def test_what_makes_no_sense_is_refused(call: Callable[[], object], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()


def test_a_zero_particle_is_no_trouble_for_distances():
    require_nonzero("particles", [THETA])
    update(SVGD(), ZERO, G)


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
OWNERS = (SVGD, CosinePenalty, CosineRepulsion, FunctionSVGD, SpanSVGD, RBF, IMQ, NormalizedRBF, RadialRBF, *NEEDED)


@cases(("owner", "name"), [(owner, field.name) for owner in OWNERS for field in fields(owner)])
def test_settings_out_of_range_are_refused_by_name(owner: type, name: str):
    needed = NEEDED.get(owner, {})
    owner(**needed)
    for value in BAD[name]:
        with pytest.raises(SettingError, match=rf"{owner.__name__}\.{name} is "):
            owner(**{**needed, name: value})
