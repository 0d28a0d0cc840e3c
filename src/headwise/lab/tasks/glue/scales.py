"""The scales of the GLUE task: how a pretrained model is fine-tuned.

Owns `GlueScale` and the named scales; how large the model is, its folder says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headwise.errors import SettingError, require_integer, require_positive, require_range
from headwise.lab.experiment.task import UNRECORDED, Recipe


@dataclass(frozen=True)
class GlueScale:
    """How a run fine-tunes.

    Attributes:
        name: Its name in records.
        learning_rate: Peak rate of Adam.
        epochs: Passes over the training split.
        batch_size: Examples a step.
        warmup_share: Share of the steps that warm up, linearly, in [0, 1).
        layer_decay: What the rate of each layer is over that of the layer above it, in (0, 1].
        length: Most tokens of an example; longer texts are cut.
        clip_norm: Largest norm of the gradient, repulsion included.
        weight_decay: Decoupled weight decay, of matrices alone.
        both_orders: Whether pairs of MRPC and STS-B, where neither text comes first, are trained on in both orders.
        train_examples: Cap on the training examples, those with the smallest keys; None for all.
        test_examples: Cap on the examples judged, likewise.
        starts: How many pre-trained models of each arm there are: run s begins with that of seed s modulo it.
        keep_model: Whether a finished run keeps a folder that another fine-tuning can begin with.
        pretrained: What runs begin with: a folder of Hugging Face, a run of pretraining, or the folder of a comparison
            of pretraining or of glue, where each arm begins with its own run.
        compile_routing: Whether routing is compiled.

    Raises:
        SettingError: A value is outside its range.
    """

    name: str
    learning_rate: float
    epochs: int
    batch_size: int = 32
    warmup_share: float = 0.1
    layer_decay: float = 1.0
    length: int = 128
    clip_norm: float = 1.0
    weight_decay: float = 0.0
    both_orders: bool = False
    train_examples: int | None = None
    test_examples: int | None = None
    starts: int = 1
    keep_model: bool = False
    pretrained: Path | None = field(default=None, metadata=UNRECORDED)
    compile_routing: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "starts"):
            require_integer(name, getattr(self, name), low=1)
        require_integer("length", self.length, low=8, high=512)
        require_range("warmup_share", self.warmup_share, low=0.0, high=1.0)
        require_positive("learning_rate", self.learning_rate)
        require_range("clip_norm", self.clip_norm, low=0.0)
        require_range("weight_decay", self.weight_decay, low=0.0)
        for name in ("train_examples", "test_examples"):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), low=2)
        if not 0.0 < self.layer_decay <= 1.0:
            raise SettingError(f"layer_decay is {self.layer_decay}; expected a factor in (0, 1].")

    @property
    def layers(self) -> int:
        """Layers of attention that words in braces of a table's arms count; the model's folder knows the others."""
        return 1

    @property
    def recipe(self) -> Recipe:
        """How it is trained."""
        return Recipe(
            self.learning_rate,
            self.epochs,
            0,
            warmup_share=self.warmup_share,
            clip_norm=self.clip_norm,
            epsilon=1e-6,
            weight_decay=self.weight_decay,
            bfloat16=True,
        )


GLUE_SCALES: Mapping[str, GlueScale] = {
    scale.name: scale
    for scale in (
        GlueScale("demo", 5e-4, epochs=1, batch_size=16, length=64, train_examples=640),
        GlueScale("cpu", 5e-4, epochs=3, length=96, train_examples=4_000),
        GlueScale("gpu", 3e-4, epochs=3, layer_decay=0.8, both_orders=True),
        # Clark et al. 2020, appendix B and code, ELECTRA-small; ten epochs of RTE and STS-B stand with the table
        GlueScale("paper", 3e-4, epochs=3, layer_decay=0.8, both_orders=True),
    )
}
