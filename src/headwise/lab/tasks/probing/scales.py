"""The scales of the probing task, in the form of classification's: what a run of each size trains.

Owns the named scales. The recipes of `demo` and `cpu` were chosen on dev, with plain attention, and
the epochs of `cpu` by what 225 runs may take on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping

from headwise.lab.tasks.classification.scales import ClassificationScale

PROBING_SCALES: Mapping[str, ClassificationScale] = {
    scale.name: scale
    for scale in (
        ClassificationScale(
            name="demo",
            width=48,
            layers=2,
            heads=4,
            head_size=12,
            hidden=96,
            norm_first=True,
            dropout=0.1,
            learning_rate=2e-3,
            batch_size=32,
            epochs=3,
            warmup_steps=100,
            train_examples=3_000,
        ),
        ClassificationScale(
            name="cpu",
            width=64,
            layers=6,
            heads=4,
            head_size=16,
            hidden=128,
            norm_first=True,
            dropout=0.1,
            learning_rate=4e-3,
            batch_size=64,
            epochs=3,
            warmup_steps=100,
            train_examples=10_000,
        ),
        ClassificationScale(
            name="gpu",
            width=256,
            layers=6,
            heads=8,
            head_size=32,
            hidden=1024,
            norm_first=True,
            dropout=0.1,
            learning_rate=5e-4,
            batch_size=64,
            epochs=12,
            warmup_steps=400,
        ),
        # Li et al. 2021, 4.2.2: six layers of Transformer-base, Adam at 5e-4, 250 epochs; batch and dropout are unsaid
        ClassificationScale(
            name="paper",
            width=512,
            layers=6,
            heads=8,
            head_size=64,
            hidden=2048,
            norm_first=False,
            dropout=0.1,
            learning_rate=5e-4,
            batch_size=64,
            epochs=250,
            warmup_steps=0,
        ),
    )
}
