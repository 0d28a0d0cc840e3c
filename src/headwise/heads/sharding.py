"""Sharded parameters (DTensor), and which part of a whole each process computes.

All functions are collective: every process of the parameter's mesh calls them in the same order. `torch.distributed` is
imported only where needed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.heads.view import gather_full, is_sharded


@dataclass(frozen=True, eq=False)
class Share:
    """All rows and some columns (where heads are rows) of one parameter that this process computes, or all of it.

    The gradient is written in place; `give_back` puts it into the parameter's own, where that is another tensor.
    `groups` are process groups over whose members the columns are divided, to sum over.
    """

    parameter: Tensor
    gradient: Tensor
    groups: tuple[Any, ...] = ()
    give_back: Callable[[], None] | None = None


def read_share(parameter: Tensor, gradient: Tensor, across: int, *, everything: bool = False) -> Share:
    """Return what this process computes of a parameter, moving as little data as its placements allow.

    Some columns of every head are enough for the sums a rule needs: a process that holds them moves nothing. Where it
    holds rows, columns are exchanged for them, and back; if they do not divide evenly, or for `everything`, every
    process gets all. No heads are counted along the axis `across`: 1 where heads are rows.
    """
    if not is_sharded(parameter):
        return Share(parameter, gradient)
    held: Any = parameter
    there: Any = gradient
    columns = None if everything else _place_columns(held, across)
    if columns is None:
        every = there.full_tensor()
        return Share(held.full_tensor(), every, give_back=lambda: write_own_part(gradient, every))
    moved = there.redistribute(placements=columns)
    groups = tuple(held.device_mesh.get_group(axis) for axis, place in enumerate(columns) if place.is_shard())
    local = moved.to_local()

    def give_back() -> None:
        there.to_local().copy_(moved.redistribute(placements=there.placements).to_local())

    stays = local.data_ptr() == there.to_local().data_ptr()
    return Share(held.redistribute(placements=columns).to_local(), local, groups, None if stays else give_back)


def sum_over(groups: Sequence[Any], parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of these tensors over the processes of each group, in one message per group."""
    if not groups:
        return list(parts)
    import torch.distributed as dist

    flat = torch.cat([part.reshape(-1) for part in parts])
    for group in groups:
        dist.all_reduce(flat, group=group)
    sums = flat.split([part.numel() for part in parts])
    return [own.view(part.shape) for own, part in zip(sums, parts, strict=True)]


def is_distributed() -> bool:
    """Return whether processes work together: torch.distributed is initialized."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def average_over(group: Any, numbers: Sequence[Tensor]) -> list[Tensor]:
    """Return the means of tensors of one number each over a process group, in one message, without gradients."""
    import torch.distributed as dist

    flat = torch.stack([number.detach().to(numbers[0].device, torch.float64) for number in numbers])
    dist.all_reduce(flat, group=group)
    means = flat / dist.get_world_size(group)
    return [mean.to(number.device) for mean, number in zip(means, numbers, strict=True)]


def average_finite_over(group: Any, numbers: Sequence[Tensor]) -> list[Tensor]:
    """Return what `average_over` does, over the processes where a number is finite; NaN where it is in none."""
    known = [number.isfinite() for number in numbers]
    sums = [torch.where(one, number, 0.0) for one, number in zip(known, numbers, strict=True)]
    means = average_over(group, [*sums, *(one.double() for one in known)])
    return [own / share for own, share in zip(means[: len(sums)], means[len(sums) :], strict=True)]


def write_own_part(target: Tensor, every: Tensor) -> None:
    """Write into `target` this process's part of a tensor that every process has, without communication."""
    with torch.no_grad():
        _to_local(target).copy_(_take_own_part(every, target))


def add_own_part(target: Tensor, every: Tensor) -> None:
    """Add to `target` this process's part of a tensor that every process has, without communication."""
    with torch.no_grad():
        _to_local(target).add_(_take_own_part(every, target))


def gather_mean(tensor: Tensor) -> Tensor:
    """Return all of a tensor on this process; its gradient is the mean of the gradients of all processes' copies."""
    if not is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import Partial

    sharded: Any = tensor
    mesh = sharded.device_mesh
    full = sharded.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full.requires_grad:
        full.register_hook(lambda gradient: gradient / mesh.size())
    return full


