"""Key and value heads of one attention made alike within groups, so that one of each group is enough.

What an attention computes with on calibration inputs: second moments of what its projections and W_O get.

What is free in the heads of an attention, found out by experiment: changes that leave what it computes as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, NotFired, SettingError
from headwise.heads.capture import Padding, note_padding
from headwise.heads.experiments.replay import Replay
from headwise.heads.heads import Heads, Site
from headwise.heads.record import Call, evaluating, record_sites, restored, watching
from headwise.heads.taps import Taps
from headwise.heads.view import HeadView
from headwise.nn.hooks import guard_hooks, read_first_argument
from headwise.shrinking.alignment import (
    Alignment,
    Groups,
    KeyFreedom,
    Sharing,
    group_by_similarity,
    group_in_order,
    measure_loss,
)
from headwise.shrinking.cuts import list_beside
from headwise.shrinking.proof import run

# Inputs of a model: positional arguments, or arguments by name.
Batch = Any


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
    newest = [Padding()]

    def begin(padding: Padding) -> None:
        newest[0] = padding

    def add(module: nn.Module, args: tuple, kwargs: dict) -> None:
        rows = _select_real(read_first_argument(module, args, kwargs).detach(), newest[0].keep).double()
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        moments[id(module)] = moments.get(id(module), 0.0) + rows.mT @ rows

    guard_hooks()
    modules = list_projections(site)
    with watching([(site.module, note_padding(site.module, begin)), *((module, add) for module in modules)]):
        for batch in batches:
            run(site.model, batch)
    for module in modules:
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


def _read_outputs(heads: Heads, batches: Sequence[Batch]) -> Iterator[tuple[Site, Tensor]]:
    """Run a model, and yield what each call of a site gives its output projection, [T, H * e], of real tokens only."""
    taps = Taps(heads, outputs=True)
    try:
        for batch in batches:
            run(heads.model, batch)
            for capture in taps.read_called():
                assert capture.outputs is not None  # asked for
                yield capture.site, _select_real(capture.outputs.flatten(-2), capture.query_keep)
    finally:
        taps.remove()


def record_wanted(heads: Heads, batches: Sequence[Batch]) -> dict[Site, Wanted]:
    """Run the model once, and keep what every site gives its output projection."""
    wanted = {site: Wanted(join_output(site)) for site in heads}
    for site, rows in _read_outputs(heads, batches):
        wanted[site].calls.append(rows)
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


def measure_outputs(heads: Heads, wanted: Wanted, batches: Sequence[Batch]) -> Fit:
    """Run the model, and return moments of what one site gives W_O now with what W_O gave before."""
    (site,) = heads
    calls = iter(wanted.calls)
    sums: dict[str, Any] = {"moments": 0.0, "products": 0.0, "energy": 0.0}
    for _, given in _read_outputs(heads, batches):
        rows = given.double()
        outputs = next(calls).double() @ wanted.weight.mT
        sums["moments"] += rows.mT @ rows
        sums["products"] += rows.mT @ outputs
        sums["energy"] += float(outputs.square().sum())
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
    return output.turn(output.of(output.parameter.detach())).clone().double()


def write_output(site: Site, weights: Tensor) -> None:
    """Write W_O of each head, [H, d, e]."""
    output = site.output
    assert output is not None  # a site without W_O is refused before
    output.turn(output.of(output.parameter.data)).copy_(weights)


def read_rows(head_slice: HeadView) -> Tensor:
    """Return the rows of each head, and as the last column its bias or 0: [M, e, d + 1] in float64."""
    rows = head_slice.turn(head_slice.read()).mT.double()
    biases = [_view_bias(part) for part in head_slice.parts]
    found = [bias.double() for bias in biases if bias is not None]
    bias = torch.cat(found) if found else rows.new_zeros(rows.shape[:2])
    return torch.cat([rows, bias[..., None]], -1)


def write_rows(head_slice: HeadView, rows: Tensor) -> None:
    """Write the rows of each head and its bias, [M, e, d + 1]."""
    first = 0
    for part in head_slice.parts:
        own = rows[first : first + part.heads]
        part.turn(part.of(part.parameter.data)).copy_(own[..., :-1].mT)
        bias = _view_bias(part)
        if bias is not None:
            bias.copy_(own[..., -1])
        first += part.heads


def _view_bias(part: HeadView) -> Tensor | None:
    bias = part.bias_parameter
    return None if bias is None else part.bias_view(bias.data)


def _require(site: Site, moments: Tensor | None, what: str) -> None:
    if moments is None:
        raise NotFired(f"{site.label}: its {what} was not called in a forward pass on the calibration batches.")
    if not bool(moments.isfinite().all()):
        raise HeadwiseError(
            f"{site.label}: its {what} gets NaN or infinity on the calibration batches; expected finite inputs."
        )


# Largest difference, relative to the largest number: some code rounds to float32 in between.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
# Positions that a call must have so that those that rotate differ from those that do not.
POSITIONS = 3


@dataclass(frozen=True)
class Freedom:
    """What is free in the keys and in the values of one attention; None where nothing was found."""

    key: KeyFreedom | None
    value: KeyFreedom | None

    def __str__(self) -> str:
        return f"keys: {self.key or 'nothing'}; values: {self.value or 'nothing'}"


def find_freedoms(sites: Sequence[Site], batch: Batch) -> dict[Site, Freedom]:
    """Return what is free in each site: the first of a list of candidates under which its heads stay as they are.

    Raises:
        SettingError: The sequences are too short to tell.
        HeadwiseError: An attention could not be called again.
    """
    calls = record_sites(sites[0].model, sites, lambda: run(sites[0].model, batch))
    return {site: _find_freedom(site, call) for site, call in zip(sites, calls, strict=True)}


@torch.no_grad()
def _find_freedom(site: Site, call: Call) -> Freedom:
    failed = "it computed NaN or infinity"
    for dtype in (torch.float64, torch.float32):
        # some code has float32 written into it
        with _converted(call.module, dtype):
            try:
                heads = Replay(site, call).outputs()
            except HeadwiseError:
                raise
            except Exception as error:
                failed = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                continue
            if not bool(heads.isfinite().all()):
                continue
            tokens = 1 if heads.dim() < 3 else heads.shape[-3]
            if tokens < POSITIONS:
                raise SettingError(
                    f"{site.label} was called with sequences of {tokens} tokens; expected at least {POSITIONS}, so "
                    "that positions show."
                )
            experiment = _Experiment(site, call, heads, TOLERANCE[dtype])
            return Freedom(experiment.find_key(), experiment.find_value())
    raise HeadwiseError(
        f"{site.label} ({type(site.module).__name__}) could be called again neither in float64 nor in float32 "
        f"({failed}); give batches without rows that are padding throughout, and merge the heads of the full-precision "
        "original of a quantized model."
    )


@dataclass(frozen=True, eq=False)
class _Experiment:
    site: Site
    call: Call
    heads: Tensor
    tolerance: float

    def find_key(self) -> KeyFreedom | None:
        size = self.site.slices[1].head_size
        return next((one for one in _list_candidates(self.site, size) if self._keeps_scores(one)), None)

    def find_value(self) -> KeyFreedom | None:
        kinds = (KeyFreedom(0), KeyFreedom(0, kind="rigid"))
        return next((one for one in kinds if self._turns_outputs(one)), None)

    def _keeps_scores(self, freedom: KeyFreedom) -> bool:
        query, key, _ = self.site.slices
        matrices, inverses = self._draw(freedom, key.head_size)
        with restored(_list_data(query, key)):
            write_rows(key, matrices.mT @ read_rows(key))
            write_rows(query, inverses.repeat_interleave(self._members, 0).mT @ read_rows(query))
            return self._agrees(self.heads)

    def _turns_outputs(self, freedom: KeyFreedom) -> bool:
        value = self.site.slices[2]
        matrices, _ = self._draw(freedom, value.head_size)
        if value.head_size != self.heads.shape[-1]:
            return False
        with restored(_list_data(value)):
            write_rows(value, matrices.mT @ read_rows(value))
            turned = matrices.repeat_interleave(self._members, 0).to(self.heads)
            return self._agrees((self.heads[..., None, :] @ turned)[..., 0, :])

    def _draw(self, freedom: KeyFreedom, size: int) -> tuple[Tensor, Tensor]:
        device = self.heads.device
        drawn = freedom.draw(self.site.key_value_heads, size, torch.Generator().manual_seed(1))
        return drawn[0].to(device), drawn[1].to(device)

    def _agrees(self, expected: Tensor) -> bool:
        found = Replay(self.site, self.call).outputs()
        return float((found - expected).abs().max()) <= self.tolerance * float(expected.abs().max())

    @property
    def _members(self) -> int:
        return self.site.num_heads // self.site.key_value_heads


def _list_candidates(site: Site, size: int) -> Iterator[KeyFreedom]:
    """Yield freedoms of keys, the largest first."""
    turning = sorted({*(size // part * 2 // 2 for part in (1, 2, 4)), *_read_rotary(site, size)})
    turning = [rotary for rotary in turning if 0 < rotary <= size and rotary % 2 == 0]
    for kind in ("general", "rigid", "signs"):
        yield KeyFreedom(0, kind=kind)
        for rotary in turning:
            for interleaved in (False, True):
                yield KeyFreedom(rotary, interleaved, kind)


def _read_rotary(site: Site, size: int) -> Iterator[int]:
    """Yield the numbers of features that turn according to a module or its configuration."""
    config = getattr(site.module, "config", None)
    for holder in (site.module, config):
        for name in ("rotary_ndims", "rotary_dim"):
            value = getattr(holder, name, None)
            if isinstance(value, int):
                yield value
    parameters = getattr(config, "rope_parameters", None)
    shares = [getattr(config, "partial_rotary_factor", None)]
    shares += [parameters.get("partial_rotary_factor")] if isinstance(parameters, dict) else []
    for share in shares:
        if isinstance(share, int | float):
            yield int(share * size)


def _list_data(*slices: HeadView) -> list[Tensor]:
    """Return the weights and biases of head slices."""
    parts = [part for head_slice in slices for part in head_slice.parts]
    held = [one for part in parts for one in (part.owner._parameters.get(part.attribute), part.bias_parameter)]
    return [parameter.data for parameter in held if parameter is not None]


@contextmanager
def _converted(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Have a module compute in a precision, in evaluation mode, and put all of it back at the end."""
    parameters = [(one, one.data, one.grad) for one in module.parameters()]
    buffers = [(part, dict(part._buffers)) for part in module.modules()]
    for one, _, _ in parameters:
        one.grad = None
    module.to(dtype)
    try:
        with evaluating(module):
            yield
    finally:
        for one, data, gradient in parameters:
            one.data = data
            one.grad = gradient
        for part, held in buffers:
            part._buffers.update(held)


