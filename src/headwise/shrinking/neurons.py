"""The neurons of the MLPs beside the attentions of a model, found by structure and proved by experiment.

A hidden neuron is a row of the maps up (one; two where an activation gates the other; one of twice the rows where both
are fused) and a column of the map down. That nothing between them mixes neurons is read off gradients in a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, LayoutError
from headwise.heads.heads import Heads, Site
from headwise.heads.record import evaluating, restored, watching
from headwise.heads.view import Projection, is_sharded, read_projection
from headwise.nn.hooks import read_first_argument, uncompiled


@dataclass(frozen=True, eq=False)
class Map:
    """A linear map of an MLP: its name in the model, and how it is read."""

    name: str
    read: Projection = field(repr=False)

    @property
    def weight(self) -> Tensor:
        """The weight [rows, columns], or [columns, rows] of GPT-2's Conv1D."""
        return self.read.owner.get_parameter("weight")

    @property
    def bias(self) -> Tensor | None:
        """The bias [rows], or None."""
        return None if self.read.bias is None else self.read.owner._parameters[self.read.bias]


@dataclass(frozen=True, eq=False)
class Mlp:
    """One MLP of a model, whose hidden neurons can be removed one by one.

    Attributes:
        name: Its dotted name in the model: of the smallest module that holds its maps, or of the map down where another
            MLP is in that module too.
        block: The dotted name of the layer that it is in.
        neurons: Number of hidden neurons F.
        up: The maps to the hidden neurons: one, or two where one gates the other.
        down: The map from them, whose columns they are.
        runs: Rows of a map up for each neuron: 1, or 2 where gate and value are fused.
        interleaved: Whether the rows of a neuron are neighbors in a fused map, and not F apart.
    """

    name: str
    block: str
    neurons: int
    up: tuple[Map, ...]
    down: Map
    runs: int = 1
    interleaved: bool = False

    @property
    def parameters(self) -> list[Tensor]:
        """All its parameters."""
        held = [one for part in (*self.up, self.down) for one in (part.weight, part.bias)]
        return [one for one in held if one is not None]

    @property
    def neuron_size(self) -> int:
        """Parameters that one neuron has."""
        return sum(self.runs * (part.read.columns + (part.bias is not None)) for part in self.up) + self.down.read.rows

    def list_rows(self, neurons: Sequence[int]) -> list[int]:
        """Return the rows of a map up that neurons have."""
        if self.interleaved:
            return sorted(self.runs * neuron + run for neuron in neurons for run in range(self.runs))
        return sorted(run * self.neurons + neuron for run in range(self.runs) for neuron in neurons)

    def zero(self, neurons: Sequence[int]) -> None:
        """Zero the columns of neurons in the map down."""
        self.down.weight.data.index_fill_(
            1 - self.down.read.axis, torch.tensor(neurons, dtype=torch.long, device=self.down.weight.device), 0.0
        )


