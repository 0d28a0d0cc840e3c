"""Cutting heads out of a model: out of its parameters, the state of its optimizer, its counts and configuration.

All of these change together, or not at all.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError, SettingError
from headwise.heads.heads import Heads, Site
from headwise.heads.view import HeadView, is_sharded, read_projection
from headwise.nn.resized import resize, set_data
from headwise.shrinking.reload_stock import (
    ConfigChange,
    Counts,
    find_configured_count,
    list_counts,
    list_stock_models,
    plan_config,
    set_saving,
)

# The end of a parameter's name in the attention module, and the axis along which it has heads: one entry or one head's
# width of entries for each.
TABLES: tuple[tuple[str, int], ...] = (
    # positions projected to heads: DeBERTa, Conformers, Gemma 3n
    *((f"{name}.{part}", 0) for name in ("pos_proj", "pos_q_proj") for part in ("weight", "bias")),
    *((f"{name}.{part}", 0) for name in ("pos_key_proj", "pos_query_proj") for part in ("weight", "bias")),
    ("linear_pos.weight", 0),
    ("relative_k_proj.weight", 0),
    ("pos_bias_u", 0),
    ("pos_bias_v", 0),
    # a bias for each distance and head: T5, Swin, BEiT
    ("relative_attention_bias.weight", 1),
    ("relative_position_bias_table", 1),
    ("continuous_position_bias_mlp.2.weight", 0),
    ("logit_scale", 0),
    # Funnel
    ("r_w_bias", 0),
    ("r_r_bias", 0),
    ("r_s_bias", 0),
    ("r_kernel", 1),
    ("seg_embed", 1),
    # sinks: GPT-OSS, MiMo
    ("sinks", 0),
    ("attention_sink_bias", 0),
    # torch.nn.MultiheadAttention
    ("bias_k", 2),
    ("bias_v", 2),
)
# Norms of queries and keys: of each head where they have two axes, of any head where they have its width.
_NORM = re.compile(r"(?:^|\.)(q|k|query|key)_(?:norm|layernorm|ln)\.(?:weight|bias)$")
_OTHER_NORM = re.compile(r"norm\d*\.(?:weight|bias)$", re.IGNORECASE)
# Projections that have no heads.
_WITHOUT_HEADS = ("q_a_proj", "kv_a_proj_with_mqa")


def list_beside(site: Site, *, proved: bool) -> Iterable[tuple[str, nn.Parameter, int, str]]:
    """Yield the parameters of a site that hold something of each head: name, parameter, axis, "query" or "key".

    Raises:
        LayoutError: One covers all heads together, or may hold heads and is of no known kind; the latter is left as it
            is where the result is `proved`.
    """
    for name, parameter, found in _list_parameters(site):
        if found is not None:
            yield name, parameter, *found
        elif not proved and _may_hold_heads(site, name, parameter):
            raise LayoutError(
                f"{site.label}.{name} of shape {tuple(parameter.shape)} may hold something of each of "
                f"{site.num_heads} heads, and it is of no kind that is known; pass inputs=..., so that the result is "
                "compared with hw.ablate."
            )


def list_guessed(site: Site) -> list[tuple[str, nn.Parameter, int, str]]:
    """Return the parameters of a site of no known kind that may hold something of each query head, as `list_beside`.

    A gate of each head, or of each of its features, is one. Only a comparison shows it.
    """
    lengths = {site.num_heads * size for size in (1, *_list_sizes(site))}
    guessed = []
    for name, parameter, found in _list_parameters(site):
        owner, _, attribute = name.rpartition(".")
        projection = read_projection(site.module.get_submodule(owner)) if attribute == "weight" else None
        axes = range(parameter.dim()) if projection is None else (projection.axis,)
        axis = next((axis for axis in axes if parameter.shape[axis] in lengths), None)
        if found is None and axis is not None and _may_hold_heads(site, name, parameter):
            guessed.append((name, parameter, axis, "query"))
    return guessed


def _list_parameters(site: Site) -> Iterable[tuple[str, nn.Parameter, tuple[int, str] | None]]:
    """Yield the parameters of a site beside its projections, with axis and kind of what they hold of each head."""
    read = {id(part.owner._parameters.get(part.attribute)) for part in site.parts}
    read |= {id(part.bias_parameter) for part in site.parts}
    if site.output is not None:
        # W_O may be a parameter among others of the attention itself
        own = site.output.owner is not site.module
        read |= {id(parameter) for parameter in (site.output.owner.parameters() if own else [site.output.parameter])}
    sizes = _list_sizes(site)
    for name, parameter in site.module.named_parameters():
        if id(parameter) not in read:
            yield name, parameter, _find_norm(site, name, parameter, sizes) or _find_table(site, name, parameter, sizes)


def _list_sizes(site: Site) -> set[int]:
    return {site.head_size, *(head_slice.head_size for head_slice in site.slices)}


def _find_norm(site: Site, name: str, parameter: nn.Parameter, sizes: set[int]) -> tuple[int, str] | None:
    """Return axis and kind of the norms of each query or key head; None for what is no norm of queries or keys."""
    norm = _NORM.search(name)
    if norm is None:
        return None
    units, count = ("query", site.num_heads) if norm[1].startswith("q") else ("key", site.key_value_heads)
    if parameter.dim() == 2 and parameter.shape[0] == count:
        return 0, units
    if parameter.dim() == 1 and parameter.shape[0] in sizes:
        return None
    raise LayoutError(
        f"{site.label}.{name} normalizes all heads together, so the others change when one is removed; hw.ablate "
        "zeroes heads after it, and nothing can be cut."
    )


def _find_table(site: Site, name: str, parameter: nn.Parameter, sizes: set[int]) -> tuple[int, str] | None:
    axis = next((axis for end, axis in TABLES if f".{name}".endswith(f".{end}")), None)
    if axis is None or parameter.dim() <= axis or parameter.shape[axis] % site.num_heads:
        return None
    return (axis, "query") if parameter.shape[axis] // site.num_heads in {1, *sizes} else None


def _may_hold_heads(site: Site, name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter of an unknown kind has an axis as long as something of the heads."""
    if any(pattern.search(name) for pattern in (_NORM, _OTHER_NORM)):
        return False
    if any(f"{part}." in f"{name}." for part in _WITHOUT_HEADS):
        return False
    counts, sizes = {site.num_heads, site.key_value_heads}, _list_sizes(site)
    return bool({*counts, *(count * size for count in counts for size in sizes)} & {*parameter.shape})


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


