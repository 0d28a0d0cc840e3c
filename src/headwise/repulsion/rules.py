"""Update rules on particles: SVGD, SPOS, SGLD and the cosine rules of An et al. 2020.

A rule turns the geometry of a group into a `Mixing`: [M, M] coefficients of the loss gradients, the prior and the
repulsion. The step hands g' = driving term - repulsion - noise to a descent optimizer, which is -epsilon phi in the
letters of An et al. 2020. No rule reads the value of a tensor, so that a step never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Annotated, Protocol, runtime_checkable

import torch
from torch import Tensor

from headwise.errors import SettingError, ShapeError, require_shape
from headwise.kernels import (
    RBF,
    Cosine,
    Geometry,
    Kernel,
    cosine_gradient,
    geometry,
    require_instance,
    require_nonzero,
)
from headwise.settings import NonNegative, Positive, check_fields
from headwise.strength import DEFAULT, Relative, Target, require_strength

# A factor on the repulsion of all groups, or of each by name.
Strength = float | Mapping[str, float]


Alpha = Annotated[float | Relative | Target, partial(require_strength, low=0.0)]
AnyKernel = Annotated[Kernel, partial(require_instance, Kernel, "a kernel such as RBF(), an instance")]


@dataclass(frozen=True, eq=False)
class Mixing:
    """Coefficients of one step: g' = drive @ g + prior @ theta - s * (repulsion @ theta).

    Args:
        drive: [*, M, M], multiplies the loss gradients g.
        prior: [*, M, M], multiplies the particles; None when the prior is flat.
        repulsion: [*, M, M], multiplies the particles; alpha, epsilon and 1/M are in it.
        relative: the ratio of a `Relative` strength, which sets s (`repulsion_scale`); None means s = 1.
    """

    drive: Tensor
    prior: Tensor | None
    repulsion: Tensor
    relative: float | None


def blend(mixing: Mixing, particles: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """The driving term drive @ g + prior @ theta, [*, M, D], and the repulsion s * (repulsion @ theta) of one step."""
    driving = mixing.drive.to(gradients.dtype) @ gradients
    if mixing.prior is not None:
        driving = driving + mixing.prior.to(particles.dtype) @ particles
    # In the basis (theta_0, theta_1 - theta_0, ...) nearly equal particles lose no digits: column 0 then holds the
    # sums of the rows, which are zero for every kernel on distances.
    rows = torch.cat([particles[..., :1, :], particles[..., 1:, :] - particles[..., :1, :]], dim=-2)
    sums = mixing.repulsion.sum(-1, keepdim=True)
    repulsion = torch.cat([sums, mixing.repulsion[..., 1:]], dim=-1).to(particles.dtype) @ rows
    norms = (torch.linalg.vector_norm(force, dim=(-2, -1)) for force in (driving, repulsion))
    return driving, repulsion_scale(mixing, *norms)[..., None, None].to(repulsion.dtype) * repulsion


def repulsion_scale(mixing: Mixing, drive_norm: Tensor, repulsion_norm: Tensor) -> Tensor:
    """The factor s [*] on the repulsion: 1, or what makes its norm `relative` times that of the driving term.

    From the norms [*] of the driving term, drive @ g + prior @ theta, and of repulsion @ theta. It is 0 for a group
    whose particles do not repel each other, whatever the ratio.
    """
    if mixing.relative is None:
        return torch.ones_like(repulsion_norm)
    return torch.where(repulsion_norm > 0, mixing.relative * drive_norm / repulsion_norm, 0.0)


def repulsion_norms(mixing: Mixing, gram: Tensor) -> Tensor:
    """The norm of `mixing.repulsion @ particles` of each group from their Gram matrices, [G]."""
    squares = (mixing.repulsion @ gram * mixing.repulsion).sum((-2, -1))
    return squares.clamp_min(0).sqrt()


def repulsion_factor(
    mixing: Mixing, drive_norm: Tensor, repulsion_norm: Tensor, strength: float | Tensor, scale: Tensor | None
) -> Tensor:
    """The factor on the repulsion of each group: scheduled strength, relative strength, scale of the gradients."""
    factor = strength * repulsion_scale(mixing, drive_norm, repulsion_norm.to(drive_norm.dtype))
    # a relative strength follows the driving term, which carries the gradient scale already
    return factor if scale is None or mixing.relative is not None else factor * scale


def find_strength(strength: Strength, name: str) -> float:
    """The factor on the repulsion of a group.

    >>> find_strength({"layers.0 query": 0.5}, "layers.0 query")
    0.5
    """
    return strength[name] if isinstance(strength, Mapping) else strength


def stack_strengths(strength: Strength, names: Sequence[str], like: Tensor) -> float | Tensor:
    """The factors of several groups, [G], or one number where they are equal."""
    factors = [find_strength(strength, name) for name in names]
    return factors[0] if len(set(factors)) == 1 else torch.tensor(factors, dtype=like.dtype, device=like.device)


def mark_overflow(total: Tensor, force: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers [*] as they are, or infinite where the dtype of a gradient cannot hold a force [*, ...].

    The force is in at least single precision, and a number is finite if the force is.

    >>> mark_overflow(torch.tensor([1.0, 2.0]), torch.tensor([[1.0], [-7e4]]), torch.float16)
    tensor([1., inf])
    """
    # other dtypes hold all numbers whose norm is finite in single precision
    if dtype != torch.float16:
        return total
    largest = torch.linalg.vector_norm(force.flatten(total.dim()), math.inf, dim=-1)
    return torch.where(largest <= torch.finfo(dtype).max, total, math.inf)


