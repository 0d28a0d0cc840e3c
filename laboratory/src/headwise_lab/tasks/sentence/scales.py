"""The sizes of the sentence task; `task.toml` has their presets."""

from dataclasses import dataclass, field
from pathlib import Path

from headwise.settings import Count, Dropout, Natural, Positive, Share
from headwise.texts.tables import USUAL, Columns
from headwise_lab.experiment.scale import UNRECORDED, Scale, read_presets


@dataclass(frozen=True)
class SentenceScale(Scale):
    """Sizes of the sentence task; see `Scale` for the other attributes.

    Attributes:
        width: Width of a word's vector.
        units: Units u of the LSTM in each direction; a head's output has 2u numbers.
        attention: Hidden units of the attention.
        heads: Number of attention heads r.
        hidden: Hidden units of the classifier.
        positive: Share of the texts that have label 1, of two labels 0 and 1; others with label 1 are left out by key.
            None keeps all texts.
        out_of_domain: File of other texts, for the uncertainty figures; None for none.
    """

    name: str
    width: Count
    units: Count
    attention: Count
    heads: Count
    hidden: Count
    dropout: Dropout
    learning_rate: Positive
    batch_size: Count
    epochs: Count
    warmup_steps: Natural
    clip_norm: Positive = 1.0
    max_words: Count = 100
    min_count: Count = 2
    train_examples: Count | None = None
    positive: Share | None = None
    embeddings: Path | None = field(default=None, metadata=UNRECORDED)
    columns: Columns = field(default=USUAL, metadata=UNRECORDED)
    out_of_domain: Path | None = field(default=None, metadata=UNRECORDED)
    compile_routing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.columns.require(2)

    @property
    def layers(self) -> int:
        """Number of attention layers: one."""
        return 1


SENTENCE_SCALES = read_presets(Path(__file__).with_name("task.toml"), SentenceScale)