Grouping = Literal["similarity", "order"]
GROUPINGS: tuple[Grouping, ...] = ("similarity", "order")


@dataclass(frozen=True)
class Way:
    """One way of merging.

    Attributes:
        alignment: How heads are brought together before one takes their place.
        grouping: Which heads go together.
        refit: Whether W_O is fitted anew to what the attention gave before.
    """

    alignment: Alignment
    grouping: Grouping
    refit: bool

    def __str__(self) -> str:
        aligned = {"none": "averaged as they are", "orthogonal": "aligned and averaged", "low_rank": "closed form"}
        grouped = {"order": "neighbors", "similarity": "groups of similar heads"}
        return f"{aligned[self.alignment]}, {grouped[self.grouping]}" + (", W_O refitted" if self.refit else "")


@dataclass(frozen=True, eq=False)
class _Kind:
    """Keys or values of all heads: their rows, moments, and how their readers weigh them.

    Attributes:
        rows: [G, e, d + 1].
        gram: y_i^T y_j, [G, e, G, e].
        weights: S_i, [G, e, e].
        freedom: What is free in them; None where nothing is.
        alignment: How they are brought together.
    """

    rows: Tensor
    gram: Tensor
    weights: Tensor
    freedom: KeyFreedom | None
    alignment: Alignment

    def share(self, groups: Sequence[Sequence[int]]) -> tuple[Sharing, Tensor, Tensor]:
        """Return how the heads of each group become one, [g, m, e, e], with the moments and weights of the groups."""
        index = torch.tensor([list(group) for group in groups], device=self.gram.device)
        gram = torch.stack([self.gram[own][:, :, own] for own in index])
        weights = self.weights[index]
        alignment = "none" if self.freedom is None else self.alignment
        return (self.freedom or KeyFreedom(0)).share(gram, weights, alignment), gram, weights

    def compare(self) -> Tensor:
        """Return the share of each pair of heads that one head keeps of both, [G, G]."""
        count = len(self.rows)
        pairs = list(combinations(range(count), 2))
        sharing, gram, weights = self.share(pairs)
        lost, total = measure_loss(gram, weights, sharing)
        kept = 1 - lost / total.clamp_min(torch.finfo(total.dtype).tiny)
        alike = kept.new_zeros(count, count)
        first, second = torch.tensor(pairs, device=alike.device).T
        alike[first, second] = alike[second, first] = kept
        return alike

    def write(self, sharing: Sharing, groups: Groups) -> Tensor:
        """Return the rows of the heads that take the place of groups, [g, e, d + 1]."""
        index = torch.tensor([list(group) for group in groups], device=self.rows.device)
        return torch.einsum("gmef,gmed->gfd", sharing.write, self.rows[index])