@contextmanager
def zeroed(removed: Mapping[Site, Sequence[int]], neurons: Mapping[Mlp, Sequence[int]]) -> Iterator[None]:
    """Have heads and neurons put out zero inside the block; the weights that read them are zeroed there."""
    outputs = [(site.output, gone) for site, gone in removed.items() if site.output is not None]
    touched = [output.parameter.data for output, _ in outputs] + [mlp.down.weight.data for mlp in neurons]
    # a parameter that several share is kept once
    with torch.no_grad(), restored({id(one): one for one in touched}.values()):
        for output, gone in outputs:
            # O_h W_O = 0 is the same as O_h = 0
            output.of(output.parameter.data)[list(gone)] = 0.0
        for mlp, gone in neurons.items():
            mlp.zero(gone)
        yield


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a linear map: what it was given, and what it returned, apart from the graph of before."""

    name: str
    read: Projection
    given: Tensor
    output: Tensor


def find_mlps(heads: Heads, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Mlp, ...]:
    """Return the MLPs in the layers of the attentions of a model, found in a call with these inputs.

    Raises:
        HeadwiseError: The model cannot be run on the inputs.
    """
    model = heads.model
    attentions = {id(part.owner) for site in heads.found for part in (*site.parts, site.output) if part is not None} | {
        id(module) for site in heads.found for module in site.module.modules()
    }
    reads = {
        module: (name, read)
        for name, module in model.named_modules()
        if id(module) not in attentions and (read := read_projection(module)) is not None
    }
    # what wraps a layer stands for it
    inner = {read.owner for module, (_, read) in reads.items() if read.owner is not module}
    calls: list[_Call] = []

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        given = read_first_argument(module, args, kwargs)
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        # a leaf: what is computed of it is told by gradients up to here
        leaf = output.detach().requires_grad_()
        calls.append(_Call(*reads[module], given, leaf))
        return leaf.clone()

    watched = [(module, note) for module in reads if module not in inner]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with uncompiled(), evaluating(model), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            with watching(after=watched):
                model(*args, **kwargs)
            return _name(_read_calls(heads, calls))
    except HeadwiseError:
        raise
    except Exception as error:
        raise HeadwiseError(
            f"{type(model).__name__} could not be run on the inputs ({type(error).__name__}: {str(error)[:200]}); give "
            "what the model itself takes."
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _read_calls(heads: Heads, calls: Sequence[_Call]) -> list[Mlp]:
    # the innermost layer that holds a map
    blocks = sorted({name_block(site) for site in heads.found}, key=len, reverse=True)
    found: dict[nn.Module, Mlp] = {}
    refused: set[nn.Module] = set()
    for place, down in enumerate(calls):
        block = next((block for block in blocks if down.name.startswith(block)), None)
        mlp = None if block is None else _read_mlp(block, down, calls[max(0, place - 2) : place])
        module = down.read.module
        if mlp is None or (module in found and _list_owners(found[module]) != _list_owners(mlp)):
            refused.add(module)
        else:
            found.setdefault(module, mlp)
    kept: list[Mlp] = []
    taken: set[nn.Module] = set()
    for module, mlp in found.items():
        # of linear maps in a row, the second would be the map down of one MLP and the map up of the next
        if module not in refused and not taken & {*_list_owners(mlp)}:
            kept.append(mlp)
            taken |= {*_list_owners(mlp)}
    return kept


def _list_owners(mlp: Mlp) -> list[nn.Module]:
    return [part.read.owner for part in (*mlp.up, mlp.down)]


def _read_mlp(block: str, down: _Call, before: Sequence[_Call]) -> Mlp | None:
    """Return the MLP that a call is the end of, given the two calls of linear maps before it."""
    size = down.read.columns
    if not before or not down.given.requires_grad or down.given.shape[-1] != size:
        return None
    last = before[-1]
    if not all(call.name.startswith(block) for call in before[-1:]):
        return None
    if last.read.rows == 2 * size:
        for interleaved in (False, True):
            mlp = _make(block, down, [last], runs=2, interleaved=interleaved)
            if _keeps_apart(mlp, down, [last]):
                return mlp
        return None
    if last.read.rows != size:
        return None
    if len(before) == 2 and before[0].read.rows == size and before[0].given.shape == last.given.shape:
        mlp = _make(block, down, before)
        if before[0].name.startswith(block) and _keeps_apart(mlp, down, before):
            return mlp
    mlp = _make(block, down, [last])
    return mlp if _keeps_apart(mlp, down, [last]) else None


def _make(block: str, down: _Call, ups: Sequence[_Call], **settings: Any) -> Mlp:
    parts = tuple(Map(up.name, up.read) for up in ups)
    return Mlp(down.name, block, down.read.columns, parts, Map(down.name, down.read), **settings)


def _keeps_apart(mlp: Mlp, down: _Call, ups: Sequence[_Call]) -> bool:
    """Return whether what the map down gets of half of the neurons comes of their rows alone, and of every map up."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randperm(mlp.neurons, generator=generator)[: max(1, mlp.neurons // 2)]
    rest = sorted({*range(mlp.neurons)} - {*half.tolist()})
    for chosen in (half.tolist(), rest):
        if not chosen:
            continue
        weights = torch.zeros(mlp.neurons)
        weights[chosen] = torch.rand(len(chosen), generator=generator) + 0.5
        total = (down.given * weights.to(down.given)).sum()
        gradients = torch.autograd.grad(total, [up.output for up in ups], retain_graph=True, allow_unused=True)
        outside = torch.ones(mlp.neurons * mlp.runs, dtype=torch.bool)
        outside[mlp.list_rows(chosen)] = False
        for gradient in gradients:
            if gradient is None:
                return False
            moved = gradient.reshape(-1, gradient.shape[-1]).abs().amax(0).cpu()
            if bool((moved[outside] != 0).any()) or not bool((moved[~outside] != 0).any()):
                return False
    return True


