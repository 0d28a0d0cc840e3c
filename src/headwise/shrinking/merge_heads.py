"""Key and value heads of one attention made alike within groups, so that one head of each group is enough.

How depends on second moments of the inputs of its projections and of W_O on calibration batches, and on which changes
of basis leave its output unchanged, which experiments find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal, NamedTuple

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
from headwise.shrinking.cuts import Lost, list_beside
from headwise.shrinking.proof import run

# Inputs of a model: positional arguments, or arguments by name.
Batch = Any


def _select_real(given: Tensor, keep: Tensor | None) -> Tensor:
    """Return the rows [T, F] of real tokens in the input of a module, [B, L, F]."""
    if keep is None or given.dim() != 3 or keep.shape[1] != given.shape[1]:
        return given.flatten(0, -2)
    return given[keep.to(given.device).expand(len(given), -1)]


def _list_projections(site: Site) -> dict[int, nn.Module]:
    """Return the modules that project queries, keys and values, by their ids."""
    return {id(part.module): part.module for part in site.parts if part.module is not None}


# Has batches run through a site up to its output projection, and calls a function after each.
Walk = Callable[[Site, Callable[[], None]], None]


class Inputs(NamedTuple):
    """What the queries, keys and values of an attention are made from.

    Attributes:
        moments: [x, 1]^T [x, 1] of the inputs of each projecting module, by its id, [d + 1, d + 1] in float64.
        turns: Mean over queries and earlier keys of t_j conj(t_k), for the turns t of all pairs from the query to the
            key and of these conjugate, [e, e]; None where they are not known.
    """

    moments: dict[int, Tensor]
    turns: Tensor | None = None


def read_turns(module: nn.Module, kwargs: Mapping[str, Any], keep: Tensor | None) -> Tensor | None:
    """Return the mean of t_j conj(t_k) over the distances in a call that is given cosines and sines of positions."""
    given = kwargs.get("position_embeddings")
    if not (isinstance(given, tuple) and len(given) == 2 and all(isinstance(one, Tensor) for one in given)):
        return None
    turned = torch.complex(*(one.double().flatten(0, -3)[0] if one.dim() > 2 else one.double() for one in given))
    turned = turned / turned.abs()
    steps = turned[1:] * turned[:-1].conj()
    half = turned.shape[-1] // 2
    # halves that turn alike, and positions that follow one another
    if not torch.allclose(turned[:, :half], turned[:, half:], atol=1e-4):
        return None
    if not len(steps) or not torch.allclose(steps, steps[:1].expand_as(steps), atol=1e-3):
        return None
    # keys come before the query, or at its place
    turns = (turned[:1] * turned.conj())[:, :half]
    turns = torch.cat([turns, turns.conj()], 1)
    # so many pairs of positions are as far apart
    lengths = torch.tensor([len(turns)]) if keep is None else keep.sum(-1).flatten()
    counts = (lengths.to(turns.device)[:, None] - torch.arange(len(turns), device=turns.device)).clamp_min(0).sum(0)
    counts = counts.double()
    found = (turns.T * counts) @ turns.conj() / counts.sum()
    return found if getattr(module, "is_causal", True) else found.real + 0j


def measure_inputs(site: Site, walk: Walk) -> Inputs:
    """Return the moments of the inputs of each projecting module, and the turns of the first call.

    Raises:
        NotFired: A module was not called.
        HeadwiseError: An input is not finite.
    """
    moments: dict[int, Tensor] = {}
    newest = [Padding()]
    last: list[Tensor] = []

    def begin(padding: Padding) -> None:
        newest[0] = padding
        last.clear()

    def add(module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = read_first_argument(module, args, kwargs).detach()
        if not last or last[0] is not given:
            rows = _select_real(given, newest[0].keep).double()
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
            # queries, keys and values are mostly projected from one input
            last[:] = given, rows.mT @ rows
        moments[id(module)] = moments.get(id(module), 0.0) + last[1]

    turns: list[Tensor | None] = []

    def note(module: nn.Module, _: tuple, kwargs: dict) -> None:
        if not turns:
            turns.append(read_turns(module, kwargs, newest[0].keep))

    guard_hooks()
    modules = _list_projections(site)
    watched = [(site.module, note_padding(site.module, begin)), (site.module, note)]
    with watching([*watched, *((module, add) for module in modules.values())]):
        walk(site, last.clear)
    for key, module in modules.items():
        _require(site, moments.get(key), type(module).__name__)
    return Inputs(moments, *turns)


def assume_inputs(site: Site) -> Inputs:
    """Return the moments of inputs that are white: of variance 1, mean 0, and uncorrelated."""
    sizes = {id(part.module): part.across for part in site.parts if part.module is not None}
    device = site.slices[0].parts[0].parameter.device
    return Inputs({key: torch.eye(size + 1, dtype=torch.float64, device=device) for key, size in sizes.items()})


class Wanted(NamedTuple):
    """W_O of a site before anything was merged, [d, H * e] in float64, and its input in each call, [T, H * e]."""

    weight: Tensor
    calls: list[Tensor]


def read_outputs(heads: Heads, walk: Walk, take: Callable[[Site, Tensor], None]) -> None:
    """Walk through a model, and hand over the input of W_O in each call of a site, [T, H * e], of real tokens only."""
    taps = Taps(heads, outputs=True)

    def read() -> None:
        for capture in taps.read_called():
            assert capture.outputs is not None  # asked for
            take(capture.site, _select_real(capture.outputs.flatten(-2), capture.query_keep))

    try:
        walk(heads.sites[-1], read)
    finally:
        taps.remove()


def record_wanted(heads: Heads, walk: Walk) -> dict[Site, Wanted]:
    """Walk through the model, and keep W_O of each site and its inputs."""
    wanted = {site: Wanted(join_output(site), []) for site in heads}
    read_outputs(heads, walk, lambda site, rows: wanted[site].calls.append(rows))
    return wanted


class Fit(NamedTuple):
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


def measure_outputs(heads: Heads, wanted: Wanted, walk: Walk) -> Fit:
    """Walk through the model, and return moments of the input of one site's W_O now with its output before."""
    (site,) = heads
    calls = iter(wanted.calls)
    moments: Any = None
    products: Any = 0.0
    energy = 0.0

    def add(_: Site, given: Tensor) -> None:
        nonlocal moments, products, energy
        rows = given.double()
        outputs = next(calls).double() @ wanted.weight.mT
        moments = (0.0 if moments is None else moments) + rows.mT @ rows
        products = products + rows.mT @ outputs
        energy += float(outputs.square().sum())

    read_outputs(heads, walk, add)
    _require(site, moments, "output projection")
    return Fit(moments, products, energy)