def write_finite(forces: Sequence[Tensor], gradients: Sequence[Tensor], total: Tensor) -> Tensor:
    """Write forces into gradients if all are finite, as the number `total` says; returns it, infinite if not.

    Otherwise the gradients stay as they are, for the loop or a GradScaler to notice.
    """
    for force, gradient in zip(forces, gradients, strict=True):
        total = mark_overflow(total, force, gradient.dtype)
    # a number in the CPU's own memory can be read at once, and a copy costs less than a choice
    known = is_finite(total) if total.device.type == "cpu" else None
    for force, gradient in zip(forces, gradients, strict=True):
        if known:
            gradient.copy_(force)
        elif known is None:
            torch.where(total.isfinite(), force.to(gradient.dtype), gradient, out=gradient)
    return total


def is_finite(number: Tensor) -> bool:
    """Whether a number in the CPU's own memory is finite."""
    return math.isfinite(number.view(1).tolist()[0])


def scale_prior(mixing: Mixing, scale: Tensor | None) -> Tensor | None:
    """The coefficients of the prior, times the scale of the gradients; None when the prior is flat."""
    return mixing.prior if mixing.prior is None or scale is None else mixing.prior * scale


def identity(like: Tensor) -> Tensor:
    """The identity of the size, dtype and device of [*, M, M] coefficients, expanded to their shape."""
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)


def add_repulsion(
    buffer: Tensor, coefficients: Tensor, view: Tensor, rows: Tensor, medoid: Tensor, needs_inner: bool
) -> None:
    """Add sum_j coefficients_ij view_j, computed from the differences to one particle, which are written to `rows`.

    Nearly equal particles would lose in single precision, and more so under TF32, what tells them apart. Coefficients
    of a kernel on distances have rows that sum to zero, so that the differences are all there is.
    """
    origin = view.index_select(0, medoid.view(1)).to(buffer.dtype)
    torch.sub(view, origin, out=rows)
    add_mixed(buffer, coefficients, rows)
    if needs_inner:
        sums = coefficients.sum(-1).to(buffer.dtype)
        buffer.addcmul_(sums.view(-1, 1, 1), origin)


