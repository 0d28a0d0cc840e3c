"""A model of transformers with its tokenizer, frozen: a folder of Hugging Face, or the network of a run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headwise.errors import DataError, LayoutError
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads
from headwise.input_files import refuse_panics
from headwise_lab.data.batching import BATCH, Encoded, batch_by_length
from headwise_lab.data.subwords import REMEDY
from headwise_lab.experiment.task import Frozen

# Maximum number of tokens of a sentence.
LONGEST = 256
TOKENIZER = "tokenizer_config.json"


def read_transformer(
    name: str, model: Any, tokenizer: Any, folder: Path, files: tuple[Path, ...], note: str = ""
) -> Frozen:
    """Return a model and its tokenizer, frozen.

    Args:
        name: Name of the model.
        model: The model, in evaluation mode; it returns states and no logits.
        tokenizer: The tokenizer.
        folder: Where they are from.
        files: Everything the model follows from.
        note: What a reader should know of what was left out.

    Raises:
        DataError: The tokenizer does not say how long a text may be.
        LayoutError: The heads of the model cannot be found.
    """
    # some models count positions from the left, including padding
    tokenizer.padding_side = "right"
    longest = _find_longest(model, tokenizer, folder)
    device = str(next(model.parameters()).device)
    embeddings = model.get_input_embeddings()
    limits = {
        "input_ids": getattr(embeddings, "num_embeddings", None),
        "token_type_ids": getattr(model.config, "type_vocab_size", None),
    }

    def encode(sentences: Sequence[str]) -> Iterator[Encoded]:
        with refuse_panics(f"{folder} holds a tokenizer that fails on a text", REMEDY):
            for batch in _encode(tokenizer, sentences, longest, device):
                _require_known(folder, batch.inputs, limits, longest)
                yield batch

    def states(batch: Encoded) -> Sequence[Tensor]:
        return model(**batch.inputs, output_hidden_states=True).hidden_states

    return Frozen(
        name,
        model,
        _find_heads(model, folder),
        encode,
        lambda batch: model(**batch.inputs).last_hidden_state,
        states,
        files,
        note=note,
        longest=f"{longest} tokens",
    )


def _find_longest(model: Any, tokenizer: Any, folder: Path) -> int:
    """Return how many tokens of a sentence the model takes."""
    positions = getattr(model.config, "max_position_embeddings", None) or LONGEST
    most = tokenizer.model_max_length
    if isinstance(most, bool) or not isinstance(most, int | float) or not 1 <= most < math.inf:
        raise DataError(f"{folder / TOKENIZER}: model_max_length is {most!r}; expected a number of tokens, at least 1.")
    # some count two positions for padding
    return min(LONGEST, int(positions) - 2, int(most))


def _find_heads(model: Any, folder: Path) -> Heads:
    try:
        return find_heads(model)
    except LayoutError as error:
        raise LayoutError(f"{folder}: {error}") from error


def _require_known(folder: Path, inputs: Mapping[str, Tensor], limits: Mapping[str, int | None], longest: int) -> None:
    """Refuse what a tokenizer made of texts where the model has no embedding for it."""
    for name, most in limits.items():
        if most and name in inputs and int(inputs[name].max()) >= most:
            raise DataError(
                f"{folder}: its tokenizer gives {name} up to {int(inputs[name].max())}, and its model has embeddings "
                f"for {most}; save a model with the tokenizer that it was trained with."
            )
    if inputs["input_ids"].shape[1] > longest:
        raise DataError(
            f"{folder}: its tokenizer gives {inputs['input_ids'].shape[1]} tokens where {longest} were asked for; "
            "save a model with the tokenizer that it was trained with."
        )


def _encode(tokenizer: Any, sentences: Sequence[str], longest: int, device: str) -> Iterator[Encoded]:
    options = {"truncation": True, "max_length": longest, "return_attention_mask": True}
    whole = np.array([len(ids) for ids in tokenizer(list(sentences), verbose=False)["input_ids"]])
    lengths = np.minimum(whole, longest)
    for number, chosen in enumerate(batch_by_length(lengths, BATCH)):
        texts = [sentences[place] for place in chosen]
        encoding = tokenizer(texts, return_tensors="pt", padding=True, **options)
        keep = encoding["attention_mask"].bool()
        tokens = tuple(
            tuple(tokenizer.convert_ids_to_tokens(ids[real].tolist()))
            for ids, real in zip(encoding["input_ids"], keep, strict=True)
        )
        inputs = {name: tensor.to(device) for name, tensor in encoding.items()}
        # a slow tokenizer has no offsets
        known = encoding if getattr(encoding, "encodings", None) else None
        places, cut = tuple(map(int, chosen)), int((whole[chosen] > longest).sum())
        yield Encoded(number, places, inputs, keep.to(device), tokens, known, cut=cut)
