"""The time of a training step of an arm relative to one of plain.

Steps of the arm and of two plain models take turns on the same batches in one process, so that the load of the
machine affects all alike.
"""

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise_lab.experiment.arm import Arm, Orthogonalize
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.seeding import derive_key
from headwise_lab.experiment.settings import RunSettings, load_data
from headwise_lab.experiment.task import Data, Task
from headwise_lab.results.runs import STEP_RATIO
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.callback import choose_clock
from headwise_lab.training.optimizer import build_optimizer

# Number of batches, and of steps of each model on each after one that is not counted.
BATCHES, ROUNDS = 3, 9

Batch = dict[str, Tensor]


def measure_step_time(settings: RunSettings, _folder: Path) -> dict[str, Any]:
    """Return the time of a training step over plain's: median over rounds of the ratio within a round.

    A step is forward, backward, methods, clipping and optimizer, without the making of a batch. The models are new,
    with the run's seed. "plain_again" is the ratio of a second plain model: its distance from 1 is the noise.
    """
    task = named_task(settings.task)
    data = load_data(settings)
    plain = parse_arm("plain")
    steps = [_make_step(task, arm, data, settings) for arm in (plain, settings.arm, plain)]
    batches: Any = task.batches(data, settings.scale, derive_key(settings.seed, "order"))
    chosen = [task.collate([data.train[index] for index in batch]) for batch in itertools.islice(batches, BATCHES)]
    ratios, again = [], []
    for batch in chosen:
        for step in steps:
            step(batch)
        for number in range(ROUNDS):
            # each is first equally often
            order = [(number + place) % len(steps) for place in range(len(steps))]
            seconds = {index: _time_step(steps[index], batch) for index in order}
            ratios.append(seconds[1] / seconds[0])
            again.append(seconds[2] / seconds[0])
    numbers = {STEP_RATIO: statistics.median(ratios), "plain_again": statistics.median(again)}
    return {"numbers": numbers, "rounds": len(ratios)}


def _make_step(task: Task, arm: Arm, data: Data, settings: RunSettings) -> Callable[[Batch], None]:
    """Return a function that does one training step of an arm on a batch."""
    model, methods = attach_arm(task, arm, data, settings.scale, seed=settings.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = settings.scale.recipe
    model.to(device).train()
    rate = arm.learning_rate or recipe.learning_rate
    optimizer = build_optimizer(model, rate, recipe, arm.find(Orthogonalize), methods.heads)
    methods.repel(optimizer)

    def step(batch: Batch) -> None:
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.bfloat16 and device.type == "cuda"):
            loss = methods.loss(model(**inputs)["loss"])
        loss.backward()
        methods.apply_repulsion()
        if recipe.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def _time_step(step: Callable[[Batch], None], batch: Batch) -> float:
    clock = choose_clock(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    began = clock()
    step(batch)
    return clock() - began