def add_mixed(buffer: Tensor, coefficients: Tensor, view: Tensor, *, beta: int = 1) -> None:
    """Set buffer to beta * buffer + sum_j coefficients_ij view_j; view [M, D] or [M, a, b] need not be contiguous."""
    wide = view.to(buffer.dtype)
    coefficients = coefficients.to(buffer.dtype)
    if wide.dim() == 2:
        buffer.addmm_(coefficients, wide, beta=beta)
    elif wide.stride(1) == wide.shape[2] * wide.stride(2) and wide.stride(2) == 1:
        flat = wide.as_strided((wide.shape[0], wide.shape[1] * wide.shape[2]), (wide.stride(0), 1))
        buffer.flatten(1).addmm_(coefficients, flat, beta=beta)
    else:
        mixed = torch.matmul(coefficients, wide.transpose(0, 1)).transpose(0, 1)
        buffer.copy_(mixed) if beta == 0 else buffer.add_(mixed)


@dataclass(frozen=True, eq=False)
class Forces:
    """The terms of one step, each [M, D]: gradient = driving - repulsion - noise goes to a descent optimizer."""

    driving: Tensor
    repulsion: Tensor
    noise: Tensor
    gradient: Tensor


@runtime_checkable
class Rule(Protocol):
    """A particle rule: `SVGD`, `SPOS`, `SGLD`, `CosinePenalty`, `CosineRepulsion`, or your own frozen dataclass."""

    @property
    def needs_inner(self) -> bool:
        """Whether the rule reads inner products in addition to distances."""
        ...

    def noise_scale(self) -> float:
        """The standard deviation of the noise in g' under an optimizer of rate 1; 0.0 for a deterministic rule."""
        ...

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step, without the noise."""
        ...


require_rule = partial(require_instance, Rule, "a particle rule such as hw.SVGD(alpha=0.01)")
AnyRule = Annotated[Rule, require_rule]


@dataclass(frozen=True)
class RepulsiveRule:
    """Rules with a repulsion: its strength, the step size, and no noise."""

    alpha: Alpha = DEFAULT
    step_size: Positive = 0.1

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def _weight(self) -> float:
        """The factor alpha on the repulsion; 1 for a strength relative to the driving term."""
        return 1.0 if isinstance(self.alpha, Relative | Target) else self.alpha

    @property
    def _ratio(self) -> float | None:
        """The ratio of a relative strength; None for a factor. A target's ratio is set from step to step (`repel`)."""
        if isinstance(self.alpha, Target):
            return 1.0
        return self.alpha.ratio if isinstance(self.alpha, Relative) else None

    def noise_scale(self) -> float:
        """0.0: no noise."""
        return 0.0


@dataclass(frozen=True)
class KernelRule(RepulsiveRule):
    """Rules with a kernel."""

    kernel: AnyKernel = field(default_factory=RBF)

    @property
    def needs_inner(self) -> bool:
        """Whether the kernel reads inner products in addition to distances."""
        return self.kernel.needs_inner


