"""Checks for your own particle rule or layout row.

Each check raises `AssertionError` and names what was violated, so it works in any test runner.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.heads.experiments.verify import Verification, verify
from headwise.heads.find import find_heads
from headwise.heads.layouts import LAYOUTS
from headwise.heads.layouts.rows import Layout
from headwise.repulsion.rules import Rule, update


def particles_near_collapse(count: int, width: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Return particles of the kinds on which a rule breaks first, each [M, D] in float32.

    Args:
        count: Number of particles M, at least 2.
        width: Their length D, at least 1.
        seed: Seed of the draws.

    Returns:
        "random", "near" (1e-3 apart), "equal", "two groups", and "far 0" ... "far M-1" (one far, the others near).

    Example:
        >>> sorted(particles_near_collapse(2, 3))
        ['equal', 'far 0', 'far 1', 'near', 'random', 'two groups']
    """
    generator = torch.Generator().manual_seed(seed)
    center = torch.randn(1, width, generator=generator)
    spread = torch.randn(count, width, generator=generator)
    near = center + 1e-3 * spread
    cases = {"random": spread, "near": near, "equal": center.repeat(count, 1)}
    cases["two groups"] = near + torch.where(torch.arange(count)[:, None] < count // 2, 0.0, 5.0)
    for index in range(count):
        far = near.clone()
        far[index] += 10.0
        cases[f"far {index}"] = far
    return cases


def check_rule(rule: Rule, *, count: int = 4, width: int = 6, seed: int = 0) -> None:
    """Check what holds for every particle rule.

    Permuting heads permutes the driving term, the repulsion and the gradient; all of them are finite near and at
    collapse; equal heads do not repel; and the gradient is driving term - repulsion - noise.

    Args:
        rule: The rule.
        count: Number of particles M, at least 2.
        width: Their length D.
        seed: Seed of the draws.

    Raises:
        AssertionError: A law does not hold; the message names the law and the particles.

    Example:
        >>> import headwise as hw
        >>> check_rule(hw.SVGD(alpha=0.3, step_size=0.2))
    """
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(count, width, generator=generator, dtype=torch.float64)
    drawn = torch.randn(count, width, generator=generator, dtype=torch.float64)
    noise = drawn if rule.noise_scale() > 0.0 else None
    order = torch.randperm(count, generator=generator)
    for name, particles in particles_near_collapse(count, width, seed=seed).items():
        forces = update(rule, particles.double(), gradients, noise)
        moved = update(rule, particles.double()[order], gradients[order], None if noise is None else noise[order])
        for field, term in (("driving", "driving term"), ("repulsion", "repulsion"), ("gradient", "gradient")):
            value = getattr(forces, field)
            _require(bool(value.isfinite().all()), f"{rule} on {name} particles: its {term} is not finite.")
            # distances of near heads, with a far one among them, keep about seven digits of float64
            same = bool((getattr(moved, field) - value[order]).abs().max() <= 1e-5 * value.abs().max())
            _require(same, f"{rule} on {name} particles: permuting the heads does not permute the {term}.")
        total = forces.driving - forces.repulsion - forces.noise
        _require(torch.allclose(forces.gradient, total), f"{rule} on {name} particles: the forces do not add up.")
        if name == "equal":
            still = bool((forces.repulsion.abs() <= 1e-12).all())
            _require(still, f"{rule}: equal heads repel one another; no direction is defined.")


def check_layout(
    model: nn.Module, inputs: Sequence[Any] | Mapping[str, object], layouts: Sequence[Layout] = LAYOUTS
) -> Verification:
    """Check that layout rows read a model's heads rightly and that writing a head writes its rows only.

    Args:
        model: The model.
        inputs: Inputs of a forward pass, as for `verify`.
        layouts: The rows, yours first.

    Returns:
        What `verify` proved.

    Raises:
        AssertionError: A write through a view touched another head, or missed its own.
        LayoutError: As `find_heads` and `verify`.

    Example:
        >>> print(check_layout(nn.MultiheadAttention(8, 2), [torch.randn(5, 1, 8)] * 3))
        1 sites verified: (model)
    """
    heads = find_heads(model, layouts)
    for head_slice in (part for whole in heads.slices() for part in whole.parts):
        marked = torch.full_like(head_slice.parameter, -1.0)
        view = head_slice.of(marked)
        for head in range(head_slice.heads):
            view[head] = float(head)
        for head in range(head_slice.heads):
            own = int((marked == head).sum())
            expected = view[head].numel()
            _require(
                own == expected,
                f"{head_slice.name}: head {head} of its {head_slice.projection} holds {own} entries; "
                f"expected {expected}.",
            )
    return verify(heads, inputs)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
