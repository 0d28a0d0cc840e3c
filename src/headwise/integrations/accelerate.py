"""Methods in a loop of your own under Accelerate, with a model and an optimizer that it has prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from headwise.attached import Attached
from headwise.errors import SettingError
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads
from headwise.heads.method import Method
from headwise.routing.aggregate import Aggregate


def attach(
    accelerator: Any,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *methods: Method,
    find: Callable[[nn.Module], Heads] = find_heads,
    seed: int = 0,
) -> Attached:
    """Attach methods to a model and its optimizer, with their state in `accelerator.save_state`; returns the handle.

    Call it after `prepare`. In the loop, write `accelerator.backward(attached.loss(loss))`: the penalty enters
    while the model trains, and nothing enters in evaluation. Repulsion acts in `optimizer.step()`, once an update.
    `accelerator.log(attached.stats())` logs "penalty", "similarity" and "force_ratio". Where model or optimizer
    is built anew, call `attached.attach(model, optimizer)`.

    Args:
        accelerator: The Accelerator, for its checkpoints.
        model: The model, prepared or not.
        optimizer: Its optimizer, or several, prepared or not.
        methods: `hw.Penalize(...)` and `hw.Repel(...)`, any number of each.
        find: Returns the heads of a model.
        seed: Seed of the noise of rules that have one.

    Raises:
        SettingError: `accelerator` is no Accelerator, or something given is no method, or is `Aggregate`: aggregators
            have to be in the model before there is an optimizer, so call `hw.aggregate` there.
        LayoutError: The methods do not fit the heads of the model, or the optimizer does not hold them.

    Example:
        >>> import accelerate, torch, headwise as hw
        >>> accelerator = accelerate.Accelerator(cpu=True)
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        >>> methods = hw.Penalize(hw.similarity.Output()), hw.Repel(hw.SVGD(alpha=0.01))
        >>> attached = attach(accelerator, model, optimizer, *methods)
        >>> loss = model(torch.randn(3, 5, 8)).square().mean()
        >>> accelerator.backward(attached.loss(loss))
        >>> optimizer.step()
        >>> attached.steps
        1
    """
    if not hasattr(accelerator, "register_for_checkpointing"):
        raise SettingError(f"accelerator is a {type(accelerator).__name__}; expected the Accelerator of the loop.")
    if any(isinstance(method, Aggregate) for method in methods):
        raise SettingError(
            "aggregators have to be in the model before there is an optimizer: call hw.aggregate(heads, setting) "
            "there, and give attach(...) Penalize and Repel; save_state keeps the aggregators as part of the model."
        )
    if not methods:
        raise SettingError("attach was given no method; expected hw.Penalize(...) or hw.Repel(...).")
    attached = Attached(methods, find=find, seed=seed)
    attached.attach(model, optimizer)
    accelerator.register_for_checkpointing(attached)
    return attached
