"""What removing heads takes out of each parameter, and taking it out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError
from headwise.heads.head_slice import HeadSlice, is_sharded
from headwise.heads.heads import Heads, Site
from headwise.nn.resized import resize, set_data
from headwise.shrinking.prune_beside import list_beside, list_guessed

# Attributes of Linear, Embedding and GPT-2's Conv1D that hold the size of an axis of `weight`.
_SIZES = (("out_features", 0), ("in_features", 1), ("embedding_dim", 1), ("nx", 0), ("nf", 1))


@dataclass(frozen=True, eq=False)
class Cut:
    """What stays of one parameter.

    Attributes:
        name: Its name in the model.
        owners: Each module that holds it, with its attribute name there.
        parameter: The parameter.
        axis: The axis along which entries are removed.
        size: Its size along that axis before.
        keep: The entries that stay, in order.
    """

    name: str
    owners: tuple[tuple[nn.Module, str], ...] = field(repr=False)
    parameter: Tensor
    axis: int
    size: int
    keep: tuple[int, ...]

    def select(self, tensor: Tensor) -> Tensor:
        """Return what stays of a tensor shaped like the parameter."""
        return tensor.index_select(self.axis, torch.tensor(self.keep, device=tensor.device)).contiguous()

    def apply(self) -> Callable[[], None]:
        """Cut the parameter and its gradient, and return what puts them back.

        The parameter stays the same object: what else holds it, such as an optimizer or a tied layer, holds it cut.
        """
        parameter, data, gradient = self.parameter, self.parameter.data, self.parameter.grad
        parameter.grad = None
        set_data(parameter, self.select(data))
        parameter.grad = None if gradient is None else self.select(gradient)
        undone = [resize(owner, _read_sizes(owner, attribute, self)) for owner, attribute in self.owners]

        def undo() -> None:
            for one in undone:
                one()
            parameter.grad = None
            set_data(parameter, data)
            parameter.grad = gradient

        return undo


# The heads that each projection of a site loses; "query" and "key" are also what tables and norms lose.
Lost = Mapping[str, Sequence[int]]


def list_gone(site: Site, gone: Sequence[int]) -> Lost:
    """Return what each projection of a site loses with its query heads `gone`.

    Raises:
        LayoutError: The groups that stay would not be of one size.
    """
    group = site.num_heads // site.key_value_heads
    left = [[head for head in site.list_members(index) if head not in gone] for index in range(site.key_value_heads)]
    groups = tuple(index for index, heads in enumerate(left) if not heads)
    sizes = {len(heads) for heads in left if heads}
    kept = [head for head in range(site.num_heads) if head not in gone]
    # where keys are repeated as a whole, the groups of the heads that stay must come in their order, again and again
    in_order = not site.tiled or kept == [head for row in zip(*filter(None, left), strict=False) for head in row]
    if len(sizes) > 1 or not in_order:
        told = ", ".join(f"{len(heads)} of group {index}" for index, heads in enumerate(left))
        members = f"g * {group} to g * {group} + {group - 1}"
        if site.tiled:
            members = f"g, g + {site.key_value_heads} and so on"
        raise LayoutError(
            f"{site.label}: {group} query heads share a key/value head, and removing heads "
            f"{', '.join(map(str, gone))} would leave {told}{'' if in_order else ', in another order'}; remove whole "
            f"groups, or equally many heads of each group that stays (group g has heads {members})."
        )
    return {"query": tuple(gone), "key": groups, "value": groups, "output": tuple(gone)}


def collect_cuts(heads: Heads, lost: Mapping[Site, Lost], *, proved: bool, guess: bool = False) -> list[Cut]:
    """Return what stays of each parameter when heads are removed from sites; one cut for a tied or fused one.

    Args:
        heads: All sites of the model that were found.
        lost: What each site loses.
        proved: Whether the result is compared with what it should be, so that unknown parameters may stay as they are.
        guess: Whether unknown parameters with an axis as long as something of the query heads are cut along it: gates.

    Raises:
        LayoutError: A parameter is shared by sites that keep different heads, or cannot be cut.
    """
    found: dict[int, _Slab] = {}
    for site in heads.found:
        for slab in _find_slabs(site, lost.get(site), proved=proved, guess=guess):
            other = found.setdefault(id(slab.parameter), slab)
            if (other.axis, other.gone) != (slab.axis, slab.gone):
                raise LayoutError(
                    f"{slab.name} is shared by {other.name} of another attention, and the two would keep different "
                    "heads; remove the same heads from both."
                )
    cut = {key: slab for key, slab in found.items() if slab.gone}
    owners: dict[int, list[tuple[nn.Module, str]]] = {key: [] for key in cut}
    for module in heads.model.modules():
        for attribute, parameter in module._parameters.items():
            if id(parameter) in owners:
                owners[id(parameter)].append((module, attribute))
    return [slab.cut(owners[key]) for key, slab in cut.items()]


@dataclass(frozen=True, eq=False)
class _Slab:
    """The entries `gone` along an axis of a parameter; none where a site keeps all of it."""

    name: str
    parameter: Tensor
    axis: int = 0
    gone: tuple[int, ...] = ()

    def cut(self, owners: Sequence[tuple[nn.Module, str]]) -> Cut:
        gone, size = set(self.gone), self.parameter.shape[self.axis]
        keep = tuple(index for index in range(size) if index not in gone)
        return Cut(self.name, tuple(owners), self.parameter, self.axis, size, keep)


def _find_slabs(site: Site, lost: Lost | None, *, proved: bool, guess: bool) -> Iterable[_Slab]:
    """Return what a site loses of each of its parameters."""
    if lost is None:
        held = [part.owner._parameters.get(part.attribute) for part in site.parts]
        return [_Slab(site.label, parameter) for parameter in held if parameter is not None]
    masks: dict[int, tuple[str, Tensor, Tensor]] = {}
    for name, parameter, mask in _mask_parameters(site, lost, proved=proved, guess=guess):
        known = masks.get(id(parameter))
        masks[id(parameter)] = (name, parameter, mask) if known is None else (*known[:2], known[2] | mask)
    return [_Slab(name, parameter, *_read_slab(name, mask)) for name, parameter, mask in masks.values()]


def _mask_parameters(site: Site, lost: Lost, *, proved: bool, guess: bool) -> Iterable[tuple[str, Tensor, Tensor]]:
    """Yield the parameters of a site, and True at what belongs to the heads that are removed."""
    slices = (*site.slices, *(() if site.output is None else (site.output,)))
    for head_slice in slices:
        # the gate of a head follows its query
        gated = head_slice.projection == "query" and site.layout.endswith("gated")
        own = lost[head_slice.projection]
        first = 0
        for part in head_slice.parts:
            whole = replace(part, head_size=part.stride) if gated else part
            yield from _mask_slice(whole, [head - first for head in own if 0 <= head - first < part.heads])
            first += part.heads
    beside = [*list_beside(site, proved=proved), *(list_guessed(site) if guess else ())]
    for name, parameter, axis, units in beside:
        mask = torch.zeros(parameter.shape, dtype=torch.bool)
        count = site.key_value_heads if units == "key" else site.num_heads
        mask.movedim(axis, 0).unflatten(0, (count, -1))[list(lost[units])] = True
        yield name, parameter, mask


def _mask_slice(part: HeadSlice, gone: list[int]) -> Iterable[tuple[str, Tensor, Tensor]]:
    parameter = part.parameter
    if part.lora is not None or is_sharded(parameter):
        raise LayoutError(
            f"{part.name} "
            + (
                "has LoRA adapters: merge them into the weight first (merge_and_unload), and find heads again"
                if part.lora is not None
                else "is sharded over processes: remove heads before the model is sharded"
            )
            + "; heads are removed from whole weights."
        )
    mask = torch.zeros(parameter.shape, dtype=torch.bool)
    part.view(mask)[gone] = True
    yield part.name, parameter, mask
    bias = part.bias_parameter
    if bias is not None:
        mask = torch.zeros(bias.shape, dtype=torch.bool)
        part.bias_view(mask)[gone] = True
        yield f"{part.name.rpartition('.')[0]}.{part.bias}", bias, mask


def _read_slab(name: str, mask: Tensor) -> tuple[int, tuple[int, ...]]:
    """Return the axis along which a mask is the same everywhere, and the entries of that axis where it is True."""
    for axis in range(mask.dim()):
        rows = mask.movedim(axis, 0).reshape(mask.shape[axis], -1)
        if torch.equal(rows.any(1), rows.all(1)):
            return axis, tuple(rows.any(1).nonzero().flatten().tolist())
    raise LayoutError(f"{name} holds its heads so that removing some leaves no rectangle; it cannot be cut.")


def _read_sizes(owner: nn.Module, attribute: str, cut: Cut) -> dict[str, int]:
    """Return the sizes of the layer that holds the parameter, after the cut."""
    if attribute != "weight" or cut.parameter.dim() != 2:
        return {}
    old = {name: getattr(owner, name, None) for name, axis in _SIZES if axis == cut.axis}
    return {name: len(cut.keep) for name, size in old.items() if isinstance(size, int)}
