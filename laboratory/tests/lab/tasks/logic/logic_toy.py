"""The logic task at a size that trains in a second."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from headwise_lab.tasks.logic.generator import generate
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


def write_pairs(folder: Path, count: int) -> Path:
    """Write pairs of at most one operator in the published format, and return the folder."""
    folder.mkdir(exist_ok=True)
    for pair in generate(count, seed=1, max_operators=1):
        split = "test" if pair.operators == 1 and len(pair.premise) % 3 == 0 else "train"
        with (folder / f"{split}{pair.operators}").open("a", encoding="utf-8") as stream:
            stream.write(f"{pair.relation}\t{pair.premise}\t{pair.hypothesis}\n")
    return folder
