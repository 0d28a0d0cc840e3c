"""Trained models opened for reading: a folder of Hugging Face, or a finished run of any task."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headwise.errors import DataError, HeadwiseError
from headwise.input_files import describe_place, is_file
from headwise.routing.save import load
from headwise.stock_folders import RECORD, open_within
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.run_folder import require_intact, require_intact_export
from headwise_lab.experiment.task import TASKS, Frozen, name_run, named_task
from headwise_lab.frozen.transformer import read_transformer
from headwise_lab.models.pretrained import quietly, require_whole
from headwise_lab.training.start import CONFIG, MODEL, open_tokenizer
from headwise_lab.training.trained import read_finished

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
        raise DataError(
            f"{folder} {describe_place(folder)}; expected a folder of save_pretrained(), or a finished run."
        )
    if not (folder / run_folder.SETTINGS).is_file():
        return open_folder(folder, trust_remote_code=trust_remote_code)
    if run_folder.is_finished(folder):
        require_intact(folder, run_folder.SETTINGS)
    record = run_folder.read_json(folder / run_folder.SETTINGS)
    task = str(record.get("task") or "")[:60] if isinstance(record, dict) else ""
    if task not in TASKS:
        raise DataError(f"{folder} holds a run of {task or 'no task'}; expected one of {', '.join(TASKS)}.")
    finished, exported = read_finished(folder, task), named_task(task).exported
    if not exported or not (folder / exported / CONFIG).is_file():
        return named_task(task).open_frozen(folder, finished, pipeline)
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
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    found = (path for path in folder.iterdir() if path.is_file() and path.name[0] != "." and path.suffix not in IGNORED)
    files = tuple(sorted(found))
    return read_transformer(name or _find_name(folder.resolve()), model, tokenizer, folder, files, note)


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
        with quietly(), open_within(folder, trusted=trust_remote_code):
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
