"""A model whose heads leave its weights: parameters, counts and configuration change together, or not at all."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from headwise.errors import LayoutError
from headwise.heads.heads import Site
from headwise.nn.resized import resize
from headwise.shrinking.prune_counts import find_configured_count, list_counts
from headwise.shrinking.prune_cuts import Cut
from headwise.shrinking.prune_optimizer import cut_states
from headwise.shrinking.reload_stock import ConfigChange, Counts, list_stock_models, plan_config, set_saving


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
