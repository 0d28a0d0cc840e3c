"""Whether a model whose heads were removed computes what it did with them ablated."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, LayoutError
from headwise.heads.ablation import ablate
from headwise.heads.heads import Heads, Site

# Largest difference, relative to the largest output: matrix products of another width round apart.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


@dataclass(frozen=True)
class Change:
    """How messages name what was done to a model.

    Attributes:
        done: "these heads removed".
        like: What the result should compute.
        left: What was forgotten where it does not.
        remedy: What to do.
    """

    done: str
    like: str
    left: str
    remedy: str


PRUNED = Change(
    "these heads removed", "{} with them ablated", "something holds heads that was not cut", "use hw.ablate"
)
MERGED = Change(
    "these heads merged",
    "{} with each of them in the place of several",
    "its code reads key and value heads in a way that is not known",
    "leave its heads as they are, or load a model of transformers with attn_implementation='sdpa'",
)


def run_ablated(heads: Heads, removed: Mapping[Site, Sequence[int]], inputs: Sequence | Mapping) -> list[Tensor]:
    """Return the outputs of a model, in evaluation mode, without the heads removed from each site."""
    with ExitStack() as stack:
        for site, gone in removed.items():
            alone = Heads(heads.model, (site,), heads.projections, heads.found)
            stack.enter_context(_zero_columns(site, gone) if site.output_projection is None else ablate(alone, gone))
        return run(heads.model, inputs)


@torch.no_grad()
def run(model: nn.Module, inputs: Sequence | Mapping) -> list[Tensor]:
    """Return the outputs of a model in evaluation mode: all tensors of floating-point numbers among them."""
    args = () if isinstance(inputs, Mapping) else tuple(inputs)
    named: dict[str, Any] = dict(inputs) if isinstance(inputs, Mapping) else {}
    with _evaluating(model):
        return list(_list_tensors(model(*args, **named)))


def require_equal(model: nn.Module, expected: Sequence[Tensor], inputs: Sequence | Mapping, change: Change) -> None:
    """Raise `LayoutError` unless the model computes what was computed before its weights were cut.

    Attention weights and cached keys, which have fewer heads now, are not compared.
    """
    name = type(model).__name__
    try:
        found = run(model, inputs)
    except HeadwiseError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise LayoutError(
            f"{name} cannot run with {change.done} ({type(error).__name__}: {reason}): its code counts on the "
            f"heads it was built with. The model is as it was; {change.remedy}."
        ) from error
    same = [(a, b) for a, b in zip(expected, found, strict=False) if a.shape == b.shape]
    if not same or len(expected) != len(found):
        raise LayoutError(f"{name} returns other tensors with {change.done}; the model is as it was.")
    for before, after in same:
        largest = float(before.abs().max()) if before.numel() else 0.0
        apart = float((before - after).abs().max()) if before.numel() else 0.0
        # written so that NaN is refused too
        if not apart <= TOLERANCE[before.dtype] * max(largest, 1e-6):
            raise LayoutError(
                f"{name} with {change.done} is not {change.like.format(name)}: outputs of up to {largest:.3g} are "
                f"{apart:.3g} apart, so {change.left}. The model is as it was; {change.remedy}."
            )


@contextmanager
def _zero_columns(site: Site, gone: Sequence[int]) -> Iterator[None]:
    """Have the columns of heads be zero in a W_O that is a parameter, whose input no hook can reach."""
    assert site.output is not None  # heads are removed where W_O was found
    parameter = site.output.parameter
    before, parameter.data = parameter.data, parameter.data.clone()
    site.output.view(parameter.data)[list(gone)] = 0.0
    try:
        yield
    finally:
        parameter.data = before


def _list_tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _list_tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _list_tensors(value)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, training in modes:
            module.training = training
