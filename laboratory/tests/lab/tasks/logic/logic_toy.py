"""The logic task at a size that trains in a second."""

from __future__ import annotations

import dataclasses

from headwise_lab.tasks.logic.scales import LOGIC_SCALES

TOY = dataclasses.replace(
    LOGIC_SCALES["demo"],
    name="toy",
    width=8,
    heads=2,
    classifier_width=16,
    epochs=1,
    warmup_steps=3,
    generated_draws=1500,
    train_examples=128,
    dev_examples=40,
)
