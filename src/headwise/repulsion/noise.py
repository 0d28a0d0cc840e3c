"""Noise on heads, the same for the same seed on every process: Langevin noise, and `jitter`."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from headwise.errors import LayoutError, require_integer, require_positive
from headwise.heads.head_slice import HeadSlice, gather_full, is_sharded
from headwise.heads.heads import Heads, require_heads
from headwise.heads.sharding import add_own_part, write_own_part
from headwise.repulsion.carriers import list_carriers
from headwise.repulsion.groups import ParticleGroup


def jitter(heads: Heads, scale: float, *, seed: int = 0) -> None:
    """Separate equal heads: add N(0, (scale * r)^2) to every head's parameters, r their root mean square.

    Equal heads have zero repulsion and equal gradients, so no rule can separate them.

    Args:
        heads: Which heads.
        scale: Size of the noise relative to the parameters, above 0; 1e-3 is enough.
        seed: Seed of the noise, at least 0.

    Raises:
        SettingError: `scale` is not above 0, or `heads` is no selection of heads.
        LayoutError: The model was changed since its heads were found, or heads are under LoRA.
        HeadwiseError: A parameter is not finite. Nothing is changed then.

    Example:
        >>> import headwise as hw
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> jitter(hw.find_heads(model), 1e-3)
    """
    require_heads(heads)
    require_positive("scale", scale)
    require_integer("seed", seed)
    parts = [part for head_slice in heads.slices() for part in head_slice.parts]
    for part in parts:
        if part.lora is not None:
            raise LayoutError(
                f"{part.name} is the base of a LoRA layer, and noise in it would be saved with no adapter; call "
                "hw.jitter before adding the adapter."
            )
        part.require_finite()
    with torch.no_grad():
        for head_slice in parts:
            sharded = is_sharded(head_slice.parameter)
            every = gather_full(head_slice.parameter)
            view = head_slice.view(every)
            size = view.float().square().mean().sqrt()
            noise = _draw_noise(view, seed, "jitter", head_slice)
            view.add_((noise * (scale * torch.where(size > 0, size, 1.0))).to(view.dtype))
            if sharded:
                write_own_part(head_slice.parameter, every)


def add_noise(
    group: ParticleGroup,
    deviation: float,
    rates: Mapping[int, float | Tensor],
    *,
    seed: int,
    step: int,
    scale: Tensor | None,
    drawn: set[int],
) -> None:
    """Add N(0, (deviation rate)^2) to the gradients of the heads, the same for the same (seed, step, parameter).

    A process that holds a part of a gradient adds what a single process would have added to that part. Under LoRA the
    noise is that of the parameters trained, A and B; A, which several groups may share, gets it once.

    Args:
        group: The particles.
        deviation: Standard deviation at a rate of 1.
        rates: The factor on the noise of each parameter: see `find_langevin_rates`.
        seed: Seed.
        step: The step.
        scale: What the gradients are multiplied by; None for 1.
        drawn: The ids of shared gradients that have their noise; this function adds to it.
    """
    if group.gradients() is None:
        return

    def add(gradient: Tensor, parameter: Tensor, part: HeadSlice, *names: str) -> None:
        noise = _draw_noise(gradient, seed, step, part, *names) * (deviation * rates[id(parameter)])
        gradient.add_((noise if scale is None else noise * scale).to(gradient.dtype))

    with torch.no_grad():
        for part in group.parts:
            gradient = part.parameter.grad
            if gradient is not None and is_sharded(gradient):
                every = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
                add(part.view(every), part.parameter, part)
                add_own_part(gradient, every)
                continue
            for carrier in list_carriers(part):
                own, common = carrier.trained
                add(carrier.own, own, part, *carrier.names)
                shared = carrier.shared
                if shared is not None and id(shared) not in drawn:
                    drawn.add(id(shared))
                    add(shared, common, part, *carrier.names, "shared")


def find_langevin_rates(optimizer: Optimizer) -> dict[int, float | Tensor]:
    """Return the factor on Langevin noise that gives it the right temperature, for each parameter by its id.

    theta <- theta - lr (eps grad U - a xi) samples at the temperature 1 / beta when a = sqrt(2 eps / beta) / sqrt(lr):
    the noise is divided by sqrt(lr) under plain SGD. Under any other optimizer no such factor exists: the noise is
    gradient noise and not Langevin, and the factor is 1.
    """
    factors: dict[int, float | Tensor] = {}
    for options in optimizer.param_groups:
        plain = type(optimizer) is SGD and options["momentum"] == 0
        factor = _invert_root(options["lr"]) if plain else 1.0
        factors |= dict.fromkeys(map(id, options["params"]), factor)
    return factors


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends only on the parts, the same on every machine and in every process."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _invert_root(rate: float | Tensor) -> float | Tensor:
    """Return 1 / sqrt(rate), and 1 for a rate of zero, which moves nothing, whatever the noise."""
    if isinstance(rate, Tensor):
        return torch.where(rate > 0, rate.clamp_min(torch.finfo(rate.dtype).tiny).rsqrt(), 1.0)
    return rate**-0.5 if rate > 0.0 else 1.0


def _draw_noise(view: Tensor, seed: int, purpose: object, part: HeadSlice, *names: str) -> Tensor:
    generator = torch.Generator(view.device)
    run = (part.run,) if part.run else ()
    generator.manual_seed(derive_seed(seed, purpose, part.name, part.projection, *run, *names))
    return torch.randn(view.shape, generator=generator, device=view.device)
