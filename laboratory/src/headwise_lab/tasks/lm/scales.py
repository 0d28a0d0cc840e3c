"""The sizes of language modeling and their presets; with a model's folder, the sizes of the model are the folder's."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from headwise.errors import SettingError, require_integer
from headwise.settings import Count, Dropout, Natural, NonNegative, Positive
from headwise.texts.tables import USUAL, Columns
from headwise_lab.data.documents import KEY
from headwise_lab.experiment.scale import UNRECORDED, Scale, presets
from headwise_lab.models.electra import DEVIATION
from headwise_lab.packed_text.prepare import TextPreparation

Length = Annotated[int, functools.partial(require_integer, low=8, high=1 << 17)]


@dataclass(frozen=True)
class LmScale(Scale):
    """Sizes of language modeling; see `Scale` for the other attributes.

    Attributes:
        key_value_heads: Key/value heads of a layer; each serves heads / key_value_heads query heads.
        hidden: Hidden units of a feed-forward layer.
        family: The class of transformers: Llama, or Qwen3, which normalizes queries and keys.
        steps: Number of optimizer steps.
        rounds: Number of evaluations on dev.
        batch_size: Rows per batch.
        accumulation: Batches per step.
        vocabulary_size: Number of tokens learned from the text.
        length: Tokens per row.
        dropout: Dropout of attention weights, in [0, 1).
        deviation: Standard deviation that weights are drawn with.
        tied: Whether input and output embeddings are one.
        weight_decay: Decoupled weight decay of matrices.
        dev_rows: Maximum number of dev rows; None for all.
        test_rows: Maximum number of test rows; None for all.
        lora: Rank of the adapters that a pretrained model is fine-tuned with; 0 trains all of it.
        lora_alpha: Their alpha; 0 for twice the rank.
        pretrained: Folder of a model that runs begin with; None for new models.
        trust_remote_code: Whether code that this folder names may run.

    Raises:
        SettingError: A value is outside its range, or does not divide as it must.
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
        self.columns.require(1, labels=False)
        if self.steps % self.rounds:
            raise SettingError(f"{self.steps} steps cannot be cut into {self.rounds} rounds of one length; change one.")
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
    def epochs(self) -> int:
        """A round counts as an epoch."""
        return self.rounds

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
        column = next(iter(self.columns.texts), KEY)
        return TextPreparation(self.vocabulary_size, self.length, tokenizer=given, column=column)


# cpu: as large as a run of plain takes five minutes of one core (279 s of it, on English prose of 27 MB). Chosen on dev
# with plain alone, seed 0: 4.452 nats a token after 1,200 steps and 4.253 after 2,400, each with its whole schedule, so
# twice the steps take off a twentieth, and a longer run would take off more. No other rate or batch was compared.
# paper: the sizes and the recipe of GPT-2 124M on 10 billion tokens in batches of half a million, as nanoGPT and llm.c
# train it, with Llama's layers and 4 key/value heads: 123.8 million parameters.
LM_SCALES = presets(
    LmScale,
    "demo cpu gpu paper",
    width=[64, 64, 512, 768],
    hidden=[176, 176, 1_376, 2_400],
    layers=[2, 2, 8, 12],
    heads=[4, 8, 8, 12],
    key_value_heads=[2, 4, 4, 4],
    steps=[400, 2_400, 6_000, 19_000],
    rounds=[4, 6, 6, 19],
    warmup_steps=[40, 240, 600, 700],
    batch_size=[16, 16, 64, 60],
    accumulation=[1, 1, 1, 8],
    learning_rate=[3e-3, 3e-3, 6e-4, 6e-4],
    vocabulary_size=[2_000, 2_000, 8_000, 50_304],
    length=[64, 128, 512, 1_024],
    dev_rows=[128, 256, 256, None],
    test_rows=[256, 512, 512, None],
)