def gather_features(tensor: Tensor, axis: int, size: int, parameter: Tensor | None, along: int) -> Tensor:
    """Return the features of all heads where tensor parallel left this process some of them, differentiably.

    Every process then computes the same from them, so the gradient of its own part is its slice of the gradient. Heads
    are along `axis` of the features, `size` for all heads, and along `along` of the parameter that computes them.
    """
    if is_sharded(tensor):
        return gather_full(tensor)
    found = None if tensor.shape[axis] == size else _find_mesh(parameter, along)
    if found is None or tensor.shape[axis] * found[1] != size:
        return tensor
    from torch.distributed.tensor import DTensor, Shard

    mesh: Any = found[0]
    return DTensor.from_local(tensor, mesh, [Shard(axis % tensor.dim())], run_check=False).full_tensor()


def select_own_heads(tensor: Tensor, axis: int, size: int, parameter: Tensor | None, along: int) -> Tensor:
    """Return the part of `tensor`, given for all heads along `axis`, of the `size` heads that this process computes.

    A tensor of size 1 along the axis holds for any head. `parameter` computes the features, with heads along `along`.
    """
    found = None if tensor.shape[axis] in (1, size) else _find_mesh(parameter, along)
    if found is None or size * found[1] != tensor.shape[axis]:
        return tensor
    return tensor.narrow(axis, found[0].get_local_rank() * size, size)


def scale_features(tensor: Tensor, factors: Tensor, parameter: Tensor | None, along: int) -> Tensor:
    """Return features times one factor each, [..., F] * [F], where a process may have some of the F features."""
    if is_sharded(tensor):
        return tensor * _replicate(factors, tensor)
    return tensor * select_own_heads(factors, 0, tensor.shape[-1], parameter, along)


def count_parts(parameter: Tensor | None, along: int) -> int:
    """Return into how many parts tensor parallel or FSDP2 divides an axis of a parameter."""
    found = _find_mesh(parameter, along)
    return 1 if found is None else found[1]


def computes_part(owner: nn.Module, attribute: str, along: int) -> bool:
    """Whether tensor parallel has each process compute with a part of a module's parameter, divided along an axis."""
    # FSDP2 divides parameters too, and puts them together for the forward
    whole = getattr(owner, "_is_fsdp_managed_module", False)
    return not whole and count_parts(owner._parameters.get(attribute), along) > 1


def _place_columns(parameter: Any, across: int) -> tuple[Any, ...] | None:
    """Return the placements by which every process has some columns, or None where they would be uneven."""
    from torch.distributed.tensor import Shard

    mesh, placements = parameter.device_mesh, parameter.placements
    divided = [axis for axis, place in enumerate(placements) if not place.is_replicate()]
    columns = tuple(Shard(across) if axis in divided else place for axis, place in enumerate(placements))
    pieces = math.prod(mesh.size(axis) for axis in divided)
    # rows divided by two meshes at once are in another order
    one_exchange = len(divided) == 1 and type(placements[divided[0]]) is Shard
    return columns if parameter.shape[across] % pieces == 0 and (columns == placements or one_exchange) else None


def _find_mesh(parameter: Tensor | None, along: int) -> tuple[Any, int] | None:
    """Return the one-dimensional mesh over which an axis of a parameter is divided, and its size."""
    if parameter is None or not is_sharded(parameter):
        return None
    held: Any = parameter
    axes = [axis for axis, place in enumerate(held.placements) if place.is_shard(along)]
    if not axes:
        return None
    mesh = held.device_mesh
    inner = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[axes[-1]]]
    return inner, inner.size()


def _to_local(tensor: Tensor) -> Tensor:
    sharded: Any = tensor
    return sharded.to_local() if is_sharded(tensor) else tensor


def _replicate(every: Tensor, like: Any) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(every, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _take_own_part(every: Tensor, like: Tensor) -> Tensor:
    if not is_sharded(like):
        return every
    sharded: Any = like
    return _replicate(every, like).redistribute(placements=sharded.placements).to_local()
