"""What an attention computes with on calibration inputs: second moments of what its projections and W_O get."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, NotFired
from headwise.heads.capture import list_parameters, name_arguments, read_padding, split_heads
from headwise.heads.head_slice import HeadSlice
from headwise.heads.heads import Site
from headwise.nn.hooks import Handle, read_first_argument
from headwise.shrinking.prune_proof import run

# Inputs of a model: positional arguments, or arguments by name.
Batch = Any


class Reading(Handle):
    """Inside the block, functions get what modules of sites were called with, real tokens only.

    Args:
        sites: The sites; their padding is read from their own calls.
        receive: For each site, the modules inside it to listen to and the function that gets (module, [T, F]).
    """

    def __init__(self, sites: dict[Site, tuple[Sequence[nn.Module], Callable[[nn.Module, Tensor], None]]]) -> None:
        super().__init__()
        for site, (modules, receive) in sites.items():
            keeps: list[Tensor | None] = [None]
            names = list_parameters(site.module)

            def begin(
                module: nn.Module, args: tuple, kwargs: dict, keeps: list[Tensor | None] = keeps, names: Any = names
            ) -> None:
                keeps[0] = read_padding(module, name_arguments(names, args, kwargs)).keep

            def listen(
                module: nn.Module,
                args: tuple,
                kwargs: dict,
                keeps: list[Tensor | None] = keeps,
                receive: Callable[[nn.Module, Tensor], None] = receive,
            ) -> None:
                receive(module, _select_real(read_first_argument(module, args, kwargs).detach(), keeps[0]))

            self._hook_before(site.module, begin)
            for module in {id(module): module for module in modules}.values():
                self._hook_before(module, listen)


def _select_real(given: Tensor, keep: Tensor | None) -> Tensor:
    """Return the rows [T, F] of what a module was given, [B, L, F], that are of real tokens."""
    if keep is None or given.dim() != 3 or keep.shape[1] != given.shape[1]:
        return given.flatten(0, -2)
    return given[keep.to(given.device).expand(len(given), -1)]


def list_projections(site: Site) -> list[nn.Module]:
    """Return the modules that project queries, keys and values."""
    return list({id(part.module): part.module for part in site.parts if part.module is not None}.values())


def measure_inputs(site: Site, batches: Sequence[Batch]) -> dict[int, Tensor]:
    """Return [x, 1]^T [x, 1] of the inputs of each projecting module, by its id, [d + 1, d + 1] in float64.

    Raises:
        NotFired: A module was not called.
        HeadwiseError: An input is not finite.
    """
    moments: dict[int, Tensor] = {}

    def add(module: nn.Module, rows: Tensor) -> None:
        rows = rows.double()
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        moments[id(module)] = moments.get(id(module), 0.0) + rows.mT @ rows

    with Reading({site: (list_projections(site), add)}):
        for batch in batches:
            run(site.model, batch)
    for module in list_projections(site):
        _require(site, moments.get(id(module)), type(module).__name__)
    return moments


def assume_inputs(site: Site) -> dict[int, Tensor]:
    """Return the moments of inputs that are white: of variance 1, mean 0, and uncorrelated."""
    sizes = {id(part.module): part.across for part in site.parts if part.module is not None}
    device = site.slices[0].parts[0].parameter.device
    return {key: torch.eye(size + 1, dtype=torch.float64, device=device) for key, size in sizes.items()}


@dataclass(eq=False)
class Wanted:
    """What the heads of a site gave W_O before anything was merged, call by call, and the W_O that read them.

    Attributes:
        weight: W_O, [d, H * e] in float64.
        calls: [T, H * e] for each call, in the model's precision.
    """

    weight: Tensor
    calls: list[Tensor] = field(default_factory=list)


def record_wanted(sites: Sequence[Site], batches: Sequence[Batch]) -> dict[Site, Wanted]:
    """Run the model once, and keep what every site gives its output projection."""
    wanted = {site: Wanted(join_output(site)) for site in sites}

    def keep(site: Site) -> Callable[[nn.Module, Tensor], None]:
        return lambda _module, rows: wanted[site].calls.append(split_heads(rows, site).flatten(-2))

    with ExitStack() as undo, Reading({site: ([site.expose(undo.callback).module], keep(site)) for site in sites}):
        for batch in batches:
            run(sites[0].model, batch)
    return wanted


@dataclass(frozen=True, eq=False)
class Fit:
    """What a refit of W_O is made from: x of the model as it is now, y of the model before, both of real tokens.

    Attributes:
        moments: x^T x, [F, F].
        products: x^T y, [F, d].
        energy: Sum of y squared.
    """

    moments: Tensor
    products: Tensor
    energy: float

    def measure_error(self, weight: Tensor) -> float:
        """Return |x W^T - y|^2 / |y|^2."""
        lost = torch.einsum("df,fg,dg->", weight, self.moments, weight) - 2 * (self.products.mT * weight).sum()
        return max(float(lost) + self.energy, 0.0) / self.energy if self.energy > 0 else 0.0


def measure_outputs(site: Site, wanted: Wanted, batches: Sequence[Batch]) -> Fit:
    """Run the model, and return moments of what the site gives W_O now with what W_O gave before."""
    calls = iter(wanted.calls)
    sums: dict[str, Any] = {"moments": 0.0, "products": 0.0, "energy": 0.0}

    def add(_module: nn.Module, rows: Tensor) -> None:
        rows = split_heads(rows, site).flatten(-2).double()
        outputs = next(calls).double() @ wanted.weight.mT
        sums["moments"] += rows.mT @ rows
        sums["products"] += rows.mT @ outputs
        sums["energy"] += float(outputs.square().sum())

    with ExitStack() as undo, Reading({site: ([site.expose(undo.callback).module], add)}):
        for batch in batches:
            run(site.model, batch)
    _require(site, sums["moments"] if isinstance(sums["moments"], Tensor) else None, "output projection")
    return Fit(**sums)


def join_output(site: Site) -> Tensor:
    """Return W_O of all heads side by side, [d, H * e] in float64."""
    weights = read_output(site)
    return weights.movedim(0, 1).flatten(1)


def read_output(site: Site) -> Tensor:
    """Return W_O of each head, [H, d, e] in float64."""
    output = site.output
    assert output is not None  # a site without W_O is refused before
    # a copy in float64 too, as weights are written in place
    return output.turn(output.view(output.parameter.detach())).clone().double()


def write_output(site: Site, weights: Tensor) -> None:
    """Write W_O of each head, [H, d, e]."""
    output = site.output
    assert output is not None  # a site without W_O is refused before
    output.turn(output.view(output.parameter.data)).copy_(weights)


def read_rows(head_slice: HeadSlice) -> Tensor:
    """Return the rows of each head, and as the last column its bias or 0: [M, e, d + 1] in float64."""
    rows = head_slice.turn(head_slice.read()).mT.double()
    biases = [_view_bias(part) for part in head_slice.parts]
    found = [bias.double() for bias in biases if bias is not None]
    bias = torch.cat(found) if found else rows.new_zeros(rows.shape[:2])
    return torch.cat([rows, bias[..., None]], -1)


def write_rows(head_slice: HeadSlice, rows: Tensor) -> None:
    """Write the rows of each head and its bias, [M, e, d + 1]."""
    first = 0
    for part in head_slice.parts:
        own = rows[first : first + part.heads]
        part.turn(part.view(part.parameter.data)).copy_(own[..., :-1].mT)
        bias = _view_bias(part)
        if bias is not None:
            bias.copy_(own[..., -1])
        first += part.heads


def _view_bias(part: HeadSlice) -> Tensor | None:
    bias = part.bias_parameter
    return None if bias is None else part.bias_view(bias.data)


def _require(site: Site, moments: Tensor | None, what: str) -> None:
    if moments is None:
        raise NotFired(f"{site.label}: its {what} was not called in a forward pass on the calibration batches.")
    if not bool(moments.isfinite().all()):
        raise HeadwiseError(
            f"{site.label}: its {what} gets NaN or infinity on the calibration batches; expected finite inputs."
        )