def make_alike(site: Site, groups: int, way: Way, freedom: Freedom, moments: Mapping[int, Tensor]) -> Groups:
    """Write weights under which the key/value heads of each group are copies, and groups are next to one another.

    Nothing has other sizes yet: the m heads of group j are heads j * m to j * m + m - 1 afterwards, and query heads
    with their columns of W_O, and what else belongs to them, move along.

    Args:
        site: The attention.
        groups: Their number.
        way: How.
        freedom: What is free in its keys and values.
        moments: Of the inputs [x, 1] of each projecting module.

    Returns:
        The heads of each group, by their numbers from before.
    """
    query, key, value = site.slices
    members = site.num_heads // site.key_value_heads

    def measure(head_slice: HeadView) -> tuple[Tensor, Tensor]:
        rows = read_rows(head_slice)
        return rows, moments[id(head_slice.parts[0].module)]

    query_rows, query_moments = measure(query)
    scores = torch.einsum("hed,dc,hfc->hef", query_rows, query_moments, query_rows)
    outputs = read_output(site)
    kinds = []
    for head_slice, weights, free in (
        (key, scores, freedom.key),
        (value, torch.einsum("hde,hdf->hef", outputs, outputs), freedom.value),
    ):
        rows, own = measure(head_slice)
        gram = torch.einsum("iad,dc,jbc->iajb", rows, own, rows)
        kinds.append(_Kind(rows, gram, weights.unflatten(0, (-1, members)).sum(1), free, way.alignment))
    if way.grouping == "order":
        chosen = group_in_order(site.key_value_heads, groups)
    else:
        chosen = group_by_similarity(torch.stack([kind.compare() for kind in kinds]).mean(0), groups)
    (key_sharing, *_), (value_sharing, *_) = (kind.share(chosen) for kind in kinds)
    order = [head for group in chosen for head in group]
    queries = [head * members + member for head in order for member in range(members)]
    size = site.key_value_heads // groups
    _move_queries(site, queries)
    for head_slice, kind, sharing in ((key, kinds[0], key_sharing), (value, kinds[1], value_sharing)):
        write_rows(head_slice, kind.write(sharing, chosen).repeat_interleave(size, 0))
    # y_i is about u G_i^T: what reads it reads u with G_i^T in between
    read = key_sharing.read.flatten(0, 1).repeat_interleave(members, 0)
    write_rows(query, read.mT @ query_rows[queries])
    read = value_sharing.read.flatten(0, 1).repeat_interleave(members, 0)
    write_output(site, outputs[queries] @ read)
    return chosen