def join_output(site: Site) -> Tensor:
    """Return W_O of all heads side by side, [d, H * e] in float64."""
    return read_output(site).movedim(0, 1).flatten(1)


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


def read_rows(view: HeadView) -> Tensor:
    """Return the rows of each head, and as the last column its bias or 0: [M, e, d + 1] in float64."""
    rows = view.turn(view.read()).mT.double()
    biases = [
        part.bias_view(part.bias_parameter.data).double() for part in view.parts if part.bias_parameter is not None
    ]
    bias = torch.cat(biases) if biases else rows.new_zeros(rows.shape[:2])
    return torch.cat([rows, bias[..., None]], -1)


def write_rows(view: HeadView, rows: Tensor) -> None:
    """Write the rows of each head and its bias, [M, e, d + 1]."""
    view.write(view.turn(rows[..., :-1].mT), *(part.parameter.data for part in view.parts))
    biases = rows[..., -1].split([part.heads for part in view.parts])
    for part, own in zip(view.parts, biases, strict=True):
        if part.bias_parameter is not None:
            part.bias_view(part.bias_parameter.data).copy_(own)


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
    """The changes of basis that the keys and the values of one attention allow; None where nothing was found."""

    key: KeyFreedom | None
    value: KeyFreedom | None

    def __str__(self) -> str:
        return f"keys: {self.key or 'nothing'}; values: {self.value or 'nothing'}"


