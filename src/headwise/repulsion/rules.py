"""Update rules on particles: SVGD, SPOS and SGLD.

A rule turns the geometry of a group into a `Mixing`: [M, M] coefficients of the loss gradients, the prior and the
repulsion. Whoever applies it hands g' = drive - repulsion - noise to a descent optimizer, which is -epsilon phi in the
letters of An et al. 2020. Nothing here touches an optimizer or a module, and no rule reads a tensor's value.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from headwise.errors import SettingError, ShapeError, require_boolean, require_positive, require_range, require_shape
from headwise.repulsion.gram import Geometry, geometry, require_nonzero
from headwise.repulsion.kernels import RBF, Kernel
from headwise.repulsion.mixing import Mixing, Relative, blend, require_alpha


@dataclass(frozen=True, eq=False)
class Forces:
    """One step taken apart, each [M, D]: gradient = drive - repulsion - noise goes to a descent optimizer."""

    drive: Tensor
    repulsion: Tensor
    noise: Tensor
    gradient: Tensor


@runtime_checkable
class Rule(Protocol):
    """A particle rule: `SVGD`, `SPOS`, `SGLD`, `CosinePenalty`, `CosineRepulsion`, or your own frozen dataclass."""

    @property
    def needs_inner(self) -> bool:
        """Whether the rule reads inner products besides distances."""
        ...

    def noise_scale(self) -> float:
        """The standard deviation of the noise in g' under an optimizer of rate 1; 0.0 for a deterministic rule."""
        ...

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step."""
        ...


@dataclass(frozen=True)
class SVGD:
    """Stein variational gradient descent on heads (An et al. 2020, Eq. 4; Alg. 1).

    g'_i = eps [ sum_j k_ij (beta N g_j + tau theta_j) - alpha R_i ] / M
    with R_i = sum_j grad_{theta_j} k(theta_j, theta_i).

    The sign is that of a descent step, g' = -eps phi. With M heads in thousands of dimensions it is a regularizer and
    samples no posterior. Adam is scale-free: under it `step_size` shows in clipping alone.

    Args:
        alpha: weight of the repulsion, in units of the loss, at least 0 (0 leaves the smoothing), or a `Relative`.
        step_size: eps, above 0.
        kernel: k.
        smoothing: False puts delta_ij in the place of k_ij in the drive alone: each head its own gradient.
        prior_precision: tau of a Gaussian prior N(0, 1/tau), at least 0; 0 is flat.
        data_size: N; the loss is a mean over examples, so N = 1 tempers the posterior by 1/N.
        inverse_temperature: beta, multiplies the likelihood and not the prior; above 0.
    """

    alpha: float | Relative = 0.01
    step_size: float = 0.1
    kernel: Kernel = field(default_factory=RBF)
    _: KW_ONLY
    smoothing: bool = True
    prior_precision: float = 0.0
    data_size: float = 1.0
    inverse_temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_stein("SVGD", self)
        _check_target("SVGD", self)

    @property
    def needs_inner(self) -> bool:
        """Whether the kernel reads inner products besides distances."""
        return self.kernel.needs_inner

    def noise_scale(self) -> float:
        """0.0: SVGD adds no noise."""
        return 0.0

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step."""
        influence, repulsion, relative = _stein(self, geometry)
        return Mixing(
            self.inverse_temperature * self.data_size * influence,
            _prior(self.prior_precision, influence),
            repulsion,
            relative,
        )


@dataclass(frozen=True)
class SPOS:
    """Stochastic particle-optimization sampling: SVGD plus Langevin diffusion (An et al. 2020, Eq. 5).

    g'_i = eps { [ sum_j k_ij u_j - alpha R_i ] / M + u_i / beta } - sqrt(2 eps / beta) xi_i, u_j = N g_j + tau theta_j.

    The target does not depend on beta, which only weighs the diffusion against SVGD: at alpha = 1 both leave exp(-U)
    invariant. The released code multiplies the noise by median |g|; the paper and this do not.

    Args:
        alpha: weight of the repulsion, in units of the loss, at least 0, or a `Relative`.
        step_size: eps, above 0.
        kernel: k.
        smoothing: False puts delta_ij in the place of k_ij in the drive alone.
        prior_precision: tau of a Gaussian prior N(0, 1/tau), at least 0; 0 is flat.
        data_size: N, above 0; the loss is a mean over examples.
        inverse_temperature: beta, above 0. No default: the papers give none, and small values drown the gradient.
    """

    alpha: float | Relative = 0.01
    step_size: float = 0.1
    kernel: Kernel = field(default_factory=RBF)
    _: KW_ONLY
    smoothing: bool = True
    prior_precision: float = 0.0
    data_size: float = 1.0
    inverse_temperature: float

    def __post_init__(self) -> None:
        _check_stein("SPOS", self)
        _check_target("SPOS", self)

    @property
    def needs_inner(self) -> bool:
        """Whether the kernel reads inner products besides distances."""
        return self.kernel.needs_inner

    def noise_scale(self) -> float:
        """sqrt(2 eps / beta)."""
        return math.sqrt(2 * self.step_size / self.inverse_temperature)

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step, noise apart."""
        influence, repulsion, relative = _stein(self, geometry)
        influence = influence + self.step_size / self.inverse_temperature * _identity(influence)
        return Mixing(self.data_size * influence, _prior(self.prior_precision, influence), repulsion, relative)


@dataclass(frozen=True)
class SGLD:
    """Stochastic gradient Langevin dynamics, each head on its own: the row of An et al. 2020 without a kernel.

    g'_i = eps (N g_i + tau theta_i) - sqrt(2 eps / beta) xi_i, which samples exp(-beta U) as eps becomes small. No
    factor 1/M, and no repulsion.

    Args:
        inverse_temperature: beta, above 0; 1 samples the posterior when `data_size` is the size of the data.
        step_size: eps, above 0.
        prior_precision: tau of a Gaussian prior N(0, 1/tau), at least 0; 0 is flat.
        data_size: N, above 0; the loss is a mean over examples.
    """

    inverse_temperature: float
    step_size: float = 0.1
    _: KW_ONLY
    prior_precision: float = 0.0
    data_size: float = 1.0

    def __post_init__(self) -> None:
        require_positive("SGLD.step_size", self.step_size)
        _check_target("SGLD", self)

    @property
    def needs_inner(self) -> bool:
        """False: SGLD reads no geometry."""
        return False

    def noise_scale(self) -> float:
        """sqrt(2 eps / beta)."""
        return math.sqrt(2 * self.step_size / self.inverse_temperature)

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step, noise apart."""
        own = self.step_size * _identity(geometry.squared_distances)
        return Mixing(self.data_size * own, _prior(self.prior_precision, own), torch.zeros_like(own), None)