def _mask_slice(part: HeadView, gone: list[int]) -> Iterable[tuple[str, Tensor, Tensor]]:
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
    part.of(mask)[gone] = True
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


# Factored statistics of transformers' Adafactor: what is left of the axes of a parameter when one is averaged over.
_AVERAGED = {"exp_avg_sq_row": -1, "exp_avg_sq_col": -2}


def require_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise `SettingError` unless this is None or an optimizer of a model with a state for each parameter."""
    if optimizer is None:
        return
    name = type(optimizer).__name__
    if not (hasattr(optimizer, "state") and hasattr(optimizer, "param_groups")):
        raise SettingError(f"optimizer is a {name}; expected the torch optimizer that trains the model, or None.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SettingError(
            "optimizer is an LBFGS, whose state is of all parameters in one row and cannot be cut; leave it out, and "
            "make a new one afterwards."
        )
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in trained for parameter in model.parameters()):
        raise SettingError(
            f"the {name} given as optimizer holds no parameter of the {type(model).__name__}; expected the one that "
            "trains it, or None."
        )


def cut_states(optimizer: Any, cuts: Sequence[Cut]) -> None:
    """Cut the state of each parameter as the parameter; what cannot be cut is dropped, with a warning.

    Call it after the cuts are applied. Moments shaped like the parameter keep the entries that stay; a step count stays
    as it is; averages over an axis (Adafactor) keep their entries along the cut axis.
    """
    dropped = []
    for cut in cuts:
        state = optimizer.state.get(cut.parameter)
        if not state:
            continue
        new = {name: _cut(cut, name, value) for name, value in state.items()}
        if any(value is None and state[name] is not None for name, value in new.items()):
            dropped.append(cut.name)
            del optimizer.state[cut.parameter]
        else:
            state.update(new)
    if dropped:
        warnings.warn(
            f"{type(optimizer).__name__} keeps a state of {len(dropped)} parameters ({', '.join(dropped[:4])}) that "
            "has no entry for each of their rows and columns; it was dropped and begins anew.",
            stacklevel=3,
        )


def _cut(cut: Cut, name: str, value: Any) -> Any:
    """Return what stays of one value of a state, None for what cannot be cut."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return value
    left: list[int] = list(range(cut.parameter.dim()))
    if name in _AVERAGED and value.dim() == len(left) - 1:
        left.pop(_AVERAGED[name])
    if value.dim() != len(left):
        return None
    if cut.axis not in left:
        return value
    axis = left.index(cut.axis)
    if value.shape[axis] == 1:
        # averaged over the cut axis, which stays an average over heads of which some are gone
        return value
    others = [size for place, size in enumerate(value.shape) if place != axis]
    expected = [cut.parameter.shape[place] for place in left if place != cut.axis]
    if value.shape[axis] != cut.size or any(a not in (1, b) for a, b in zip(others, expected, strict=True)):
        return None
    return value.index_select(axis, torch.tensor(cut.keep, device=value.device)).contiguous()


