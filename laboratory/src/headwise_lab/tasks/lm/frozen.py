"""The folder that a run of lm writes its model into, and a finished run with what transformers would not load."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from headwise.atomic import new_folder
from headwise.errors import DataError, HeadwiseError
from headwise.routing.save import find_aggregators, save
from headwise.stock_folders import CONFIG, open_within
from headwise.texts.frozen import Frozen
from headwise.texts.pretrained import MODEL, holds_added, open_tokenizer, quietly
from headwise.texts.transformer import read_transformer
from headwise_lab.experiment.run_folder import SETTINGS, WEIGHTS, read_json, write_text
from headwise_lab.experiment.task import Task, name_run
from headwise_lab.frozen.runs import load_run
from headwise_lab.packed_text.prepare import TOKENIZER
from headwise_lab.tasks.lm.data import LmData
from headwise_lab.tasks.lm.model import CausalModel, build_model
from headwise_lab.tasks.lm.scales import LmScale
from headwise_lab.tasks.lm.tokens import read_tokens
from headwise_lab.training.trained import read_scale

# What a fine-tuned model began with, where its own folder cannot be written.
START = "start"


def write_model(network: Any, data: LmData, scale: LmScale, folder: Path) -> None:
    """Write the model of a run and its tokenizer into `folder` / "model", adapters merged into the weights.

    Stock transformers loads it, and with an aggregator in it only `headwise.load`. A model with gates, talking
    heads or differential attention is not written, since transformers would load it without them; of a fine-tuned one,
    `folder` / "start" gets the configuration and the tokenizer that it began with.
    """
    if holds_added(network):
        if data.start_model is not None:
            _keep_start(data.start_model.any_folder(), scale, folder)
        return
    whole = network.merge_and_unload() if hasattr(network, "merge_and_unload") else network
    with quietly(), new_folder(folder / MODEL, replaced=None) as temporary:
        if find_aggregators(whole):
            save(whole, temporary)
        else:
            whole.save_pretrained(temporary)
        if data.start_model is None:
            for name, text in data.words.files(scale.length).items():
                write_text(temporary / name, text)
        else:
            _copy_tokenizer(data.start_model.any_folder(), scale, temporary)


def _keep_start(start: Path, scale: LmScale, folder: Path) -> None:
    with quietly(), new_folder(folder / START, replaced=None) as temporary:
        shutil.copy(start / CONFIG, temporary / CONFIG)
        _copy_tokenizer(start, scale, temporary)


def _copy_tokenizer(start: Path, scale: LmScale, folder: Path) -> None:
    open_tokenizer(start, trust_remote_code=scale.trust_remote_code).save_pretrained(folder)


def open_causal(task: Task, folder: Path, record: Mapping[str, Any]) -> Frozen:
    """Return the model of a run of lm with what its arm added: gates, talking heads or differential attention."""
    scale, start = read_scale(folder, record, LmScale), folder / START
    if start.is_dir():
        config, tokenizer = _read_config(start / CONFIG), open_tokenizer(start)
        model = load_run(folder, record, task, lambda: _build_causal(config))
    else:
        words = read_tokens(folder / TOKENIZER)
        names = dict(zip(("bos_token", "eos_token"), words.names, strict=True))
        tokenizer: Any = PreTrainedTokenizerFast(
            tokenizer_object=words.tokenizer, **names, pad_token=words.names[1], model_max_length=scale.length
        )
        model = load_run(folder, record, task, lambda: build_model(words, scale))
    files = *(folder / name for name in (SETTINGS, WEIGHTS, TOKENIZER)), *sorted(start.glob("*"))
    return read_transformer(name_run(folder), model.network.base_model, tokenizer, folder, files)


def _read_config(path: Path) -> Any:
    try:
        with open_within(path.parent, trusted=False):
            return AutoConfig.for_model(**read_json(path))
    except HeadwiseError:
        raise
    except Exception as error:
        # whatever transformers raises for a kind of model that it does not know
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path} is of a model that transformers alone does not build ({reason}).") from None


def _build_causal(config: Any) -> CausalModel:
    # as it was trained, whatever the configuration says
    dtype = torch.get_default_dtype()
    return CausalModel(AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False), None)
