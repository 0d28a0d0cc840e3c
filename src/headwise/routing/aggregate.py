"""Aggregation of the heads of a model by routing, in the place of its output projections.

Owns `aggregate`, which puts the modules of `aggregators` into a model, and the handle that takes them out.
Must not know how sites are found nor how votes are routed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from headwise.errors import HeadwiseError, LayoutError
from headwise.heads.head_slice import OutputProjection
from headwise.heads.heads import Heads, require_heads
from headwise.heads.site import Site
from headwise.parallel import is_sharded
from headwise.routing.modules import Aggregator, Gate, Residual, Setting, build, require_setting
from headwise.routing.save import SavePretrained, aggregators_of


@dataclass(frozen=True)
class Replaced:
    """One site whose output projection was replaced: its name, place, and both modules."""

    name: str
    output_projection: OutputProjection
    old: nn.Module
    new: Aggregator


class Aggregation:
    """The aggregators `aggregate` put into a model; printable.

    Attributes:
        setting: What they were built from.
        replaced: The sites, in the order of the heads given.
    """

    def __init__(self, model: nn.Module, setting: Setting, replaced: tuple[Replaced, ...]) -> None:
        self.model, self.setting, self.replaced = model, setting, replaced

    def remove(self) -> None:
        """Put the old output modules back; the aggregators' parameters leave the model.

        Raises:
            HeadwiseError: A site no longer holds the aggregator put there, for example after a first removal;
                nothing is changed then.
        """
        for site in self.replaced:
            if site.output_projection.module is not site.new:
                raise HeadwiseError(
                    f"{site.name}: the output module is now a {type(site.output_projection.module).__name__}, not the "
                    f"{type(site.new).__name__} put there by aggregate(); it was removed or replaced before."
                )
        for site in self.replaced:
            setattr(site.output_projection.owner, site.output_projection.attribute, site.old)
        for module in _saved_by_itself(self.model):
            if not aggregators_of(module):
                vars(module).pop("save_pretrained", None)

    def __str__(self) -> str:
        rows = [
            f"  {site.name or '(model)'}: {site.output_projection.attribute} is {type(site.new).__name__}, "
            f"{_parameter_count(site.new):,} parameters instead of {_parameter_count(site.old):,}"
            for site in self.replaced
        ]
        return "\n".join([f"{self.setting} in {len(self.replaced)} sites", *rows])

    __repr__ = __str__


def aggregate(heads: Heads, setting: Setting) -> Aggregation:
    """Put an aggregator in the place of the output projection of each site, and return the handle that undoes it.

    Each site gets weights of its own, with the device and dtype of the projection it replaces. Build the
    optimizer afterwards: one built before does not hold the new parameters and would never train them. So it is with
    DistributedDataParallel and `fully_shard`, which exchange gradients of the parameters they find. After
    `parallelize_module`, of query, key and value alone, every process aggregates all heads.

    A model of transformers saves itself from then on in a folder for `headwise.load`, which plain transformers refuses:
    `save_pretrained` does what `headwise.save` does. That holds for `heads.model` and models inside it, so find the
    heads in the model you will save, not in a part of it.

    Args:
        heads: The sites, from `find_heads`.
        setting: `SimpleRouting`, `EMRouting`, `Trunk`, `Residual` of one of them, or `Gate`.

    Returns:
        The handle; printing it lists the sites.

    Raises:
        SettingError: `heads` or `setting` is something else, or its capsules do not divide a site's width.
        LayoutError: There is no site, a site's output projection was not found, it is an aggregator already,
            two sites share one, or an engine that would not train an aggregator holds the model. Nothing is replaced
            then.
    """
    require_heads(heads)
    require_setting(setting)
    sites = tuple(heads.sites)
    if not sites:
        raise LayoutError("aggregate was given no attention site; expected at least one from find_heads.")
    places: set[tuple[int, str]] = set()
    replaced = []
    for site in sites:
        output_projection = site.expose()
        old = output_projection.module
        if isinstance(old, Aggregator):
            raise LayoutError(
                f"{site.name or 'the model'} already has a {type(old).__name__} as its output; "
                "call remove() on the handle of the first aggregate() before a second one."
            )
        if (id(output_projection.owner), output_projection.attribute) in places:
            raise LayoutError(
                f"{site.name or 'the model'} shares its output projection with another selected site; aggregators "
                "are not shared, so select one of them."
            )
        places.add((id(output_projection.owner), output_projection.attribute))
        _require_in_time(heads, site, old, keeps=isinstance(setting, Residual | Gate))
        projection = old if isinstance(setting, Residual | Gate) else None
        new = build(setting, site.num_heads, site.head_size, site.width, projection)
        if site.divided:
            new.register_forward_pre_hook(_AllHeads(site))
        replaced.append(Replaced(site.name, output_projection, old, _placed_like(new, old)))
    for place in replaced:
        setattr(place.output_projection.owner, place.output_projection.attribute, place.new)
    for module in _saved_by_itself(heads.model):
        if aggregators_of(module):
            # the stock method would write a folder that loads without the aggregators, and only warns
            vars(module)["save_pretrained"] = SavePretrained(module)
    return Aggregation(heads.model, setting, tuple(replaced))


class _AllHeads:
    """A forward pre-hook: the heads that tensor parallel computes elsewhere join those of this process."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def __call__(self, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.site.all_heads(args[0], -1, self.site.num_heads * self.site.head_size), *args[1:])


def _require_in_time(heads: Heads, site: Site, old: nn.Module, *, keeps: bool) -> None:
    """Raise `LayoutError` where the parameters of an aggregator would be trained apart in each process."""
    name = site.name or "the model"
    if heads.replicated or getattr(old, "_is_fsdp_managed_module", False):
        engine = "DistributedDataParallel" if heads.replicated else "FSDP"
        raise LayoutError(
            f"{name}: the model is wrapped by {engine}, which exchanges no gradients of parameters that come later, so "
            "that each process would train an aggregator of its own; call hw.aggregate first and wrap after it."
        )
    if keeps and any(is_sharded(parameter) for parameter in old.parameters()):
        raise LayoutError(
            f"{name}: its output projection is divided by tensor parallel, and this aggregator gives it all heads; "
            "leave it out of the plan of parallelize_module."
        )


def _saved_by_itself(model: nn.Module) -> list[nn.Module]:
    """Return the modules that have a method `save_pretrained`: transformers' models, and models inside them."""
    return [module for module in model.modules() if callable(getattr(type(module), "save_pretrained", None))]


def _placed_like(new: Aggregator, old: nn.Module) -> Aggregator:
    parameter = next(old.parameters(), None)
    if parameter is not None:
        new = new.to(device=parameter.device, dtype=parameter.dtype)
    return new.train(old.training)


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