def cut_model(
    model: nn.Module,
    cuts: Sequence[Cut],
    counts: Mapping[Site, Counts],
    changed: Sequence[Site],
    optimizer: Any,
    prove: Callable[[], None],
) -> list[ConfigChange]:
    """Cut parameters, set the counts of their modules and configurations, and put all back where that fails.

    Args:
        model: The model.
        cuts: What stays of each parameter.
        counts: What all attentions of the model have afterwards.
        changed: Those of them whose numbers change.
        optimizer: The optimizer whose state is cut too, or None.
        prove: Raises unless the model computes what it should.

    Returns:
        How transformers loads what is of it in the model, or why it cannot.
    """
    undo: list[Callable[[], None]] = []
    try:
        for site in changed:
            for module, sizes in list_counts(site, *counts[site][:2]):
                undo.append(resize(module, sizes))
        undo.extend(cut.apply() for cut in cuts)
        plans = _configure(model, counts, changed, undo)
        prove()
    except BaseException:
        for one in reversed(undo):
            one()
        raise
    for plan in plans:
        set_saving(plan)
    if optimizer is not None:
        cut_states(optimizer, cuts)
    return plans


def _configure(
    model: nn.Module, counts: Mapping[Site, Counts], changed: Sequence[Site], undo: list[Callable[[], None]]
) -> list[ConfigChange]:
    """Write the counts into the configurations that can say them, and note what undoes it.

    Raises:
        LayoutError: None can, and an attention reads its number of heads there.
    """
    plans = [plan_config(stock, counts) for stock in list_stock_models(model)]
    undo.extend(plan.apply() for plan in plans)
    refused = [plan for plan in plans if plan.obstacle is not None]
    even = all(plan.uneven for plan in refused)
    for site in changed if refused else ():
        name = find_configured_count(site)
        if name is not None:
            raise LayoutError(
                f"{site.label} ({type(site.module).__name__}) reads {name} from its configuration at each call, and "
                f"{refused[0].obstacle}; {'leave equally many heads in every layer' if even else 'use hw.ablate'}."
            )
    return plans


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def describe_loading(model: nn.Module, plans: Sequence[ConfigChange]) -> tuple[str | None, str | None]:
    """Return why transformers alone cannot load a model, None where it can, and the code that loads it.

    Both are None for a model that is not of transformers.
    """
    obstacle = next((plan.obstacle for plan in plans if plan.obstacle is not None), None)
    return obstacle, next((plan.loading for plan in plans if plan.model is model), None)