@dataclass(frozen=True)
class SteinRule(KernelRule):
    """SVGD and SPOS: the target distribution, and a driving term smoothed by the kernel."""

    _: KW_ONLY
    smoothing: bool = True
    prior_precision: NonNegative = 0.0
    data_size: Positive = 1.0
    inverse_temperature: Positive

    def _influence(self, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """eps/M times k (or the identity), and eps/M times the coefficients of alpha R."""
        kernel = self.kernel.matrices(geometry)
        share = self.step_size / kernel.values.shape[-1]
        influence = kernel.values if self.smoothing else identity(kernel.values)
        return share * influence, share * self._weight * kernel.repulsion


@dataclass(frozen=True)
class SVGD(SteinRule):
    """Stein variational gradient descent on heads (An et al. 2020, Eq. 4; Alg. 1).

    g'_i = eps [ sum_j k_ij (beta N g_j + tau theta_j) - alpha R_i ] / M
    with R_i = sum_j grad_{theta_j} k(theta_j, theta_i).

    The sign is that of a descent step, g' = -eps phi. With M heads in thousands of dimensions it is a regularizer and
    samples no posterior. Adam is scale-free: under it `step_size` matters only for clipping.

    Args:
        alpha: weight of the repulsion, in units of the loss, at least 0 (0 leaves the smoothing), a `Relative` or a
            `Target`.
        step_size: eps, above 0.
        kernel: k.
        smoothing: False replaces k_ij by delta_ij in the driving term only: each head keeps its own gradient.
        prior_precision: tau of a Gaussian prior N(0, 1/tau), at least 0; 0 is flat.
        data_size: N, above 0; the loss is a mean over examples, so N = 1 tempers the posterior by 1/N.
        inverse_temperature: beta, multiplies the likelihood and not the prior; above 0.
    """

    _: KW_ONLY
    inverse_temperature: Positive = 1.0

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step."""
        influence, repulsion = self._influence(geometry)
        drive = self.inverse_temperature * self.data_size * influence
        prior = None if self.prior_precision == 0 else self.prior_precision * influence
        return Mixing(drive, prior, repulsion, self._ratio)


@dataclass(frozen=True)
class SPOS(SteinRule):
    """Stochastic particle-optimization sampling: SVGD plus Langevin diffusion (An et al. 2020, Eq. 5).

    g'_i = eps { [ sum_j k_ij u_j - alpha R_i ] / M + u_i / beta } - sqrt(2 eps / beta) xi_i, u_j = N g_j + tau theta_j.

    The target does not depend on beta, which only weighs the diffusion against SVGD: at alpha = 1 both leave exp(-U)
    invariant. The released code multiplies the noise by median |g|; the paper and this rule do not.

    Args:
        alpha, step_size, kernel, smoothing, prior_precision, data_size: as in `SVGD`.
        inverse_temperature: beta, above 0. No default: the papers give none, and small values drown the gradient.
    """

    def noise_scale(self) -> float:
        """sqrt(2 eps / beta)."""
        return math.sqrt(2 * self.step_size / self.inverse_temperature)

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step, without the noise."""
        influence, repulsion = self._influence(geometry)
        influence = influence + self.step_size / self.inverse_temperature * identity(influence)
        prior = None if self.prior_precision == 0 else self.prior_precision * influence
        return Mixing(self.data_size * influence, prior, repulsion, self._ratio)


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

    inverse_temperature: Positive
    step_size: Positive = 0.1
    _: KW_ONLY
    prior_precision: NonNegative = 0.0
    data_size: Positive = 1.0

    __post_init__ = check_fields

    @property
    def needs_inner(self) -> bool:
        """False: SGLD reads no geometry."""
        return False

    def noise_scale(self) -> float:
        """sqrt(2 eps / beta)."""
        return math.sqrt(2 * self.step_size / self.inverse_temperature)

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step, without the noise."""
        own = self.step_size * identity(geometry.squared_distances)
        prior = None if self.prior_precision == 0 else self.prior_precision * own
        return Mixing(self.data_size * own, prior, torch.zeros_like(own), None)


@dataclass(frozen=True)
class CosineRule(RepulsiveRule):
    """The two rules on cosines without smoothing (An et al. 2020, Table 9 and appendix C.6)."""

    @property
    def needs_inner(self) -> bool:
        """True: cosines are computed from inner products."""
        return True

    def _mix(self, repulsion: Tensor) -> Mixing:
        drive = self.step_size * identity(repulsion)
        return Mixing(drive, None, self.step_size * self._weight / repulsion.shape[-1] * repulsion, self._ratio)


@dataclass(frozen=True)
class CosinePenalty(CosineRule):
    """Gradient descent with a penalty on the cosine similarity between heads (An et al. 2020, appendix C.6).

    g'_i = eps [ g_i + alpha grad_{theta_i} (1/M) sum_j cos(theta_i, theta_j) ]. The paper prints the penalty with the
    sign that would raise the similarity; this lowers it. The penalty turns a head and never lengthens it.

    Args:
        alpha: weight of the penalty, in units of the loss, at least 0, a `Relative` or a `Target`.
        step_size: eps, above 0.
    """

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step."""
        return self._mix(-cosine_gradient(geometry))


@dataclass(frozen=True)
class CosineRepulsion(CosineRule):
    """The repulsion of the cosine kernel without its smoothing (An et al. 2020, Table 9, row "i->j").

    g'_i = eps [ g_i - alpha (1/M) sum_j grad_{theta_j} cos(theta_j, theta_i) ]. Between nearly orthogonal heads the
    repulsion is almost wholly radial: heads grow, and hardly turn. With smoothing it is `SVGD(kernel=Cosine())`.

    Args:
        alpha: weight of the repulsion, in units of the loss, at least 0, a `Relative` or a `Target`.
        step_size: eps, above 0.
    """

    def mixing(self, geometry: Geometry) -> Mixing:
        """The coefficients [*, M, M] of one step."""
        return self._mix(Cosine().matrices(geometry).repulsion)


def update(rule: Rule, particles: Tensor, gradients: Tensor, noise: Tensor | None = None) -> Forces:
    """The `Forces` of one step of `rule`, as a pure function: nothing is modified.

    Computed in float32 at least, with distances and kernel in float64.

    Args:
        rule: the particle rule.
        particles: [M, D], one particle per row.
        gradients: [M, D], the gradient of the mean loss in each particle.
        noise: [M, D] of standard normal draws; needed by `SPOS` and `SGLD`, refused by rules without noise.

    Returns:
        The forces, each [M, D]; hand `.gradient` to a descent optimizer.

    Raises:
        ShapeError: shapes or dtypes do not fit, a value is not finite, or a kernel on directions meets a zero particle.
        SettingError: `rule` is no particle rule, or compares what heads span or compute; `noise` is missing for a rule
            that needs it, or given to one that does not, or the strength is a `Target`.

    >>> theta = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> g = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    >>> update(SVGD(alpha=0.5, step_size=0.1), theta, g).gradient
    tensor([[0.0514, 0.0425],
            [0.0245, 0.0464],
            [0.0468, 0.0310]], dtype=torch.float64)
    """
    require_rule("rule", rule)
    if hasattr(rule, "find_groups"):
        raise SettingError(
            f"{rule} compares what heads span or compute; expected a rule on particles such as hw.SVGD(). Attach this "
            "one to a model with hw.repel."
        )
    if isinstance(getattr(rule, "alpha", None), Target):
        raise SettingError(f"{rule} has no strength without a model to measure; give alpha as hw.Relative(ratio).")
    _require_particles("particles", particles, None)
    _require_particles("gradients", gradients, particles)
    deviation = rule.noise_scale()
    if noise is None and deviation > 0:
        raise SettingError(f"{rule} adds noise and none was given; pass noise=torch.randn_like(particles).")
    if noise is not None and deviation == 0:
        raise SettingError(f"{rule} adds no noise; leave noise out.")
    if rule.needs_inner:
        require_nonzero("particles", [particles])
    dtype = torch.promote_types(torch.promote_types(particles.dtype, gradients.dtype), torch.float32)
    theta, g = particles.detach().to(dtype), gradients.detach().to(dtype)
    driving, repulsion = blend(rule.mixing(geometry(theta, inner=rule.needs_inner)), theta, g)
    if noise is None:
        return Forces(driving, repulsion, torch.zeros_like(driving), driving - repulsion)
    _require_particles("noise", noise, particles)
    kick = deviation * noise.to(dtype)
    return Forces(driving, repulsion, kick, driving - repulsion - kick)


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


def acts_apart(rule: Rule) -> bool:
    """Whether a rule moves each head by itself, so that it can act on one: `SGLD`, or `SVGD` with nothing but a scale.

    >>> acts_apart(SGLD(inverse_temperature=4.0)), acts_apart(SVGD(alpha=0.0))
    (True, False)
    """
    mixing = rule.mixing(geometry(torch.eye(2, dtype=torch.float64), inner=rule.needs_inner))
    return not bool((mixing.drive - mixing.drive.diag().diag()).any() or mixing.repulsion.any())
