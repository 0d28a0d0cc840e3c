"""Cutting heads out of a model: out of its parameters, the state of its optimizer, its counts and configuration.

All of these change together, or not at all.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import LayoutError, SettingError
from headwise.heads.heads import Heads, Site, shorten
from headwise.nn.resized import resize, set_data
from headwise.shrinking.neurons import Mlp, name_block
from headwise.shrinking.reload_stock import (
    ConfigChange,
    Counts,
    Width,
    find_configured_count,
    list_counts,
    list_stock_models,
    list_widths,
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
        layer = site.module.get_submodule(owner) if attribute == "weight" else None
        axes = [axis for size, axis in _OUTPUTS if hasattr(layer, size)] or range(parameter.dim())
        axis = next((axis for axis in axes if parameter.shape[axis] in lengths), None)
        if found is None and axis is not None and _may_hold_heads(site, name, parameter):
            guessed.append((name, parameter, axis, "query"))
    return guessed


def _list_parameters(site: Site) -> Iterator[tuple[str, nn.Parameter, tuple[int, str] | None]]:
    """Yield the parameters of a site beside its projections, with axis and kind of what they hold of each head."""
    read = {id(one) for part in site.parts for one in (part.owner._parameters.get(part.attribute), part.bias_parameter)}
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
    """Return axis and kind of a norm with a part for each query or key head; None for one of any head."""
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
    """Whether a parameter of an unknown kind has an axis as long as something of the heads."""
    if _NORM.search(name) or _OTHER_NORM.search(name) or any(f"{part}." in f"{name}." for part in _WITHOUT_HEADS):
        return False
    counts, sizes = {site.num_heads, site.key_value_heads}, _list_sizes(site)
    return bool({*counts, *(count * size for count in counts for size in sizes)} & {*parameter.shape})


# Attributes of Linear, Embedding and GPT-2's Conv1D that hold the size of an axis of `weight`.
_OUTPUTS = (("out_features", 0), ("nf", 1))
_SIZES = (*_OUTPUTS, ("in_features", 1), ("embedding_dim", 1), ("nx", 0))


@dataclass(frozen=True, eq=False)
class Cut:
    """The entries that one parameter loses.

    Attributes:
        name: Its name in the model.
        parameter: The parameter.
        axis: The axis along which entries are removed.
        gone: The entries that are removed; none where a site keeps all of it.
        keep: The entries that stay, in order.
        owners: Each module that holds it, with its attribute name there.
    """

    name: str
    parameter: Tensor
    axis: int = 0
    gone: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()
    owners: tuple[tuple[nn.Module, str], ...] = field(default=(), repr=False)

    def select(self, tensor: Tensor, axis: int | None = None) -> Tensor:
        """Return the entries of a tensor that stay, along the axis of the parameter or another one."""
        axis = self.axis if axis is None else axis
        return tensor.index_select(axis, torch.tensor(self.keep, device=tensor.device)).contiguous()

    def apply(self, undo: ExitStack) -> None:
        """Cut the parameter and its gradient, and have `undo` put them back.

        The parameter stays the same object: what else holds it, such as an optimizer or a tied layer, holds it cut.
        """
        parameter, gradient = self.parameter, self.parameter.grad

        def write(data: Tensor, gradient: Tensor | None) -> None:
            parameter.grad = None
            set_data(parameter, data)
            parameter.grad = gradient

        undo.callback(write, parameter.data, gradient)
        write(self.select(parameter.data), None if gradient is None else self.select(gradient))
        for owner, attribute in self.owners:
            sizes = _SIZES if attribute == "weight" and parameter.dim() == 2 else ()
            held = [name for name, axis in sizes if axis == self.axis and type(getattr(owner, name, None)) is int]
            undo.callback(resize(owner, dict.fromkeys(held, len(self.keep))))


# The heads that each projection of a site loses; "query" and "key" are also what tables and norms lose.
Lost = Mapping[str, Sequence[int]]
KEEPS_ALL: Lost = {"query": (), "key": (), "value": (), "output": ()}


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
        shown = ", ".join(f"{len(heads)} of group {index}" for index, heads in enumerate(left))
        members = f"g * {group} to g * {group} + {group - 1}"
        if site.tiled:
            members = f"g, g + {site.key_value_heads} and so on"
        raise LayoutError(
            f"{site.label}: {group} query heads share a key/value head, and removing heads "
            f"{', '.join(map(str, gone))} would leave {shown}{'' if in_order else ', in another order'}; remove whole "
            f"groups, or equally many heads of each group that stays (group g has heads {members})."
        )
    return {"query": tuple(gone), "key": groups, "value": groups, "output": tuple(gone)}


def collect_cuts(heads: Heads, lost: Mapping[Site, Lost], *, proved: bool, guess: bool = False) -> list[Cut]:
    """Return what each parameter loses when heads are removed from sites; one cut for a tied or fused one.

    Args:
        heads: All sites of the model that were found.
        lost: What each site loses.
        proved: Whether the result is compared with what it should be, so that unknown parameters may stay as they are.
        guess: Whether unknown parameters with an axis as long as something of the query heads are cut along it: gates.

    Raises:
        LayoutError: A parameter is shared by sites that keep different heads, or cannot be cut.
    """
    found: dict[int, Cut] = {}
    for site in heads.found:
        for cut in _list_cuts(site, lost.get(site), proved=proved, guess=guess):
            other = found.setdefault(id(cut.parameter), cut)
            if (other.axis, other.gone) != (cut.axis, cut.gone):
                raise LayoutError(
                    f"{cut.name} is shared by {other.name} of another attention, and the two would keep different "
                    "heads; remove the same heads from both."
                )
    owners: dict[int, list[tuple[nn.Module, str]]] = {key: [] for key, cut in found.items() if cut.gone}
    for module in heads.model.modules():
        for attribute, parameter in module._parameters.items():
            if id(parameter) in owners:
                owners[id(parameter)].append((module, attribute))
    return [replace(found[key], owners=tuple(held)) for key, held in owners.items()]


def _list_cuts(site: Site, lost: Lost | None, *, proved: bool, guess: bool) -> list[Cut]:
    """Return what a site loses of each of its parameters."""
    if lost is None:
        held = [part.owner._parameters.get(part.attribute) for part in site.parts]
        return [Cut(site.label, parameter) for parameter in held if parameter is not None]
    masks: dict[int, tuple[str, Tensor, Tensor]] = {}
    for name, parameter, mask in _mask_parameters(site, lost, proved=proved, guess=guess):
        known = masks.get(id(parameter))
        masks[id(parameter)] = (name, parameter, mask) if known is None else (*known[:2], known[2] | mask)
    return [_read_cut(*masked) for masked in masks.values()]


def _mask_parameters(site: Site, lost: Lost, *, proved: bool, guess: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the parameters of a site, and True at what belongs to the heads that are removed."""
    query, *others = (*site.slices, *(() if site.output is None else (site.output,)))
    if site.layout.endswith("gated"):
        # the gate of a head follows its query
        query = query.map(lambda part: replace(part, head_size=part.stride))
    for view in (query, *others):
        gone = torch.zeros(view.heads, 1, 1, dtype=torch.bool)
        gone[list(lost[view.projection])] = True
        for part, own in zip(view.parts, gone.split([part.heads for part in view.parts]), strict=True):
            parameter, bias = part.parameter, part.bias_parameter
            mask = torch.zeros(parameter.shape, dtype=torch.bool)
            part.of(mask).copy_(own)
            yield part.name, parameter, mask
            if bias is not None:
                mask = torch.zeros(bias.shape, dtype=torch.bool)
                part.bias_view(mask).copy_(own[..., 0])
                yield f"{part.name.rpartition('.')[0]}.{part.bias}", bias, mask
    for name, parameter, axis, units in [*list_beside(site, proved=proved), *(list_guessed(site) if guess else ())]:
        mask = torch.zeros(parameter.shape, dtype=torch.bool)
        count = site.key_value_heads if units == "key" else site.num_heads
        mask.movedim(axis, 0).unflatten(0, (count, -1))[list(lost[units])] = True
        yield name, parameter, mask


