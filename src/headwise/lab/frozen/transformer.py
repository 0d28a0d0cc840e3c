"""A model of transformers with its tokenizer, frozen: a folder of Hugging Face, or the network of a run."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headwise.errors import DataError, LayoutError
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads
from headwise.lab.data.batching import batch_by_length
from headwise.lab.data.encoded import BATCH, Encoded
from headwise.lab.experiment.frozen import Frozen

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

    def states(batch: Encoded) -> Sequence[Tensor]:
        return model(**batch.inputs, output_hidden_states=True).hidden_states

    return Frozen(
        name,
        model,
        _find_heads(model, folder),
        lambda sentences: _encode(tokenizer, sentences, longest, device),
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


def _encode(tokenizer: Any, sentences: Sequence[str], longest: int, device: str) -> Iterator[Encoded]:
    options = {"truncation": True, "max_length": longest}
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
