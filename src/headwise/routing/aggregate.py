"""`aggregate`: replace the output projections of a model by aggregators, with a handle that undoes it.

In models of peft aggregators are trained and saved with an adapter, as its `modules_to_save` are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from headwise.errors import HeadwiseError, LayoutError, NotFired
from headwise.heads.adapters import get_called, has_peft, is_peft_layer
from headwise.heads.heads import LINES, Heads, Site, require_heads, shorten
from headwise.heads.layouts.functional import hands_output
from headwise.heads.method import Method, Stage
from headwise.heads.scores.mixing import RequireTrained, match_placement, require_unwrapped, was_called
from headwise.heads.view import OutputProjection, is_sharded
from headwise.nn.hooks import Handle
from headwise.routing.modules import Aggregator, Gate, Residual, Setting, build, require_setting
from headwise.routing.save import SavePretrained, is_changed, set_saving


def find_adapter(model: nn.Module) -> tuple[Any, str]:
    """Return the configuration of the adapter that a model trains, and its name.

    Raises:
        LayoutError: The model is a part of a peft model, or several adapters are active, or none.
    """
    configs: Any = next((module.peft_config for module in model.modules() if hasattr(module, "peft_config")), None)
    if configs is None:
        raise LayoutError(
            f"{type(model).__name__} holds adapters of peft, and is not the model that peft returned, where the names "
            "of the aggregators must be kept; find the heads in that: hw.find_heads(peft_model)."
        )
    layers: list[Any] = [module for module in model.modules() if is_peft_layer(module)]
    active = list(layers[0].active_adapters) if layers else list(configs)
    if len(active) != 1:
        raise LayoutError(
            f"{len(active)} adapters are active ({', '.join(active) or 'none'}), and an aggregator is trained and "
            "saved with one; choose it with set_adapter(name) before hw.aggregate."
        )
    return configs[active[0]], active[0]


def _require_replaceable(heads: Heads, site: Site, old: nn.Module, *, keeps: bool) -> None:
    """Raise `LayoutError` where W_O is not what the heads reach first, is not called, or belongs to an adapter."""
    if is_peft_layer(old) or is_peft_layer(site.output_projection.owner if site.output_projection else old):
        raise LayoutError(
            f"{site.label}: its output projection has an adapter of its own, which an aggregator would leave without "
            "a use; leave it out of target_modules (peft adapts that of nn.MultiheadAttention with the attention)."
        )
    if isinstance(getattr(old, "modules_to_save", None), nn.ModuleDict):
        raise LayoutError(
            f"{site.label}: peft trains a copy of its output projection (modules_to_save), which an aggregator would "
            "replace; leave it out of modules_to_save."
        )
    if hands_output(site):
        raise LayoutError(
            f"{site.label} ({type(site.module).__name__}) hands the weight of its output projection to a "
            "function instead of calling it, so no aggregator can take its place."
        )
    parameters = list(old.parameters())
    norm = bool(parameters) and all(parameter.dim() == 1 for parameter in parameters)
    if site.output is None and not keeps and norm:
        raise LayoutError(
            f"{site.label}: its heads pass a {type(old).__name__} before W_O, which an aggregator in that place "
            "would leave as it is; use hw.routing.Residual(...) or hw.routing.Gate(), which keep both."
        )
    require_unwrapped(heads, site, old, "an aggregator", "hw.aggregate")
    if keeps and any(is_sharded(parameter) for parameter in old.parameters()):
        raise LayoutError(
            f"{site.label}: its output projection is divided by tensor parallelism, and this aggregator gives it all "
            "heads; leave it out of the plan of parallelize_module."
        )


# What peft puts before the name of a module.
BASE = "base_model.model."


@dataclass(frozen=True)
class Replaced:
    """An attention by name whose output projection `old` was replaced by the aggregator `new`.

    `placed` is the module at that place now: the aggregator, under peft in its wrapper of modules to save; `path` is
    the name of the place in the model.
    """

    name: str
    output_projection: OutputProjection
    old: nn.Module = field(repr=False)
    new: Aggregator = field(repr=False)
    placed: nn.Module = field(repr=False)
    path: str = ""


class Aggregation(Handle):
    """The aggregators in a model, until `remove()` or the end of a `with` block; returned by `aggregate`.

    Printing it lists them.

    Attributes:
        setting: What they were built from.
        replaced: The replaced output projections, in the order of the heads.
    """

    def __init__(
        self,
        model: nn.Module,
        setting: Setting,
        replaced: tuple[Replaced, ...],
        adapter: Any = None,
        undo: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.setting, self.replaced, self._adapter = model, setting, replaced, adapter
        self._removers += [*([] if undo is None else [undo]), self._put_back]

    @property
    def added(self) -> tuple[nn.Module, ...]:
        """The aggregators."""
        return tuple(site.new for site in self.replaced)

    def check(self) -> None:
        """Raise `NotFired` unless every aggregator was called."""
        silent = [site.name or "the model" for site in self.replaced if not was_called(site.new)]
        if silent:
            raise NotFired(
                f"the aggregators of {len(silent)} of {len(self.replaced)} attentions were never called: "
                f"{', '.join(silent[:6])}. Run a forward pass of the model that they are in, not of a copy."
            )

    def remove(self) -> None:
        """Put the old output modules back; the aggregators' parameters leave the model. A second time does nothing.

        Raises:
            HeadwiseError: An attention no longer has its aggregator: something replaced it since. Nothing is changed
                then.
        """
        for site in self.replaced if self.attached else ():
            if site.output_projection.module is not site.placed:
                raise HeadwiseError(
                    f"{site.name}: the output module is now a {type(site.output_projection.module).__name__}, not the "
                    f"{type(site.new).__name__} of aggregate(): it was replaced since. Put the "
                    f"{type(site.new).__name__} back, and call remove() again."
                )
        super().remove()

    def _put_back(self) -> None:
        for site in self.replaced:
            setattr(site.output_projection.owner, site.output_projection.attribute, site.old)
        if self._adapter is not None:
            removed = {site.path for site in self.replaced}
            left = [name for name in self._adapter.modules_to_save or () if name not in removed]
            self._adapter.modules_to_save = left or None
        for module in self.model.modules():
            own = vars(module).get("save_pretrained")
            if isinstance(own, SavePretrained) and not is_changed(module):
                del vars(module)["save_pretrained"]
                vars(module).update({} if own.before is None else {"save_pretrained": own.before})

    def __str__(self) -> str:
        def count(module: nn.Module) -> int:
            return sum(parameter.numel() for parameter in module.parameters())

        rows = [
            f"  {site.name or '(model)'}: {site.output_projection.attribute} is {type(site.new).__name__}, "
            f"{count(site.new):,} parameters instead of {count(site.old):,}"
            for site in self.replaced
        ]
        first, left_out, last = shorten(rows, LINES - 1)
        middle = [f"  ... {left_out} more attentions ..."] if left_out else []
        return "\n".join([f"{self.setting} in {len(self.replaced)} attentions", *first, *middle, *last])

    __repr__ = __str__


@dataclass(frozen=True)
class Aggregate(Method):
    """An aggregator instead of the output projection: `aggregate`, as a value.

    Attributes:
        setting: Setting of the aggregator.

    Raises:
        SettingError: `setting` is something else; or as of `Method`.

    Example:
        >>> import headwise as hw
        >>> Aggregate(hw.routing.EMRouting(iterations=2), layers=(0, 1)).setting.iterations
        2
    """

    setting: Setting
    stage: ClassVar[Stage] = "build"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self.setting)

    def attach(self, heads: Heads) -> Aggregation:
        """Put the aggregators into the model whose heads these are; errors as of `aggregate`."""
        return aggregate(self.select(heads), self.setting)


def aggregate(heads: Heads, setting: Setting) -> Aggregation:
    """Replace the output projection of each attention by an aggregator, and return a handle that undoes it.

    Each attention gets separate weights, with the device and dtype of the projection they replace. Build the optimizer
    afterwards: an optimizer built before does not hold the new parameters and would never train them. The same is true
    of DistributedDataParallel and `fully_shard`, which exchange gradients of the parameters they find. After
    `parallelize_module` of query, key and value only, every process aggregates all heads.

    From then on `save_pretrained` of a transformers model does what `headwise.save` does: it writes a folder for
    `headwise.load`, which plain transformers refuses. This holds for `heads.model` and the models inside it, so find
    the heads in the model you will save, not in a part of it.

    In a model of peft the aggregators belong to the active adapter, as its `modules_to_save` do: they are trained and
    saved with it, and without it the old projection is called. To load them, call `aggregate` on the base model, then
    `PeftModel.from_pretrained`.

    Args:
        heads: The attentions, from `find_heads`.
        setting: `SimpleRouting`, `EMRouting`, `Trunk`, `Residual` of one of them, or `Gate`.

    Returns:
        The handle; printing it lists the attentions.

    Raises:
        SettingError: `heads` or `setting` is something else, or its capsules do not divide the width of an attention.
        LayoutError: There is no attention, its output projection was not found, is already an aggregator or has an
            adapter, two attentions share one, or the model is wrapped by an engine that would not train an aggregator.
            Nothing is replaced then.
    """
    require_heads(heads)
    require_setting(setting)
    sites = tuple(heads.sites)
    if not sites:
        raise LayoutError("aggregate was given no attention; expected at least one from find_heads.")
    config, adapter = find_adapter(heads.model) if has_peft(heads.model) else (None, None)
    names = {id(module): name for name, module in heads.model.named_modules()}
    places: set[tuple[int, str]] = set()
    replaced = []
    with ExitStack() as undo:
        for site in sites:
            output_projection = site.expose(undo.callback)
            called = get_called(output_projection.module)
            if isinstance(called, Aggregator):
                raise LayoutError(
                    f"{site.label} already has {type(called).__name__} as its output; "
                    "call remove() on the handle of the first aggregate() before a second one. A copy keeps the "
                    "aggregators of its model: remove() them before it is copied."
                )
            if (id(output_projection.owner), output_projection.attribute) in places:
                raise LayoutError(
                    f"{site.label} shares its output projection with another selected attention; aggregators "
                    "are not shared, so select one of the two."
                )
            places.add((id(output_projection.owner), output_projection.attribute))
            _require_replaceable(heads, site, output_projection.module, keeps=isinstance(setting, Residual | Gate))
            replaced.append(_build(site, output_projection, setting, names[id(output_projection.owner)], adapter))
        for place in replaced:
            setattr(place.output_projection.owner, place.output_projection.attribute, place.placed)
        if config is not None:
            # what peft saves with an adapter, and looks for when it loads it
            config.modules_to_save = [*(config.modules_to_save or ()), *(place.path for place in replaced)]
        set_saving(heads.model)
        return Aggregation(heads.model, setting, tuple(replaced), config, undo.pop_all().close)


def _build(
    site: Site, output_projection: OutputProjection, setting: Setting, owner: str, adapter: str | None
) -> Replaced:
    """Build what replaces the output projection of an attention, whose owner has this name in the model."""
    old = output_projection.module
    projection = old if isinstance(setting, Residual | Gate) else None
    new = build(setting, site.num_heads, site.head_size, site.width, projection)
    if site.divided:
        new.register_forward_pre_hook(_GatherHeads(site))
    new = placed = match_placement(new, old).train(old.training)
    if adapter is not None:
        from peft.utils import ModulesToSaveWrapper

        # calls the aggregator while its adapter is active, and else the projection
        wrapper: Any = ModulesToSaveWrapper(old, adapter)
        # a projection that the aggregator keeps is trained with it, and the wrapper's own stays as it is
        wrapper.modules_to_save[adapter] = copy.deepcopy(new)
        # also makes its parameters trainable
        wrapper.set_adapter(adapter)
        placed, new = wrapper, wrapper.modules_to_save[adapter]
    path = f"{owner}.{output_projection.attribute}" if owner else output_projection.attribute
    path = path.removeprefix(BASE)
    RequireTrained(path, "aggregator", "or call hw.aggregate after get_peft_model").watch(new)
    return Replaced(site.name, output_projection, old, new, placed, path)


@dataclass(frozen=True, eq=False)
class _GatherHeads:
    """A forward pre-hook that gathers the heads which tensor parallelism computes in other processes."""

    site: Site

    def __call__(self, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.site.gather_heads(args[0], -1, self.site.num_heads * self.site.head_size), *args[1:])