def _read_cut(name: str, parameter: Tensor, mask: Tensor) -> Cut:
    """Return the cut along the axis along which a mask is the same everywhere."""
    for axis in range(mask.dim()):
        rows = mask.movedim(axis, 0).reshape(mask.shape[axis], -1)
        gone = rows.any(1)
        if torch.equal(gone, rows.all(1)):
            return Cut(name, parameter, axis, *(tuple(one.nonzero().flatten().tolist()) for one in (gone, ~gone)))
    raise LayoutError(f"{name} holds its heads so that removing some leaves no rectangle; it cannot be cut.")


def cut_neurons(mlps: Mapping[Mlp, Sequence[int]]) -> list[Cut]:
    """Return what each parameter of MLPs loses with the neurons that they lose."""
    cuts = []
    for mlp, gone in mlps.items():
        if not gone:
            continue
        for part in mlp.up:
            rows = mlp.list_rows(gone)
            cuts.append(_cut_axis(part.name, part.read.owner, "weight", part.read.axis, rows))
            if part.read.bias is not None:
                cuts.append(_cut_axis(part.name, part.read.owner, part.read.bias, 0, rows))
        cuts.append(_cut_axis(mlp.down.name, mlp.down.read.owner, "weight", 1 - mlp.down.read.axis, gone))
    return cuts


def _cut_axis(name: str, owner: nn.Module, attribute: str, axis: int, gone: Sequence[int]) -> Cut:
    parameter: Any = owner._parameters[attribute]
    left = sorted({*range(parameter.shape[axis])} - {*gone})
    return Cut(f"{name}.{attribute}", parameter, axis, tuple(gone), tuple(left), ((owner, attribute),))