def find_freedoms(sites: Sequence[Site], batch: Batch) -> dict[Site, Freedom]:
    """Return the freedom of each site: the first of a list of candidates under which its heads stay as they are.

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
            return _try_changes(site, call, heads, TOLERANCE[dtype])
    raise HeadwiseError(
        f"{site.label} ({type(site.module).__name__}) could be called again neither in float64 nor in float32 "
        f"({failed}); give batches without rows that are padding throughout, and merge the heads of the full-precision "
        "original of a quantized model."
    )


def _try_changes(site: Site, call: Call, heads: Tensor, tolerance: float) -> Freedom:
    """Return the freedom of a site, given what its heads compute in a call."""
    query, key, value = site.slices

    def agrees(change: Mapping[HeadView, Tensor], expected: Tensor) -> bool:
        with restored([one.data for one in list_held(*change)]):
            for view, matrices in change.items():
                write_rows(view, matrices.mT @ read_rows(view))
            found = Replay(site, call).outputs()
        return float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())

    def draw(freedom: KeyFreedom, size: int) -> tuple[Tensor, Tensor]:
        first, second = freedom.draw(site.key_value_heads, size, torch.Generator().manual_seed(1))
        return first.to(heads.device), second.to(heads.device)

    def spread(matrices: Tensor) -> Tensor:
        return matrices.repeat_interleave(site.num_heads // site.key_value_heads, 0)

    def keeps_scores(freedom: KeyFreedom) -> bool:
        matrices, inverses = draw(freedom, key.head_size)
        return agrees({key: matrices, query: spread(inverses)}, heads)

    def turns_outputs(freedom: KeyFreedom) -> bool:
        matrices, _ = draw(freedom, value.head_size)
        turned = (heads[..., None, :] @ spread(matrices).to(heads))[..., 0, :]
        return agrees({value: matrices}, turned)

    values = (KeyFreedom(0), KeyFreedom(0, kind="rigid")) if value.head_size == heads.shape[-1] else ()
    return Freedom(
        next(filter(keeps_scores, _list_candidates(site, key.head_size)), None),
        next(filter(turns_outputs, values), None),
    )


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


def list_held(*views: HeadView) -> list[Tensor]:
    """Return the weights and biases of views."""
    parts = [part for view in views for part in view.parts]
    held = [one for part in parts for one in (part.owner._parameters.get(part.attribute), part.bias_parameter)]
    return [parameter for parameter in held if parameter is not None]


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
        view: Where they are.
        rows: [G, e, d + 1].
        gram: y_i^T y_j, [G, e, G, e].
        weights: S_i, [G, e, e].
        freedom: Their changes of basis; None where nothing is free.
        alignment: How they are brought together.
        turns: How far pairs turn; None where it is not known, or nothing turns.
    """

    view: HeadView
    rows: Tensor
    gram: Tensor
    weights: Tensor
    freedom: KeyFreedom | None
    alignment: Alignment
    turns: Tensor | None = None

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

    def write(self, groups: Groups) -> Tensor:
        """Put one head in the place of each group, as its copies; return G of each head, group by group, [G, e, e]."""
        sharing, gram, weights = self.share(groups)
        if self.turns is not None and self.freedom is not None:
            sharing = self.freedom.refine(sharing, gram, weights, self.turns)
        index = torch.tensor([list(group) for group in groups], device=self.rows.device)
        rows = torch.einsum("gmef,gmed->gfd", sharing.write, self.rows[index])
        write_rows(self.view, rows.repeat_interleave(index.shape[1], 0))
        return sharing.read.flatten(0, 1)


def make_alike(site: Site, groups: int, way: Way, freedom: Freedom, inputs: Inputs) -> Groups:
    """Write weights under which the key/value heads of each group are copies, and groups are next to one another.

    Nothing has other sizes yet: the m heads of group j are heads j * m to j * m + m - 1 afterwards, and query heads
    with their columns of W_O, and what else belongs to them, move along.

    Args:
        site: The attention.
        groups: Their number.
        way: How.
        freedom: What is free in its keys and values.
        inputs: What its queries, keys and values are made from.

    Returns:
        The heads of each group, by their numbers from before.
    """
    query, *others = site.slices
    members = site.num_heads // site.key_value_heads
    query_rows, own = read_rows(query), inputs.moments[id(query.parts[0].module)]
    scores = torch.einsum("hed,dc,hfc->hef", query_rows, own, query_rows)
    outputs = read_output(site)
    readers = scores, torch.einsum("hde,hdf->hef", outputs, outputs)
    kinds = []
    for view, weights, free in zip(others, readers, (freedom.key, freedom.value), strict=True):
        rows, own = read_rows(view), inputs.moments[id(view.parts[0].module)]
        gram = torch.einsum("iad,dc,jbc->iajb", rows, own, rows)
        turns = _find_turns(free, way, inputs.turns, view.head_size)
        kinds.append(_Kind(view, rows, gram, weights.unflatten(0, (-1, members)).sum(1), free, way.alignment, turns))
    if way.grouping == "order":
        chosen = group_in_order(site.key_value_heads, groups)
    else:
        chosen = group_by_similarity(torch.stack([kind.compare() for kind in kinds]).mean(0), groups)
    queries = [head * members + member for group in chosen for head in group for member in range(members)]
    _move_queries(site, queries)
    # y_i is about u G_i^T: what reads it reads u with G_i^T in between
    key, value = (kind.write(chosen).repeat_interleave(members, 0) for kind in kinds)
    write_rows(query, key.mT @ query_rows[queries])
    write_output(site, outputs[queries] @ value)
    return chosen


def _find_turns(freedom: KeyFreedom | None, way: Way, turns: Tensor | None, size: int) -> Tensor | None:
    """Return the turns of all features, where the freedom of keys is that of the positions that were given."""
    if freedom is None or turns is None or way.alignment != "low_rank" or freedom.kind != "general":
        return None
    return None if freedom.interleaved or not freedom.rotary == len(turns) == size else turns


def _move_queries(site: Site, order: Sequence[int]) -> None:
    """Bring the gates, sinks and other parameters of query heads into an order."""
    query = site.slices[0]
    if site.layout.endswith("gated"):
        # the gate of a head lies next to its query
        whole = replace(query, head_size=query.stride)
        write_rows(whole, read_rows(whole)[list(order)])
    for _, parameter, axis, units in list_beside(site, proved=True):
        if units == "query":
            data = parameter.data.movedim(axis, 0).unflatten(0, (site.num_heads, -1))
            data.copy_(data[list(order)])


def keep_first(site: Site, groups: int) -> Lost:
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