def update(rule: Rule, particles: Tensor, gradients: Tensor, noise: Tensor | None = None) -> Forces:
    """The `Forces` of one step of `rule`, as a pure function: nothing is modified.

    Computed in float32 at least, with distances and kernel in float64.

    Args:
        rule: the particle rule.
        particles: [M, D], one particle a row.
        gradients: [M, D], the gradient of the mean loss in each particle.
        noise: [M, D] of standard normal draws; needed by `SPOS` and `SGLD`, refused by rules without noise.

    Returns:
        The forces, each [M, D]; hand `.gradient` to a descent optimizer.

    Raises:
        ShapeError: shapes or dtypes do not fit, a value is not finite, or a kernel on directions meets a zero particle.
        SettingError: `noise` is missing for a rule that needs it, or given to one that does not.

    >>> theta = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> g = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    >>> update(SVGD(alpha=0.5, step_size=0.1), theta, g).gradient
    tensor([[0.0514, 0.0425],
            [0.0245, 0.0464],
            [0.0468, 0.0310]], dtype=torch.float64)
    """
    _require_particles("particles", particles, None)
    _require_particles("gradients", gradients, particles)
    deviation = rule.noise_scale()
    if noise is None and deviation > 0:
        raise SettingError(f"{rule} adds noise and none was given; pass noise=torch.randn_like(particles).")
    if noise is not None and deviation == 0:
        raise SettingError(f"{rule} adds no noise; leave noise out.")
    if rule.needs_inner:
        require_nonzero(particles)
    dtype = torch.promote_types(torch.promote_types(particles.dtype, gradients.dtype), torch.float32)
    theta, g = particles.detach().to(dtype), gradients.detach().to(dtype)
    drive, repulsion = blend(rule.mixing(geometry(theta, inner=rule.needs_inner)), theta, g)
    if noise is None:
        return Forces(drive, repulsion, torch.zeros_like(drive), drive - repulsion)
    _require_particles("noise", noise, particles)
    kick = deviation * noise.to(dtype)
    return Forces(drive, repulsion, kick, drive - repulsion - kick)


def _stein(rule: SVGD | SPOS, geometry: Geometry) -> tuple[Tensor, Tensor, float | None]:
    """eps/M times k (or the identity), eps/M times alpha R's coefficients, and the relative strength if that is it."""
    kernel = rule.kernel.matrices(geometry)
    share = rule.step_size / kernel.values.shape[-1]
    influence = kernel.values if rule.smoothing else _identity(kernel.values)
    if isinstance(rule.alpha, Relative):
        return share * influence, share * kernel.repulsion, rule.alpha.ratio
    return share * influence, share * rule.alpha * kernel.repulsion, None


def _prior(precision: float, influence: Tensor) -> Tensor | None:
    return None if precision == 0 else precision * influence


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)


def _check_stein(owner: str, rule: SVGD | SPOS) -> None:
    require_alpha(owner, rule.alpha)
    require_positive(f"{owner}.step_size", rule.step_size)
    if isinstance(rule.kernel, type) or not isinstance(rule.kernel, Kernel):
        raise SettingError(f"{owner}.kernel is {rule.kernel!r}; expected a kernel such as RBF(), an instance.")
    require_boolean(f"{owner}.smoothing", rule.smoothing)


def _check_target(owner: str, rule: SVGD | SPOS | SGLD) -> None:
    require_range(f"{owner}.prior_precision", rule.prior_precision, low=0.0)
    require_positive(f"{owner}.data_size", rule.data_size)
    require_positive(f"{owner}.inverse_temperature", rule.inverse_temperature)


def _require_particles(name: str, tensor: Tensor, like: Tensor | None) -> None:
    require_shape(name, tensor, (None, None) if like is None else tuple(like.shape))
    if not tensor.is_floating_point():
        raise ShapeError(f"{name} has dtype {tensor.dtype}; expected floating point. Convert with {name}.float().")
    if tensor.numel() == 0:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; expected at least one particle of one number.")
    if not torch.isfinite(tensor).all():
        raise ShapeError(
            f"{name} holds values that are not finite; expected finite numbers. Check the loss or its scale."
        )
