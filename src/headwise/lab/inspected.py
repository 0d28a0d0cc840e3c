"""A model and a text as something to measure: batches of encoded sentences, and what the model puts out for them.

Owns the reading of a folder of Hugging Face and of a text file, and the score where nothing says what is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checks import DataError
from headwise.heads import Heads
from headwise.lab.batches import length_sorted
from headwise.layouts import find_heads

__all__ = [
    "BATCH",
    "Encoded",
    "Fidelity",
    "Inspected",
    "Opened",
    "inspected_folder",
    "opened_folder",
    "read_sentences",
    "run_encoded",
]

BATCH = 32
# Tokens of a sentence that are read; what stands behind them is left out.
LONGEST = 256


@dataclass(frozen=True, eq=False)
class Encoded:
    """A batch of sentences.

    Attributes:
        number: Its place among the batches.
        places: The place of each sentence in the text.
        inputs: The model's arguments.
        keep: True where a token is real, [B, n].
        tokens: The tokens of each sentence as they are to be read.
        encoding: What the tokenizer returned, for role masks; None where it told no places in the text.
    """

    number: int
    places: tuple[int, ...]
    inputs: dict[str, Tensor]
    keep: Tensor
    tokens: tuple[tuple[str, ...], ...]
    encoding: Any = None


@dataclass(frozen=True, eq=False)
class Inspected:
    """A model to be looked at.

    Attributes:
        name: Name of its folder.
        model: The model, or the part of it that is looked at.
        heads: Its heads.
        batches: The text as it takes it.
        note: What a reader should know of what was left out; "" for nothing.
    """

    name: str
    model: nn.Module
    heads: Heads
    batches: tuple[Encoded, ...]
    note: str = ""


class Fidelity:
    """How little a sentence's vectors move: mean_t cos(h_t, h'_t), h' without a head, over the sentence's tokens.

    The first output of a batch is that of the whole model, whose fidelity is 1; `measure` computes it first.
    """

    name = "fidelity"

    def __init__(self) -> None:
        self._number, self._whole = -1, torch.empty(0)

    def __call__(self, output: Tensor, batch: Encoded) -> Tensor:
        """Return one number a sentence."""
        if batch.number != self._number:
            self._number, self._whole = batch.number, output
        cosines = nn.functional.cosine_similarity(output.double(), self._whole.double(), dim=-1)
        return (cosines * batch.keep).sum(1) / batch.keep.sum(1)


def run_encoded(model: nn.Module, batch: Encoded) -> Tensor:
    """Return the last hidden states of a batch, [B, n, d]."""
    output = model(**batch.inputs)
    return output if isinstance(output, Tensor) else output.last_hidden_state


def read_sentences(path: Path) -> list[str]:
    """Return the sentences of a file, one a line; empty lines are left out.

    Raises:
        DataError: The file is not UTF-8, or holds no text.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}); expected text, a sentence a line.") from None
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise DataError(f"{path} holds no text; expected a sentence a line.")
    return found


def inspected_folder(folder: Path, sentences: Sequence[str]) -> Inspected:
    """Return the model of a folder of Hugging Face with the sentences encoded for it; see `opened_folder`.

    Raises:
        DataError: The folder holds no model or no tokenizer that transformers can load.
        LayoutError: The heads of the model cannot be found.
    """
    opened = opened_folder(folder)
    batches = tuple(opened.encoded(sentences))
    return Inspected(folder.resolve().name, opened.model, find_heads(opened.model), batches, opened.note)


@dataclass(frozen=True, eq=False)
class Opened:
    """What a folder of Hugging Face holds.

    Attributes:
        model: The model, in evaluation mode, on the GPU where there is one.
        tokenizer: Its tokenizer.
        note: What a reader should know of what was left out; "" for nothing.
    """

    model: Any
    tokenizer: Any
    note: str

    @property
    def longest(self) -> int:
        """Tokens of a sentence that are read."""
        positions = getattr(self.model.config, "max_position_embeddings", None) or LONGEST
        # some count two positions for padding
        return min(LONGEST, int(positions) - 2, int(self.tokenizer.model_max_length))

    def encoded(self, sentences: Sequence[str]) -> Iterator[Encoded]:
        """Yield the sentences in batches of like length."""
        return _encoded(self.tokenizer, sentences, self.longest, str(next(self.model.parameters()).device))


def opened_folder(folder: Path) -> Opened:
    """Return the model and the tokenizer of a folder of Hugging Face; of an encoder-decoder, the encoder.

    Raises:
        DataError: The folder holds no model or no tokenizer that transformers can load.
    """
    from transformers import AutoModel, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise DataError(
            f"{folder} holds no config.json; expected a folder that save_pretrained() wrote, with model and tokenizer, "
            "or a finished run of the laboratory."
        )
    try:
        model = AutoModel.from_pretrained(str(folder), local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        # transformers raises each of these for a folder that lacks a file or names an unknown model
        raise DataError(f"{folder} cannot be loaded by transformers: {' '.join(str(error).split())[:300]}") from None
    note = ""
    if getattr(model.config, "is_encoder_decoder", False):
        model, note = model.get_encoder(), "Of this encoder-decoder the encoder was looked at."
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return Opened(model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer, note)


def _encoded(tokenizer: Any, sentences: Sequence[str], longest: int, device: str) -> Iterator[Encoded]:
    import numpy as np

    options = {"truncation": True, "max_length": longest}
    lengths = np.array([len(ids) for ids in tokenizer(list(sentences), **options)["input_ids"]])
    for number, chosen in enumerate(length_sorted(lengths, BATCH)):
        texts = [sentences[place] for place in chosen]
        encoding = tokenizer(texts, return_tensors="pt", padding=True, **options)
        keep = encoding["attention_mask"].bool()
        tokens = tuple(
            tuple(tokenizer.convert_ids_to_tokens(ids[real].tolist()))
            for ids, real in zip(encoding["input_ids"], keep, strict=True)
        )
        inputs = {name: tensor.to(device) for name, tensor in encoding.items()}
        yield Encoded(number, tuple(map(int, chosen)), inputs, keep.to(device), tokens, encoding)
