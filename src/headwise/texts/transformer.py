"""A model of transformers with its tokenizer, frozen, and its folder opened."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.atomic import require_folder_unchanged
from headwise.errors import DataError, HeadwiseError, LayoutError
from headwise.heads.find import find_heads
from headwise.input_files import is_file, refuse_panics
from headwise.stock_folders import CONFIG, open_within
from headwise.stock_folders import REMEDY as AGAIN
from headwise.texts.batching import BATCH, Encoded, batch_by_length
from headwise.texts.frozen import Frozen
from headwise.texts.pretrained import MODEL, open_tokenizer, quietly, require_whole
from headwise.texts.tokenizer_bounds import REMEDY

# Maximum number of tokens of a sentence.
LONGEST = 256
TOKENIZER = "tokenizer_config.json"
# Positions that some models count for padding.
PADDING = 2


def read_transformer(
    name: str, model: Any, tokenizer: Any, folder: Path, files: tuple[Path, ...], note: str = ""
) -> Frozen:
    """Return a model in evaluation mode, which returns states and no logits, with its tokenizer, frozen.

    Raises:
        DataError: The tokenizer or the model does not say how long a text may be.
        LayoutError: The heads of the model cannot be found.
    """
    # some models count positions from the left, including padding
    tokenizer.padding_side = "right"
    positions = getattr(model.config, "max_position_embeddings", None) or LONGEST
    most = tokenizer.model_max_length
    if isinstance(most, bool) or not isinstance(most, int | float) or not 1 <= most < math.inf:
        raise DataError(f"{folder / TOKENIZER}: model_max_length is {most!r}; expected a number of tokens, at least 1.")
    if positions <= PADDING:
        raise DataError(f"{folder / CONFIG}: max_position_embeddings is {positions!r}; expected at least 3; {AGAIN}")
    longest = min(LONGEST, int(positions) - PADDING, int(most))
    try:
        heads = find_heads(model)
    except LayoutError as error:
        raise LayoutError(f"{folder}: {error}") from error
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

    def run(batch: Encoded, **options: bool) -> Any:
        try:
            return model(**batch.inputs, **options)
        except (HeadwiseError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # whatever a model does with numbers of its configuration that building it does not ask for
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise DataError(f"{folder} holds a model that fails on a text ({reason}); {AGAIN}") from error

    return Frozen(
        name,
        model,
        heads,
        encode,
        lambda batch: run(batch).last_hidden_state,
        lambda batch: run(batch, output_hidden_states=True).hidden_states,
        files,
        note=note,
        longest=f"{longest} tokens",
    )


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
            tuple(tokenizer.decode([place]) for place in ids[real].tolist())
            for ids, real in zip(encoding["input_ids"], keep, strict=True)
        )
        inputs = {name: tensor.to(device) for name, tensor in encoding.items()}
        # a slow tokenizer has no offsets
        known = encoding if getattr(encoding, "encodings", None) else None
        places, cut = tuple(map(int, chosen)), int((whole[chosen] > longest).sum())
        yield Encoded(number, places, inputs, keep.to(device), tokens, known, cut=cut)


# Files in a folder that states do not depend on.
IGNORED = {".md", ".h5", ".msgpack", ".onnx", ".ot"}


def open_folder(folder: Path, name: str = "", *, trust_remote_code: bool = False) -> Frozen:
    """Return the model of a folder of Hugging Face; of an encoder-decoder, the encoder.

    It is named after the folder, or after its parent if that is called "model".

    Raises:
        DataError: The folder holds no model or no tokenizer that transformers can load.
        LayoutError: The heads of the model cannot be found.
    """
    if not is_file(folder / CONFIG):
        raise DataError(
            f"{folder} holds no config.json; expected a folder that save_pretrained() wrote, with model and tokenizer, "
            "or a finished run of the laboratory."
        )
    require_folder_unchanged(folder)
    model, tokenizer = _load(folder, trust_remote_code=trust_remote_code)
    note = ""
    if _has_encoder(model):
        model, note = model.get_encoder(), "Of this encoder-decoder the encoder was looked at."
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    found = (path for path in folder.iterdir() if path.is_file() and path.name[0] != "." and path.suffix not in IGNORED)
    files = tuple(sorted(found))
    place = folder.resolve()
    own = place.parent.name if place.name == MODEL and place.parent.name else place.name
    return read_transformer(name or own, model, tokenizer, folder, files, note)


def _has_encoder(model: Any) -> bool:
    """Return whether a model is an encoder-decoder, or the separately saved encoder of one."""
    alone = any(name.endswith("EncoderModel") for name in model.config.architectures or ())
    return bool(getattr(model.config, "is_encoder_decoder", False)) or alone


def _load(folder: Path, *, trust_remote_code: bool) -> tuple[Any, Any]:
    from transformers import AutoModel

    options: Any = {"local_files_only": True, "trust_remote_code": trust_remote_code, "output_loading_info": True}
    try:
        with quietly(), open_within(folder, trusted=trust_remote_code):
            model, information = AutoModel.from_pretrained(str(folder), **options)
        require_whole(folder, model, information, unread=("decoder.",) if _has_encoder(model) else ())
        return model, open_tokenizer(folder, trust_remote_code=trust_remote_code)
    except HeadwiseError:
        raise
    except Exception as error:
        # whatever transformers raises for a file that is missing or not as it expects
        raise DataError(f"{folder} cannot be loaded by transformers: {' '.join(str(error).split())[:300]}") from None
