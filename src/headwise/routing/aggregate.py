"""`aggregate`: replace the output projections of a model by aggregators, with a handle that undoes it."""

from dataclasses import dataclass

from torch import Tensor, nn

from headwise.errors import HeadwiseError, LayoutError
from headwise.heads.head_slice import OutputProjection
from headwise.heads.heads import Heads, Site, require_heads
from headwise.parallel import is_sharded
from headwise.routing.modules import Aggregator, Gate, Residual, Setting, build, require_setting
from headwise.routing.save import SavePretrained, find_aggregators


@dataclass(frozen=True)
class Replaced:
    """An attention whose output projection was replaced: its name, the projection's place, and both modules."""

    name: str
    output_projection: OutputProjection
    old: nn.Module
    new: Aggregator


class Aggregation:
    """The aggregators that `aggregate` put into a model; printing it lists them.

    Attributes:
        setting: What they were built from.
        replaced: The replaced output projections, in the order of the heads.
    """

    def __init__(self, model: nn.Module, setting: Setting, replaced: tuple[Replaced, ...]) -> None:
        self.model, self.setting, self.replaced = model, setting, replaced

    def remove(self) -> None:
        """Put the old output modules back; the aggregators' parameters leave the model.

        Raises:
            HeadwiseError: An attention no longer has its aggregator, for example because remove() was called before.
                Nothing is changed then.
        """
        for site in self.replaced:
            if site.output_projection.module is not site.new:
                raise HeadwiseError(
                    f"{site.name}: the output module is now a {type(site.output_projection.module).__name__}, not the "
                    f"{type(site.new).__name__} of aggregate(): it was removed or replaced before. Call remove() once, "
                    "and on the latest handle first."
                )
        for site in self.replaced:
            setattr(site.output_projection.owner, site.output_projection.attribute, site.old)
        for module in _find_saving_models(self.model):
            if not find_aggregators(module):
                vars(module).pop("save_pretrained", None)

    def __str__(self) -> str:
        rows = [
            f"  {site.name or '(model)'}: {site.output_projection.attribute} is {type(site.new).__name__}, "
            f"{_count_parameters(site.new):,} parameters instead of {_count_parameters(site.old):,}"
            for site in self.replaced
        ]
        return "\n".join([f"{self.setting} in {len(self.replaced)} attentions", *rows])

    __repr__ = __str__


def aggregate(heads: Heads, setting: Setting) -> Aggregation:
    """Replace the output projection of each attention by an aggregator, and return a handle that undoes it.

    Each attention gets separate weights, with the device and dtype of the projection they replace. Build the optimizer
    afterwards: an optimizer built before does not hold the new parameters and would never train them. The same is true
    of DistributedDataParallel and `fully_shard`, which exchange gradients of the parameters they find. After
    `parallelize_module` of query, key and value only, every process aggregates all heads.

    From then on `save_pretrained` of a transformers model does what `headwise.save` does: it writes a folder for
    `headwise.load`, which plain transformers refuses. This holds for `heads.model` and the models inside it, so find
    the heads in the model you will save, not in a part of it.

    Args:
        heads: The attentions, from `find_heads`.
        setting: `SimpleRouting`, `EMRouting`, `Trunk`, `Residual` of one of them, or `Gate`.

    Returns:
        The handle; printing it lists the attentions.

    Raises:
        SettingError: `heads` or `setting` is something else, or its capsules do not divide the width of an attention.
        LayoutError: There is no attention, its output projection was not found or is already an aggregator, two
            attentions share one, or the model is wrapped by an engine that would not train an aggregator. Nothing is
            replaced then.
    """
    require_heads(heads)
    require_setting(setting)
    sites = tuple(heads.sites)
    if not sites:
        raise LayoutError("aggregate was given no attention; expected at least one from find_heads.")
    places: set[tuple[int, str]] = set()
    replaced = []
    for site in sites:
        output_projection = site.expose()
        old = output_projection.module
        if isinstance(old, Aggregator):
            raise LayoutError(
                f"{site.label} already has a {type(old).__name__} as its output; "
                "call remove() on the handle of the first aggregate() before a second one."
            )
        if (id(output_projection.owner), output_projection.attribute) in places:
            raise LayoutError(
                f"{site.label} shares its output projection with another selected attention; aggregators "
                "are not shared, so select one of the two."
            )
        places.add((id(output_projection.owner), output_projection.attribute))
        _require_unwrapped(heads, site, old, keeps=isinstance(setting, Residual | Gate))
        projection = old if isinstance(setting, Residual | Gate) else None
        new = build(setting, site.num_heads, site.head_size, site.width, projection)
        if site.divided:
            new.register_forward_pre_hook(_GatherHeads(site))
        replaced.append(Replaced(site.name, output_projection, old, _match_placement(new, old)))
    for place in replaced:
        setattr(place.output_projection.owner, place.output_projection.attribute, place.new)
    for module in _find_saving_models(heads.model):
        if find_aggregators(module):
            # the original method would write a folder that loads without the aggregators, with only a warning
            vars(module)["save_pretrained"] = SavePretrained(module)
    return Aggregation(heads.model, setting, tuple(replaced))


class _GatherHeads:
    """A forward pre-hook that gathers the heads which tensor parallelism computes in other processes."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def __call__(self, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.site.gather_heads(args[0], -1, self.site.num_heads * self.site.head_size), *args[1:])


def _require_unwrapped(heads: Heads, site: Site, old: nn.Module, *, keeps: bool) -> None:
    """Raise `LayoutError` if each process would train the parameters of an aggregator separately."""
    name = site.label
    if heads.replicated or getattr(old, "_is_fsdp_managed_module", False):
        engine = "DistributedDataParallel" if heads.replicated else "FSDP"
        raise LayoutError(
            f"{name}: the model is wrapped by {engine}, which exchanges no gradients of parameters added later, so "
            "each process would train a different aggregator; call hw.aggregate first and wrap the model afterwards."
        )
    if keeps and any(is_sharded(parameter) for parameter in old.parameters()):
        raise LayoutError(
            f"{name}: its output projection is divided by tensor parallelism, and this aggregator gives it all heads; "
            "leave it out of the plan of parallelize_module."
        )


def _find_saving_models(model: nn.Module) -> list[nn.Module]:
    """Return the modules with a method `save_pretrained`: transformers models, and models inside them."""
    return [module for module in model.modules() if callable(getattr(type(module), "save_pretrained", None))]


def _match_placement(new: Aggregator, old: nn.Module) -> Aggregator:
    parameter = next(old.parameters(), None)
    if parameter is not None:
        new = new.to(device=parameter.device, dtype=parameter.dtype)
    return new.train(old.training)


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
