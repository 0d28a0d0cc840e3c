"""Trained models opened for reading: a folder of Hugging Face, or a finished run of any task."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import DataError, HeadwiseError, LayoutError
from headwise.foreign_code import refuse_foreign_code
from headwise.heads.find import find_heads
from headwise.heads.heads import Heads
from headwise.input_files import is_file
from headwise.lab.data.batching import batch_by_length
from headwise.lab.data.encoded import BATCH, Encoded
from headwise.lab.experiment import run_folder
from headwise.lab.experiment.finished import require_intact, require_intact_export
from headwise.lab.experiment.frozen import Frozen, name_run
from headwise.lab.experiment.registry import TASKS, named_task
from headwise.lab.models.pretrained import quietly, require_whole
from headwise.lab.training.start import CONFIG, MODEL, open_tokenizer
from headwise.lab.training.trained import read_finished
from headwise.routing.save import load
from headwise.routing.saved import RECORD

# Maximum number of tokens of a sentence.
LONGEST = 256
TOKENIZER = "tokenizer_config.json"
# Files in a folder that states do not depend on.
IGNORED = {".md", ".h5", ".msgpack", ".onnx", ".ot"}


def open_frozen(folder: Path, pipeline: Path | None = None, *, trust_remote_code: bool = False) -> Frozen:
    """Return the model of a folder of Hugging Face, or of a finished run of any task.

    Args:
        folder: The folder.
        pipeline: The spaCy pipeline that parsed the texts of a run whose heads have roles; None for the path used in
            training. Ignored if nothing was parsed.
        trust_remote_code: Whether code that a folder of Hugging Face names may run.

    Raises:
        DataError: The folder holds no such model, or it cannot be read.
        LayoutError: The heads of the model cannot be found.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist; expected a folder of save_pretrained(), or a finished run.")
    if not (folder / run_folder.SETTINGS).is_file():
        return open_folder(folder, trust_remote_code=trust_remote_code)
    if run_folder.is_finished(folder):
        require_intact(folder, run_folder.SETTINGS)
    record = run_folder.read_json(folder / run_folder.SETTINGS)
    task = str(record.get("task") or "")[:60] if isinstance(record, dict) else ""
    if task not in TASKS:
        raise DataError(f"{folder} holds a run of {task or 'no task'}; expected one of {', '.join(TASKS)}.")
    finished, exported = read_finished(folder, task), named_task(task).exported
    if not exported:
        return named_task(task).open_frozen(folder, finished, pipeline)
    if not (folder / exported / CONFIG).is_file():
        remedy = ""
        if exported == MODEL:
            keeps = any(hasattr(scale, "keep_model") for scale in named_task(task).scales.values())
            remedy = (
                "; run it with --set keep_model=true"
                if keeps
                else ", as there is none of gates, talking heads or differential attention: transformers would pass "
                "over their parameters"
            )
        raise DataError(f"{folder} keeps no folder {exported!r} with a model and its tokenizer{remedy}.")
    opened = open_folder(folder / exported, name_run(folder), trust_remote_code=trust_remote_code)
    return replace(opened, note=f"Of this run the {exported} was looked at.")


def open_folder(folder: Path, name: str = "", *, trust_remote_code: bool = False) -> Frozen:
    """Return the model of a folder of Hugging Face; of an encoder-decoder, the encoder.

    Args:
        folder: The folder.
        name: Name of the model; by default that of the folder, or of its parent for "model".
        trust_remote_code: Whether code that the folder names may run.

    Raises:
        DataError: The folder holds no model or no tokenizer that transformers can load.
        LayoutError: The heads of the model cannot be found.
    """
    if not is_file(folder / CONFIG):
        raise DataError(
            f"{folder} holds no config.json; expected a folder that save_pretrained() wrote, with model and tokenizer, "
            "or a finished run of the laboratory."
        )
    require_intact_export(folder)
    model, tokenizer = _load(folder, trust_remote_code=trust_remote_code)
    note = ""
    if _has_encoder(model):
        model, note = model.get_encoder(), "Of this encoder-decoder the encoder was looked at."
    # some models count positions from the left, including padding
    tokenizer.padding_side = "right"
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    longest = _find_longest(model, tokenizer, folder)
    device = str(next(model.parameters()).device)

    def states(batch: Encoded) -> Sequence[Tensor]:
        return model(**batch.inputs, output_hidden_states=True).hidden_states

    files = (path for path in folder.iterdir() if path.is_file() and path.name[0] != "." and path.suffix not in IGNORED)
    return Frozen(
        name or _find_name(folder.resolve()),
        model,
        _find_heads(model, folder),
        lambda sentences: _encode(tokenizer, sentences, longest, device),
        lambda batch: model(**batch.inputs).last_hidden_state,
        states,
        tuple(sorted(files)),
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


def _find_name(folder: Path) -> str:
    return folder.parent.name if folder.name == MODEL and folder.parent.name else folder.name


def _has_encoder(model: Any) -> bool:
    """Return whether a model is an encoder-decoder, or the separately saved encoder of one."""
    alone = any(name.endswith("EncoderModel") for name in model.config.architectures or ())
    return bool(getattr(model.config, "is_encoder_decoder", False)) or alone


def _load(folder: Path, *, trust_remote_code: bool) -> tuple[Any, Any]:
    from transformers import AutoModel

    read_tokenizer = partial(open_tokenizer, folder, trust_remote_code=trust_remote_code)
    try:
        if (folder / RECORD).is_file():
            # transformers refuses a folder with aggregators and its tokenizer
            with quietly():
                whole: Any = load(folder, trust_remote_code=trust_remote_code)
            return whole.base_model, read_tokenizer()
        with quietly(), refuse_foreign_code(folder, trusted=trust_remote_code):
            model, information = AutoModel.from_pretrained(
                str(folder),
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
        require_whole(folder, model, information, unread=("decoder.",) if _has_encoder(model) else ())
        return model, read_tokenizer()
    except HeadwiseError:
        raise
    except Exception as error:
        # whatever transformers raises for a file that is missing or not as it expects
        raise DataError(f"{folder} cannot be loaded by transformers: {' '.join(str(error).split())[:300]}") from None


def _encode(tokenizer: Any, sentences: Sequence[str], longest: int, device: str) -> Iterator[Encoded]:
    import numpy as np

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