def _move_queries(site: Site, order: Sequence[int]) -> None:
    """Bring what belongs to query heads, other than their rows and columns, into an order."""
    query = site.slices[0]
    if site.layout.endswith("gated"):
        # the gate of a head lies next to its query
        whole = replace(query, head_size=query.stride)
        write_rows(whole, read_rows(whole)[list(order)])
    for _, parameter, axis, units in list_beside(site, proved=True):
        if units == "query":
            data = parameter.data.movedim(axis, 0).unflatten(0, (site.num_heads, -1))
            data.copy_(data[list(order)])


def keep_first(site: Site, groups: int) -> dict[str, tuple[int, ...]]:
    """Return the key/value heads that are copies of the first of their group, by projection."""
    size = site.key_value_heads // groups
    gone = tuple(head for head in range(site.key_value_heads) if head % size)
    return {"query": (), "key": gone, "value": gone, "output": ()}


def remember(sites: Sequence[Site]) -> Callable[[], None]:
    """Return what puts the weights of sites back as they are now."""
    held = {id(one): one for site in sites for one in site.module.parameters()}
    held |= {id(site.output.parameter): site.output.parameter for site in sites if site.output is not None}
    saved = [(one, one.data.clone()) for one in held.values()]

    def restore() -> None:
        for parameter, data in saved:
            parameter.data.copy_(data)

    return restore
