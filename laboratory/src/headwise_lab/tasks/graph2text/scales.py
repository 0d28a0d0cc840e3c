"""The sizes of the graph-to-text task; `task.toml` has their presets."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headwise.errors import SettingError, require_integer
from headwise.settings import Count, Dropout, Natural, Positive, Real
from headwise_lab.experiment.scale import Scale, read_presets


@dataclass(frozen=True)
class GraphScale(Scale):
    """Sizes of the graph-to-text task; see `Scale` for the other attributes.

    Attributes:
        width: Width d of words, nodes and states; even.
        layers: Number of blocks of the graph encoder.
        heads: Attention heads of each block and of the decoder's attentions; must divide `width`.
        tokens: Maximum words of a batch's texts, padding included.
        optimizer: Adam, or SGD with momentum 0.9 as in the released code.
        longest: Maximum words of a training text, which is truncated, and of a generated text.
        no_repeat: Length of word sequences that may not occur twice in a generated text, at least 2; 0 for no limit.
        released: Whether the model departs from the paper as the released code does; see `graph2text.model`.
    """

    name: str
    width: Count
    layers: Count
    heads: Count
    dropout: Dropout
    learning_rate: Positive
    tokens: Count
    epochs: Count
    warmup_steps: Natural
    clip_norm: Positive = 1.0
    optimizer: Literal["adam", "sgd"] = "adam"
    min_count: Count = 2
    longest: Count = 200
    beams: Count = 4
    length_penalty: Real = 1.0
    no_repeat: int = 0
    released: bool = False
    train_examples: Count | None = None
    dev_examples: Count | None = None
    test_examples: Count | None = None
    compile_routing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % 2 or self.width % self.heads:
            raise SettingError(
                f"width is {self.width} with {self.heads} heads; expected an even multiple of the number of heads."
            )
        if self.tokens <= self.longest:
            raise SettingError(f"tokens is {self.tokens}; expected more than longest, {self.longest}, and its end.")
        if self.no_repeat:
            require_integer("no_repeat", self.no_repeat, low=2)


GRAPH_SCALES = read_presets(Path(__file__).with_name("task.toml"), GraphScale)
