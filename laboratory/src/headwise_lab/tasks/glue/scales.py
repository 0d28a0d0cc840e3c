"""How a pretrained model is fine-tuned on GLUE; the sizes of the model are those of its folder."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from headwise.errors import require_integer, require_range
from headwise.settings import Count, NonNegative, Positive
from headwise_lab.experiment.scale import UNRECORDED, Scale, read_presets

Pair = Annotated[int, functools.partial(require_integer, low=2)]


@dataclass(frozen=True)
class GlueScale(Scale):
    """How a run fine-tunes; see `Scale` for the other attributes.

    Attributes:
        warmup_share: Share of the steps that warm up linearly, in [0, 1].
        layer_decay: Learning rate of each layer relative to that of the layer above it, in (0, 1].
        length: Maximum tokens per example; longer texts are truncated.
        weight_decay: Decoupled weight decay of matrices.
        both_orders: Whether pairs of MRPC and STS-B, where neither text comes first, are trained on in both orders.
        starts: Number of pretrained models per arm: run s begins with the one of seed s modulo this number.
        keep_model: Whether a finished run keeps a folder that further fine-tuning can begin with.
        pretrained: What runs begin with: a Hugging Face folder, a pretraining run, or the folder of a pretraining or
            GLUE comparison, where each arm begins with its own run.
        trust_remote_code: Whether code that a Hugging Face folder names may run.
    """

    training: ClassVar[Mapping[str, Any]] = {"warmup_steps": 0, "epsilon": 1e-6, "bfloat16": True}

    name: str
    learning_rate: Positive
    epochs: Count
    batch_size: Count = 32
    warmup_share: Annotated[float, functools.partial(require_range, low=0.0, high=1.0)] = 0.1
    layer_decay: Annotated[float, functools.partial(require_range, low=0.0, high=1.0, low_open=True)] = 1.0
    length: Annotated[int, functools.partial(require_integer, low=8, high=512)] = 128
    clip_norm: NonNegative = 1.0
    weight_decay: NonNegative = 0.0
    both_orders: bool = False
    train_examples: Pair | None = None
    test_examples: Pair | None = None
    starts: Count = 1
    keep_model: bool = False
    pretrained: Path | None = field(default=None, metadata=UNRECORDED)
    trust_remote_code: bool = field(default=False, metadata=UNRECORDED)
    compile_routing: bool = False

    @property
    def layers(self) -> int:
        """Number of layers for braces in the arms of a table: 1, since the model's folder has the others."""
        return 1


GLUE_SCALES = read_presets(Path(__file__).with_name("task.toml"), GlueScale)
