"""Whether transformers alone can load a model with fewer heads: whether a configuration says what it has.

Where an attention counts its heads: integer attributes of its modules, which follow when heads are removed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headwise.heads.heads import Site
from headwise.heads.layouts.steps import HEAD_SIZE, KEY_COUNTS, NUM_HEADS, RATIOS, list_functions
from headwise.nn.resized import GROUPS, forget_sizes
from headwise.routing.save import SavePretrained, find_aggregators
from headwise.routing.saved import find_arguments, list_tensors
from headwise.shrinking.neurons import Mlp

QUERY_COUNTS = (*NUM_HEADS, "num_query_heads", "encoder_attention_heads", "decoder_attention_heads", "attention_heads")
# The width of all heads together.
WIDTHS = ("all_head_size", "inner_dim", "split_size", "attn_dim")
HEAD_SIZES = (*HEAD_SIZE, "d_kv")
# Hidden neurons of the MLPs, in modules and configurations.
NEURON_COUNTS = (
    *("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "d_inner"),
    *("hidden_dim", "ffn_hidden_size", "inner_dim", "hidden_features"),
)
# Those that a configuration may leave out, for a multiple of the width of the model.
_LEFT_OUT = ("n_inner", "ffn_hidden_size")
# Hidden neurons before and after.
Width = tuple[int, int]


_KINDS = {
    **dict.fromkeys(QUERY_COUNTS, "query"),
    **dict.fromkeys(KEY_COUNTS, "key"),
    **dict.fromkeys(RATIOS, "ratio"),
    **dict.fromkeys(WIDTHS, "width"),
}


def list_counts(site: Site, heads: int, groups: int) -> Iterator[tuple[nn.Module, dict[str, int]]]:
    """Yield the modules of a site that count heads, and their attributes when `heads` in `groups` are left."""
    sizes = sorted({head_slice.head_size for head_slice in site.slices})

    def count(heads: int, groups: int) -> dict[str, list[int]]:
        widths = [heads * size for size in sizes]
        return {"query": [heads], "key": [groups], "ratio": [heads // groups], "width": widths}

    now, new = count(site.num_heads, site.key_value_heads), count(heads, groups)
    joins = mentions(site.module, "embed_dim") and not isinstance(site.module, nn.MultiheadAttention)
    for module in site.module.modules():
        changed = {}
        for name, value in vars(module).items():
            kind = "width" if name == "embed_dim" and joins and module is site.module else _KINDS.get(name)
            if kind is not None and type(value) is int and value in now[kind]:
                changed[name] = new[kind][now[kind].index(value)]
        changed = {name: value for name, value in changed.items() if value != getattr(module, name)}
        if changed:
            yield module, changed
    if groups < heads and not counts_groups(site):
        # the attention functions of transformers ask every module for it
        yield site.module, {GROUPS: heads // groups}


def list_widths(model: nn.Module, neurons: Mapping[Mlp, Sequence[int]]) -> Iterator[tuple[nn.Module, dict[str, int]]]:
    """Yield the modules that count the hidden neurons of an MLP, and their attributes without some of them."""
    for mlp, gone in neurons.items():
        holder = model.get_submodule(mlp.name)
        held = [name for name in NEURON_COUNTS if gone and vars(holder).get(name) == mlp.neurons]
        if held:
            yield holder, dict.fromkeys(held, mlp.neurons - len(gone))


def counts_groups(site: Site) -> bool:
    """Whether a module of a site counts key/value heads apart from query heads."""
    return any(
        type(vars(module).get(name)) is int for module in site.module.modules() for name in (*RATIOS, *KEY_COUNTS)
    )


def find_configured_count(module: nn.Module) -> str | None:
    """Return the number of heads that the forward of a module reads from its configuration at each call, if it does."""
    config = getattr(module, "config", None)
    counts = [name for name in (*QUERY_COUNTS, *KEY_COUNTS) if mentions(module, name) and name not in vars(module)]
    return next((name for name in counts if mentions(module, "config") and hasattr(config, name)), None)


def mentions(module: nn.Module, name: str) -> bool:
    """Whether the code of a module's class has a name in it."""
    return any(name in function.__code__.co_names for function in list_functions(module))


