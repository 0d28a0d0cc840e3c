"""The checks offered to users pass on every built-in rule and layout, and fail on broken ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import headwise as hw
from cases import cases
from heads.attentions import SeparateAttention, StridedAttention
from headwise.repulsion.rules import Mixing
from headwise.testing import check_layout, check_rule, particles_near_collapse

RULES = [
    hw.SVGD(alpha=0.3, step_size=0.2),
    hw.SVGD(alpha=0.3, kernel=hw.kernels.IMQ(hw.kernels.Fixed(2.5)), smoothing=False, prior_precision=0.4),
    hw.SVGD(alpha=hw.Relative(0.7), kernel=hw.kernels.NormalizedRBF()),
    hw.SVGD(alpha=0.3, kernel=hw.kernels.Cosine(), data_size=3.0),
    hw.SPOS(alpha=0.3, inverse_temperature=4.0),
    hw.SGLD(inverse_temperature=4.0),
    hw.repulsion.CosinePenalty(alpha=0.4, step_size=0.3),
]


@cases("rule", RULES)
@cases("count", [2, 5])
def test_built_in_rules_pass(rule, count):
    check_rule(rule, count=count)


@dataclass(frozen=True)
class Broken:
    """SVGD with one of its matrices spoilt."""

    how: str
    needs_inner: bool = False

    def noise_scale(self) -> float:
        return 0.0

    def mixing(self, geometry) -> Mixing:
        mixing = hw.SVGD(alpha=0.5).mixing(geometry)
        if self.how == "not finite":
            return replace(mixing, repulsion=mixing.repulsion / geometry.squared_distances.amax())
        if self.how == "order":
            return replace(mixing, drive=mixing.drive * torch.arange(1.0, 1 + len(mixing.drive), dtype=torch.float64))
        return replace(mixing, repulsion=mixing.repulsion + 0.1)


@cases(
    ("how", "message"),
    [("not finite", "is not finite"), ("order", "does not permute the driving term"), ("equal", "equal heads repel")],
)
def test_broken_rules_fail(how, message):
    with pytest.raises(AssertionError, match=message):
        check_rule(Broken(how))


def test_layouts_pass_or_are_refused():
    x = torch.randn(2, 6, 12)
    assert check_layout(SeparateAttention(), (x,)).sites == ("",)
    assert check_layout(nn.MultiheadAttention(12, 3, batch_first=True), (x, x, x)).sites == ("",)
    with pytest.raises(hw.errors.LayoutError, match="misreads"):
        check_layout(StridedAttention(), (x,))


def test_the_far_particle_is_far_and_the_others_are_near():
    cases = particles_near_collapse(4, 5, seed=2)
    distances = torch.cdist(cases["far 2"], cases["far 2"])
    assert (distances[2, [0, 1, 3]] > 5).all()
    assert distances[[0, 1, 3]][:, [0, 1, 3]].max() < 0.05
