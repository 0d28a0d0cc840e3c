"""The sizes of language modeling; with a model's folder, the sizes of the model are the folder's."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from headwise.errors import SettingError, require_integer
from headwise.settings import Count, Dropout, Natural, NonNegative, Positive
from headwise.texts.tables import USUAL, Columns
from headwise_lab.experiment.scale import UNRECORDED, read_presets
from headwise_lab.models.electra import DEVIATION
from headwise_lab.packed_text.prepare import PackedScale, TextPreparation

Length = Annotated[int, functools.partial(require_integer, low=8, high=1 << 17)]


@dataclass(frozen=True)
class LmScale(PackedScale):
    """Sizes of language modeling; see `Scale` and `PackedScale` for the other attributes.

    Attributes:
        key_value_heads: Key/value heads of a layer; each serves heads / key_value_heads query heads.
        hidden: Hidden units of a feed-forward layer.
        family: The class of transformers: Llama, or Qwen3, which normalizes queries and keys.
        batch_size: Rows per batch.
        accumulation: Batches per step.
        dropout: Dropout of attention weights, in [0, 1).
        deviation: Standard deviation that weights are drawn with.
        tied: Whether input and output embeddings are one.
        weight_decay: Decoupled weight decay of matrices.
        lora: Rank of the adapters that a pretrained model is fine-tuned with; 0 trains all of it.
        lora_alpha: Their alpha; 0 for twice the rank.
        pretrained: Folder of a model that runs begin with; None for new models.
        trust_remote_code: Whether code that this folder names may run.
    """

    training: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.95), "bfloat16": True, "schedule": "cosine"}

    name: str
    width: Count
    hidden: Count
    layers: Count
    heads: Count
    key_value_heads: Count
    steps: Count
    rounds: Count
    warmup_steps: Natural
    batch_size: Count
    learning_rate: Positive
    vocabulary_size: Count
    length: Length
    accumulation: Count = 1
    family: Literal["llama", "qwen3"] = "llama"
    dropout: Dropout = 0.0
    deviation: Positive = DEVIATION
    tied: bool = True
    weight_decay: NonNegative = 0.1
    clip_norm: NonNegative = 1.0
    dev_rows: Count | None = None
    test_rows: Count | None = None
    lora: Natural = 0
    lora_alpha: Natural = 0
    pretrained: Path | None = field(default=None, metadata=UNRECORDED)
    trust_remote_code: bool = field(default=False, metadata=UNRECORDED)
    columns: Columns = field(default=USUAL, metadata=UNRECORDED)
    compile_routing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % (2 * self.heads):
            raise SettingError(
                f"width {self.width} does not give {self.heads} heads of an even size, which rotary positions need; "
                "change one."
            )
        if self.heads % self.key_value_heads:
            raise SettingError(
                f"{self.heads} query heads cannot be divided among {self.key_value_heads} key/value heads; change one."
            )
        if self.lora and self.pretrained is None:
            raise SettingError(f"lora is {self.lora} and no model was named to adapt; give --model FOLDER, or lora=0.")

    @property
    def unused(self) -> Mapping[str, str]:
        """With a model's folder, all that describes a new model."""
        if self.pretrained is None:
            return {}
        described = ("width", "hidden", "layers", "heads", "key_value_heads", "family", "dropout", "deviation", "tied")
        return dict.fromkeys((*described, "vocabulary_size"), f"is that of the model in {self.pretrained}")

    @property
    def preparation(self) -> TextPreparation:
        """How text is prepared: with the tokenizer of the model's folder, if there is one."""
        given = None if self.pretrained is None else self.pretrained / "tokenizer.json"
        return dataclasses.replace(super().preparation, tokenizer=given)


LM_SCALES = read_presets(Path(__file__).with_name("task.toml"), LmScale)
