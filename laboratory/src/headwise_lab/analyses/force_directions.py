"""The radial share of an arm's repulsion, which changes the norm of heads and not their direction."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import SettingError
from headwise.heads.heads import Heads
from headwise.kernels import geometry
from headwise.repulsion.repel import Repel
from headwise.repulsion.rules import Rule, blend
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.trained import load_trained


def measure_directions(settings: RunSettings, folder: Path) -> dict[str, Any]:
    """Return the radial share of the repulsion on a run's initial and trained heads; nothing without repulsion."""
    method = settings.arm.find(Repel)
    if method is None:
        return {"numbers": {}}
    rule = method.rule
    trained = load_trained(settings, folder)
    _, fresh = attach_arm(trained.task, settings.arm, trained.data, settings.scale, seed=settings.seed)
    assert fresh.heads is not None  # a trained model with heads has them when it is new
    found = {
        "radial_share_at_start": _average_share(rule, fresh.heads),
        "radial_share": _average_share(rule, trained.heads),
    }
    return {"numbers": {name: value for name, value in found.items() if value is not None}}


def radial_share(rule: Rule, particles: Tensor) -> float | None:
    """Return the share of |R|^2 along the particles [M, D], in [0, 1]; None without repulsion.

    With R_i the repulsion on theta_i: sum_i (R_i . theta_i / |theta_i|)^2 / sum_i |R_i|^2.

    >>> from headwise.repulsion.rules import CosinePenalty
    >>> radial_share(CosinePenalty(alpha=1.0), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    0.0
    """
    theta = particles.detach().double()
    mixing = rule.mixing(geometry(theta, inner=rule.needs_inner))
    _, repulsion = blend(mixing, theta, torch.ones_like(theta))
    total = float(repulsion.square().sum())
    if total == 0.0:
        return None
    units = torch.nn.functional.normalize(theta, dim=1)
    return round(float((repulsion * units).sum(1).square().sum()) / total, 12)


def _average_share(rule: Rule, heads: Heads) -> float | None:
    shares = [radial_share(rule, head_slice.read().flatten(1)) for head_slice in heads.slices()]
    known = [share for share in shares if share is not None]
    if len(known) not in (0, len(shares)):
        raise SettingError("the rule repels in some projections and not in others.")
    return sum(known) / len(known) if known else None