# Factored statistics of transformers' Adafactor, and the axis of the parameter over which each is averaged.
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


def _cut_states(optimizer: Any, cuts: Sequence[Cut]) -> None:
    """Cut the state of each parameter as the parameter was; what cannot be cut is dropped, with a warning.

    Moments shaped like the parameter keep the entries that stay; a step count stays as it is; averages over an axis
    (Adafactor) keep their entries along the cut axis.
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
    """Return one value of a state after the cut; None if it cannot be cut."""
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
    if value.shape[axis] != len(cut.keep) + len(cut.gone) or any(
        a not in (1, b) for a, b in zip(others, expected, strict=True)
    ):
        return None
    return cut.select(value, axis)


def cut_model(
    heads: Heads,
    cuts: Sequence[Cut],
    lost: Mapping[Site, Lost],
    optimizer: Any,
    prove: Callable[[], None],
    *,
    neurons: Mapping[Mlp, Sequence[int]] | None = None,
    undone_by: ExitStack | None = None,
) -> tuple[tuple[int, int], str | None, str | None]:
    """Cut parameters, set the counts of their modules and configurations, and put all back where that fails.

    Args:
        heads: All sites of the model.
        cuts: What each parameter loses.
        lost: What each changed site loses.
        optimizer: The optimizer whose state is cut too, or None.
        prove: Raises unless the model computes what it should.
        neurons: The hidden neurons that MLPs lose, none where one is known and loses none.
        undone_by: What puts everything back where the cut is for a while; None for one that stays.

    Returns:
        The numbers of parameters before and after (tied ones once), why transformers alone cannot load the model, and
        the code that loads it. Both are None for a model that is not of transformers.

    Raises:
        LayoutError: No configuration says what is left, and an attention reads its number of heads there.
    """
    model = heads.model
    before = _count_parameters(model)
    counts = {site.module: count_left(site, lost.get(site, KEEPS_ALL)) for site in heads.found}
    neurons = neurons or {}
    widths = _list_widths(heads, neurons)
    with ExitStack() as undo:
        for site in lost:
            for module, sizes in list_counts(site, *counts[site.module][:2]):
                undo.callback(resize(module, sizes))
        for cut in cuts:
            cut.apply(undo)
        for module, sizes in list_widths(model, neurons):
            undo.callback(resize(module, sizes))
        plans = [plan_config(stock, counts, widths) for stock in list_stock_models(model)]
        for plan in plans:
            undo.callback(plan.apply())
        refused = [plan for plan in plans if plan.obstacle is not None]
        if refused:
            _require_own_counts(lost, refused)
        prove()
        (undone_by or ExitStack()).push(undo.pop_all())
    for plan in plans if undone_by is None else ():
        set_saving(plan)
    if optimizer is not None:
        _cut_states(optimizer, cuts)
    loading = next((plan.loading for plan in plans if plan.model is model), None)
    return (before, _count_parameters(model)), refused[0].obstacle if refused else None, loading


def _require_own_counts(lost: Iterable[Site], refused: Sequence[ConfigChange]) -> None:
    """Raise `LayoutError` where an attention reads its counts from a configuration that cannot say them."""
    for site in lost:
        name = find_configured_count(site.module)
        if name is not None:
            even = all(plan.uneven for plan in refused)
            raise LayoutError(
                f"{site.label} ({type(site.module).__name__}) reads {name} from its configuration at each call, "
                f"and {refused[0].obstacle}; "
                f"{'leave equally many heads in every layer' if even else 'use hw.ablate'}."
            )


def _list_widths(heads: Heads, neurons: Mapping[Mlp, Sequence[int]]) -> dict[nn.Module, set[Width]]:
    """Return the hidden neurons before and after of the MLPs beside each attention, by the module of that."""
    return {
        site.module: {
            (mlp.neurons, mlp.neurons - len(gone)) for mlp, gone in neurons.items() if mlp.block == name_block(site)
        }
        for site in heads.found
    }


def count_left(site: Site, lost: Lost) -> Counts:
    """Return how many query and key/value heads a site has without some, and their size."""
    return site.num_heads - len(lost["query"]), site.key_value_heads - len(lost["key"]), site.slices[0].head_size


def _count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def list_lines(title: str, rows: Sequence[str], room: int, stock: str | None, loading: str | None) -> list[str]:
    """Return a title, at most `room` rows about attentions, and how to load the model."""
    first, left_out, last = shorten(rows, room)
    middle = [f"  ... {left_out} more attentions ..."] if left_out else []
    loaded = [] if stock is None else [f"saved for hw.load, as transformers cannot load it: {stock}"]
    if stock is None and loading is not None and "=" in loading:
        loaded = [f"loaded by {loading}"]
    return [title, *first, *middle, *last, *loaded]
