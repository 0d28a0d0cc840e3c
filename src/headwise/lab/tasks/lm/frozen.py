"""A finished run of lm, frozen, whose model transformers would load without what its arm added."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from headwise.lab.experiment.frozen import Frozen, name_run
from headwise.lab.experiment.run_folder import SETTINGS, WEIGHTS, read_json
from headwise.lab.experiment.task import Task
from headwise.lab.frozen.runs import read_attending_arm
from headwise.lab.frozen.transformer import read_transformer
from headwise.lab.packed_text.prepare import TOKENIZER
from headwise.lab.tasks.lm.model import CausalModel, build_model
from headwise.lab.tasks.lm.scales import LmScale
from headwise.lab.tasks.lm.tokens import TextTokens, read_tokens
from headwise.lab.training.trained import build_run_model, read_scale, restore_run

# The configuration of the model that a run began with.
START = "start.json"


def open_causal(task: Task, folder: Path, record: Mapping[str, Any]) -> Frozen:
    """Return the model of a run of lm with what its arm added: gates, talking heads or differential attention."""
    scale = read_scale(folder, record, LmScale)
    words = read_tokens(folder / TOKENIZER)
    model = build_run_model(folder, lambda: _build(folder, words, scale))
    restore_run(folder, read_attending_arm(folder, record), model, task, seed=int(record["seed"]))
    start, end = words.names
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words.tokenizer,
        bos_token=start,
        eos_token=end,
        pad_token=end,
        model_max_length=scale.length,
    )
    kept = (folder / name for name in (SETTINGS, WEIGHTS, TOKENIZER, START))
    files = tuple(path for path in kept if path.is_file())
    return read_transformer(name_run(folder), model.network.base_model, tokenizer, folder, files)


def _build(folder: Path, words: TextTokens, scale: LmScale) -> CausalModel:
    if not (folder / START).is_file():
        return build_model(words, scale)
    config = AutoConfig.for_model(**read_json(folder / START))
    return CausalModel(AutoModelForCausalLM.from_config(config, trust_remote_code=False), None)
