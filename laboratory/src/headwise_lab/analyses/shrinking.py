"""What a trained model loses when heads are removed from its weights, or its key/value heads are merged.

Half of its heads also with a short recovery.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headwise.errors import LayoutError
from headwise.heads.ablation import importance
from headwise.heads.find import find_heads
from headwise.heads.record import keep, record
from headwise.shrinking.merge import merge, require_mergeable
from headwise.shrinking.prune import choose_heads
from headwise.texts.batching import to_device
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.evaluation import METRICS, Loss
from headwise_lab.experiment.seeding import derive_key
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.results.runs import STAGES
from headwise_lab.training.optimizer import build_optimizer
from headwise_lab.training.trained import Trained, load_trained

HEADS, KEY_VALUE_HEADS = "heads", "kv_heads"
# Shares that stay.
SHARES: Mapping[str, tuple[float, ...]] = {HEADS: (0.75, 0.5, 0.25), KEY_VALUE_HEADS: (0.5, 0.25)}
LOSS, ADDED, SCORE = "loss", "loss_added", "score"
# What a recovery has of a run's steps, an epoch at most, and of its rate.
RECOVERY, RECOVERY_RATE = 0.1, 0.5

# What is left, of its share, in a model.
Smaller = Iterator[tuple[str, float, nn.Module]]


def name_number(what: str, left: str, share: float) -> str:
    """Return the name of a number of a model that keeps a share of its heads, in percent.

    >>> name_number("loss_added", HEADS, 0.5)
    'loss_added_heads_50'
    """
    return f"{what}_{left}_{round(100 * share)}"


def measure_shrinking(settings: RunSettings, folder: Path) -> dict[str, Any]:
    """Return loss and score on the test set with shares of the heads, and with shares of the key/value heads.

    Of its heads each attention keeps three quarters, half and a quarter: those that matter most, by first-order
    importance on dev, weighed anew before each cut. Key/value heads are merged to half and a quarter with `hw.merge`,
    calibrated on dev, where attentions can have fewer of them than query heads. Nothing is trained afterwards. The loss
    is that of a prediction, and the score the task's metric, decoded greedily.

    Returns:
        "numbers", named by `name_number`, with "loss_added" above the loss of the whole model; and "unmerged", why
        key/value heads were not merged, or None.

    Raises:
        DataError: The run's weights cannot be read.
        SettingError: The task has no losses of dev items.
        LayoutError: Heads cannot be removed, as under aggregators.
    """
    trained = load_trained(settings, folder)
    unmerged = _explain_unmerged(trained)
    steps = len(SHARES[HEADS]) + (0 if unmerged else len(SHARES[KEY_VALUE_HEADS]))
    whole = _score(trained, trained.model)
    numbers = {name_number(what, HEADS, 1.0): value for what, value in whole.items()}
    # merged before heads are removed in place
    for step, (left, share, model) in enumerate(chain(() if unmerged else _merge(trained), _prune(trained)), start=1):
        found = _score(trained, model)
        found[ADDED] = found[LOSS] - whole[LOSS]
        numbers |= {name_number(what, left, share): value for what, value in found.items()}
        progress = {"step": step, "steps": steps, "note": f"{share:.0%} of {left}"}
        run_folder.write_json(folder / run_folder.PROGRESS, progress)
    return {"numbers": numbers, "unmerged": unmerged}


def _score(trained: Trained, model: nn.Module) -> dict[str, float]:
    task, data = trained.task, trained.data
    with torch.no_grad():
        losses, scores = task.losses(model, data), task.greedy(model, data)
    return {LOSS: float(Loss().values(losses).mean()), SCORE: float(METRICS[task.metric].values(scores).mean())}


def _prune(trained: Trained) -> Smaller:
    """Yield the model with fewer and fewer heads; it is cut in place."""
    before = 1.0
    for share in SHARES[HEADS]:
        heads = find_heads(trained.heads.model)
        worth = importance(heads, lambda: trained.task.dev_losses(trained.model, trained.data), method="first_order")
        # of few heads two shares may leave as many
        if removed := choose_heads(heads, share / before, worth):
            trained.task.prune(trained.model, heads, removed)
        before = share
        yield HEADS, share, trained.model


def _merge(trained: Trained) -> Smaller:
    """Yield copies of the model with fewer key/value heads."""
    inputs = _record_inputs(trained)
    for share in SHARES[KEY_VALUE_HEADS]:
        model, target = copy.deepcopy((trained.model, trained.heads.model))
        heads = find_heads(target)
        merge(heads, _count_groups(trained, share), batches=inputs)
        yield KEY_VALUE_HEADS, share, model


def _explain_unmerged(trained: Trained) -> str | None:
    """Return why key/value heads cannot be merged; None where they can."""
    least = min(SHARES[KEY_VALUE_HEADS])
    numbers = {site.key_value_heads for site in trained.heads}
    if any(number * least % 1 for number in numbers) or len(numbers) > 1:
        return f"attentions have {', '.join(map(str, sorted(numbers)))} key/value heads, no multiple of {1 / least:g}"
    try:
        require_mergeable(trained.heads, _count_groups(trained, least), moves=True)
    except LayoutError as error:
        return str(error)
    return None


def _count_groups(trained: Trained, share: float) -> int:
    return round(share * trained.heads.sites[0].key_value_heads)


def _record_inputs(trained: Trained) -> list[dict[str, Any]]:
    """Return what the part of the model that has the heads is called with on dev."""
    with torch.no_grad(), record([trained.heads.model], inputs=keep) as calls:
        for _ in trained.task.probe(trained.model, trained.data):
            pass
    return [call.kwargs for call in calls]


def measure_halving(settings: RunSettings, folder: Path) -> dict[str, Any]:
    """Return what a trained model scores on each test item: whole, with half of its heads, and after a recovery.

    Each attention keeps the half of its heads that matters most, by first-order importance on dev. The recovery trains
    all parameters on the task's loss, without the arm's penalty or repulsion, for a tenth of the run's steps: at half
    of its rate, which falls linearly to zero. The whole model is not trained any further.

    Returns:
        "numbers", the score of each of `runs.STAGES`; and of each stage "statistics" of the test items for the metric,
        "heads" and "parameters"; and "steps" of the recovery.

    Raises:
        DataError: The run's weights cannot be read.
        SettingError: The task has no losses of dev items.
        LayoutError: Heads cannot be removed, as under aggregators.
    """
    trained = load_trained(settings, folder)
    task, data, model = trained.task, trained.data, trained.model
    found: dict[str, dict[str, Any]] = {"numbers": {}, "statistics": {}, "heads": {}, "parameters": {}}
    steps = 0
    for place, stage in enumerate(STAGES):
        if stage == "half":
            heads = find_heads(trained.heads.model)
            worth = importance(heads, lambda: task.dev_losses(model, data), method="first_order")
            if removed := choose_heads(heads, 0.5, worth):
                task.prune(model, heads, removed)
        elif stage == "recovered":
            steps = _recover(trained, settings)
        with torch.no_grad():
            statistics = np.asarray(task.greedy(model, data))
        found["numbers"][stage] = float(METRICS[task.metric].values(statistics).mean())
        found["statistics"][stage] = statistics.tolist()
        found["heads"][stage] = sum(site.num_heads for site in find_heads(trained.heads.model))
        found["parameters"][stage] = sum(parameter.numel() for parameter in model.parameters())
        progress = {"step": place + 1, "steps": len(STAGES), "note": STAGES[stage]}
        run_folder.write_json(folder / run_folder.PROGRESS, progress)
    return {**found, "steps": steps}


def _recover(trained: Trained, settings: RunSettings) -> int:
    """Train a model further, and return for how many steps."""
    task, data, model, recipe = trained.task, trained.data, trained.model, settings.scale.recipe
    batches: Any = task.batches(data, settings.scale, derive_key(settings.seed, "recovery order"))
    steps = min(len(batches), max(1, round(RECOVERY * recipe.epochs * len(batches))))
    rate = RECOVERY_RATE * (task.remaining_arm(settings.arm, data).learning_rate or recipe.learning_rate)
    optimizer = build_optimizer(model, rate, recipe)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / steps)
    torch.manual_seed(derive_key(settings.seed, "recovery dropout"))
    model.train()
    for places in islice(batches, steps):
        model(**to_device(task.collate([data.train[place] for place in places]), model))["loss"].backward()
        if recipe.clip_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    return steps