def name_block(site: Site) -> str:
    """Return the start of the names of the modules in the layer of an attention."""
    inside = site.name.removeprefix(f"{site.stack}.") if site.stack else ""
    return f"{site.stack}.{inside.split('.')[0]}." if inside and inside != site.name else ""


def _name(mlps: Sequence[Mlp]) -> tuple[Mlp, ...]:
    """Return the MLPs with the names of the modules that hold them."""
    parents = []
    for mlp in mlps:
        paths = [part.name.split(".")[:-1] for part in (*mlp.up, mlp.down)]
        depth = next(
            (place for place, names in enumerate(zip(*paths, strict=False)) if len({*names}) > 1), min(map(len, paths))
        )
        parents.append(".".join(paths[0][:depth]))
    return tuple(
        replace(mlp, name=parent if parent and parents.count(parent) == 1 else mlp.down.name)
        for mlp, parent in zip(mlps, parents, strict=True)
    )


def require_mlps(heads: Heads, mlps: Sequence[Mlp]) -> tuple[Mlp, ...]:
    """Return the MLPs of the layers of the selected attentions.

    Raises:
        LayoutError: A layer has none that is understood, or experts; or a map is shared, sharded, quantized or under an
            adapter.
    """
    model = heads.model
    blocks = dict.fromkeys(name_block(site) for site in heads)
    for block in blocks:
        _require_plain(model, block, [mlp for mlp in mlps if mlp.block == block])
    places = Counter(id(one) for module in model.modules() for one in module._parameters.values() if one is not None)
    wanted = tuple(mlp for mlp in mlps if mlp.block in blocks)
    for part in (part for mlp in wanted for part in (*mlp.up, mlp.down)):
        obstacle = part.read.obstacle
        if part.read.lora is not None:
            obstacle = "has LoRA adapters; merge them into the weight first (merge_and_unload)"
        elif obstacle is None and is_sharded(part.weight):
            obstacle = "is sharded over processes; do it before the model is sharded"
        elif obstacle is None and places[id(part.weight)] > 1:
            obstacle = "is shared with another layer, which would lose the same neurons; use hw.prune for heads alone"
        if obstacle is not None:
            raise LayoutError(f"{part.name}.weight {obstacle}.")
    return wanted


def _require_plain(model: nn.Module, block: str, own: Sequence[Mlp]) -> None:
    """Raise `LayoutError` where a layer has experts, or no MLP of its own."""
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if name.startswith(block) and parameter.dim() == 3 and "expert" in name:
            place = name.rpartition(".")[0]
            raise LayoutError(
                f"{place} ({type(modules[place]).__name__}) holds experts, which see some tokens each, so that their "
                "neurons are not ranked beside the heads; remove heads alone, with hw.prune."
            )
    if not own:
        held = modules.get(block.removesuffix("."), model)
        kinds = ", ".join(dict.fromkeys(type(child).__name__ for child in held.children()))
        raise LayoutError(
            f"{block.removesuffix('.') or 'the model'} ({type(held).__name__}) has no MLP that is understood: a linear "
            "map, an activation of each hidden neuron by itself, perhaps gated by a second map, and a linear map back; "
            f"it holds {kinds}. Select layers that have one (heads.where(...)), or remove heads alone, with hw.prune."
        )