# (query heads, key/value heads, head size) of an attention.
Counts = tuple[int, int, int]
COUNTED = "number of heads", "number of key/value heads", "head size"


def list_stock_models(model: nn.Module) -> list[nn.Module]:
    """Return the outermost models of transformers in a model."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        stock = type(module).__module__.startswith("transformers.") and hasattr(type(module), "from_pretrained")
        if stock and id(module) not in inside:
            found.append(module)
            inside |= {id(part) for part in module.modules()}
    return found


@dataclass(frozen=True)
class ConfigChange:
    """What the configuration of a model must say so that transformers alone builds it.

    Attributes:
        model: The model.
        changes: Each part of the configuration that changes, with its new values.
        obstacle: Why no configuration says it; None where one does.
        arguments: What its class must be given beside the configuration.
        uneven: Whether the obstacle is that layers have different numbers of heads.
    """

    model: nn.Module = field(repr=False)
    changes: tuple[tuple[Any, dict[str, int]], ...] = ()
    obstacle: str | None = None
    arguments: Mapping[str, bool] = field(default_factory=dict)
    uneven: bool = False

    @property
    def loading(self) -> str:
        """The code that loads the model from the folder that its `save_pretrained` wrote."""
        if self.obstacle is not None:
            return "hw.load(folder)"
        given = "".join(f", {name}={value}" for name, value in self.arguments.items())
        return f"transformers.{type(self.model).__name__}.from_pretrained(folder{given})"

    def apply(self) -> Callable[[], None]:
        """Write the values, and return what puts the old ones back."""
        before = [(part, {name: getattr(part, name, None) for name in values}) for part, values in self.changes]
        for part, values in self.changes:
            _assign(part, values)

        def undo() -> None:
            for part, values in before:
                # in the reverse order, as a count is checked against the head size
                _assign(part, dict(reversed(values.items())))

        return undo


def plan_config(
    model: nn.Module, counts: Mapping[nn.Module, Counts], widths: Mapping[nn.Module, set[Width]]
) -> ConfigChange:
    """Return how the configuration of a stock model says how many heads and neurons it has, or why none does.

    A model is built from the changed configuration, without memory for its weights, and compared with this one.

    Args:
        model: A model of transformers whose heads were removed.
        counts: The counts of all its attentions, as they are now.
        widths: The hidden neurons before and now of the MLPs beside an attention, by the module of that.
    """
    config: Any = getattr(model, "config", None)
    uneven, changes, arguments = None, [], {}
    changed = copy.deepcopy(config)
    try:
        for place, part, modules in _group(config, [module for module in model.modules() if module in counts]):
            held = [sorted(set(numbers)) for numbers in zip(*(counts[module] for module in modules), strict=True)]
            for what, one in zip(COUNTED, held, strict=True):
                if len(one) > 1 and uneven is None:
                    shown = ", ".join(map(str, one))
                    uneven = f"its configuration holds one {what} for all layers, and they have {shown}"
            # a configuration that differs by layer raises at what it has no single number of
            values = _change(part, [one[0] if len(one) == 1 else None for one in held])
            neurons = sorted({width for module in modules for width in widths.get(module, ())})
            if len(neurons) > 1 and uneven is None:
                shown = ", ".join(str(after) for _, after in neurons)
                uneven = f"its configuration holds one number of hidden neurons for all layers, and they have {shown}"
            elif len(neurons) == 1:
                values |= _change_neurons(part, *neurons[0])
            changes.append((part, values))
            _assign(_list_parts(changed)[place], changes[-1][1])
        changed = type(changed).from_dict(changed.to_dict())
        build: Any = type(model)
        arguments = find_arguments(build, list_tensors(model), lambda given: build(copy.deepcopy(changed), **given))
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            built = build(changed, **arguments)
        different = _find_difference(model, built, counts)
        refused = None if different is None else f"the sizes of {different} do not follow from its configuration"
    except Exception as error:
        # a configuration class may raise anything at a size that it does not take
        reason = " ".join(str(error).split())[:160]
        refused = f"its configuration class refuses these numbers ({type(error).__name__}: {reason})"
    if refused is not None:
        return ConfigChange(model, obstacle=uneven or refused, uneven=uneven is not None)
    return ConfigChange(model, tuple(changes), arguments=arguments)


def set_saving(plan: ConfigChange) -> None:
    """Have `save_pretrained` of a model write what can be loaded: by transformers, or by `hw.load`."""
    model = plan.model
    if plan.obstacle is None:
        forget_sizes(model)
        if not find_aggregators(model):
            vars(model).pop("save_pretrained", None)
    else:
        # the original method would write a folder that transformers may load with new weights in the place of these
        vars(model)["save_pretrained"] = SavePretrained(model)


def _group(config: Any, modules: Sequence[nn.Module]) -> Iterator[tuple[int, Any, list[nn.Module]]]:
    """Yield the parts of a configuration that describe attentions: place in `_list_parts`, part and attentions."""
    parts = _list_parts(config)
    known = {id(part) for part in parts}
    held = [getattr(module, "config", None) for module in modules]
    owners = [one if id(one) in known else config for one in held]
    for place, part in enumerate(parts):
        own = [module for module, owner in zip(modules, owners, strict=True) if owner is part]
        if own:
            yield place, part, own


def _list_parts(config: Any) -> list[Any]:
    children = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {}]
    return [config, *(part for child in children if child is not None for part in _list_parts(child))]


def _change(config: Any, counts: Sequence[int | None]) -> dict[str, int]:
    """Return the values of a configuration that change, the head size first: counts are checked against it.

    A count is None where layers differ: some configurations have a number for each kind of layer.
    """
    known = {*config.to_dict(), *getattr(config, "attribute_map", {})}
    heads, groups, size = counts
    # a head size left out is the width divided by the heads, which would now be another; some classes know it by this
    # name without an attribute
    sizes = [name for name in HEAD_SIZES if name in known] or ["head_dim"]
    values = {name: size for name in sizes if size is not None and getattr(config, name, None) is None}
    for names, count in ((KEY_COUNTS, groups), (QUERY_COUNTS, heads)):
        if count is None:
            continue
        every = [f"{stack}{name}" for stack in ("", "encoder_", "decoder_") for name in names]
        values |= {name: count for name in every if name in known and getattr(config, name, None) != count}
    return values


def _change_neurons(config: Any, before: int, after: int) -> dict[str, int]:
    """Return the values of a configuration that change with the hidden neurons of its MLPs."""
    known = {*config.to_dict(), *getattr(config, "attribute_map", {})}
    held = {name: getattr(config, name, None) for name in NEURON_COUNTS if name in known}
    return {
        name: after
        for name, value in held.items()
        if after != before and (value == before or (value is None and name in _LEFT_OUT))
    }


def _assign(config: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(config, name, value)


def _find_difference(model: nn.Module, built: nn.Module, counts: Mapping[nn.Module, Counts]) -> str | None:
    """Return the name of something that differs between a model and one built anew."""
    own, new = list_tensors(model), list_tensors(built)
    if own != new:
        return next(name for name in (*own, *new) if own.get(name) != new.get(name))
    others = dict(built.named_modules())
    attentions = [(name, module) for name, module in model.named_modules() if module in counts]
    return next((name for name, module in attentions if _read_numbers(module) != _read_numbers(others[name])), None)


def _read_numbers(module: nn.Module) -> dict[str, float]:
    """Return the numbers that a module holds: its counts and sizes, and the scale of its scores."""
    return {name: value for name, value in vars(module).items() if type(value) in (int, float)}
