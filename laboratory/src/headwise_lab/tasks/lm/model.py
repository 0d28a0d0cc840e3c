"""The models: transformers' own Llama and Qwen3, or any causal model from a folder; and the folder a run leaves."""

from __future__ import annotations

import functools
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from typing_extensions import override

from headwise.atomic import new_folder
from headwise.errors import DataError, HeadwiseError
from headwise.heads.find import find_heads
from headwise.routing.save import find_aggregators, save
from headwise.stock_folders import CONFIG, open_within
from headwise.texts.frozen import Frozen
from headwise.texts.pretrained import MODEL, holds_added, open_tokenizer, quietly, require_whole
from headwise.texts.transformer import read_transformer
from headwise_lab.experiment.run_folder import SETTINGS, WEIGHTS, read_json, write_text
from headwise_lab.experiment.task import Task, name_run
from headwise_lab.frozen.runs import load_run
from headwise_lab.models.electra import decayed_apart, draw_normal
from headwise_lab.packed_text.prepare import TOKENIZER
from headwise_lab.tasks.lm.data import LmData
from headwise_lab.tasks.lm.scales import LmScale
from headwise_lab.tasks.lm.tokens import TextTokens, read_tokens
from headwise_lab.training.start import Start, find_start, require_positions
from headwise_lab.training.trained import read_scale

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
# What rounding may change in logits, relative to the largest.
CLOSE = 1e-3


class CausalModel(nn.Module):
    """A causal model of transformers, whose parameters a run draws, or keeps as they were found.

    Args:
        network: See the attribute.
        deviation: Standard deviation that weights are drawn with; None keeps them.
    """

    def __init__(self, network: Any, deviation: float | None) -> None:
        super().__init__()
        self.network = network
        for name, module in network.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                object.__setattr__(module, "reset_parameters", _choose_reset(name, module, deviation))

    @override
    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return "logits", [B, T, V], and the mean "loss" of the next token where there are labels.

        Args:
            input_ids: Tokens, int64 [B, T].
            position_ids: Position of each in its document, int64 [B, T]; attention stays inside a document. None for
                one document.
            labels: Tokens to predict, not shifted, -100 where none is, int64 [B, T].
        """
        # with a cache, transformers does not look at the positions for documents
        out = self.network(input_ids=input_ids, position_ids=position_ids, labels=labels, use_cache=False)
        return {"logits": out.logits} | ({} if labels is None else {"loss": out.loss})

    def parameter_groups(self, rate: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return the optimizer's groups: the gains of norms are not decayed."""
        trained = ((name, one) for name, one in self.named_parameters() if one.requires_grad)
        return [{**group, "lr": rate} for group in decayed_apart(trained, weight_decay)]


def build_model(words: TextTokens, scale: LmScale) -> CausalModel:
    """Return a new model of a scale."""
    make_config, make_network = FAMILIES[scale.family]
    config = make_config(
        vocab_size=words.vocabulary_size,
        hidden_size=scale.width,
        intermediate_size=scale.hidden,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        num_key_value_heads=scale.key_value_heads,
        head_dim=scale.width // scale.heads,
        max_position_embeddings=scale.length,
        attention_dropout=scale.dropout,
        initializer_range=scale.deviation,
        tie_word_embeddings=scale.tied,
        bos_token_id=words.start,
        eos_token_id=words.end,
        pad_token_id=words.end,
    )
    return CausalModel(make_network(config), scale.deviation)


def open_model(folder: Path, words: TextTokens, scale: LmScale, *, aggregated: bool = False) -> CausalModel:
    """Return the model of a folder, with new adapters on all its linear layers but the last if the scale has some."""
    network = _load(folder, trust_remote_code=scale.trust_remote_code)
    known = network.get_input_embeddings().weight.shape[0]
    if words.vocabulary_size > known:
        raise DataError(
            f"{folder} has vectors for {known} token ids, and its tokenizer has {words.vocabulary_size}; name a model "
            "with its own tokenizer."
        )
    if not keeps_documents_apart(network, words.start):
        raise DataError(
            f"{folder}: attention of {type(network).__name__} crosses documents that are packed into one row, which "
            "transformers keeps apart in most models; name another model."
        )
    return CausalModel(_adapt(network, scale, aggregated=aggregated) if scale.lora else network, None)


def _adapt(network: Any, scale: LmScale, *, aggregated: bool) -> Any:
    # slow to import
    from peft import LoraConfig, get_peft_model

    found = [site.output_projection.module for site in find_heads(network) if site.output_projection is not None]
    left_out = [name for name, module in network.named_modules() if aggregated and any(module is one for one in found)]
    config = LoraConfig(
        r=scale.lora,
        lora_alpha=scale.lora_alpha or 2 * scale.lora,
        target_modules="all-linear",
        exclude_modules=left_out or None,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft reads it of every model
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        # it finds out itself for each layer
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to", category=UserWarning)
        return get_peft_model(network, config)


@torch.no_grad()
def keeps_documents_apart(network: Any, start: int) -> bool:
    """Return whether what comes first in a row leaves what a model says of a second document as it is."""
    training = network.training
    network.eval()
    device = network.get_input_embeddings().weight.device
    first, other = (torch.full((1, 4), token, device=device) for token in (start, (start + 1) % 2))
    second = torch.full((1, 4), start, device=device)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]], device=device)
    said = [
        network(input_ids=torch.cat([before, second], dim=1), position_ids=positions, use_cache=False).logits[:, 4:]
        for before in (first, other)
    ]
    network.train(training)
    return bool((said[0] - said[1]).abs().max() <= CLOSE * said[0].abs().max())


def _load(folder: Path, *, trust_remote_code: bool) -> Any:
    try:
        with quietly(), open_within(folder, trusted=trust_remote_code):
            found: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                local_files_only=True,
                dtype=torch.get_default_dtype(),
            )
    except HeadwiseError:
        raise
    except Exception as error:
        # whatever transformers raises for a folder that is not as it expects
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{folder} holds no causal model that transformers can load ({reason}).") from error
    network, said = found
    require_whole(folder, network, said)
    return network


def _choose_reset(name: str, module: Any, deviation: float | None) -> Callable[[], object]:
    if "lora_A" in name and isinstance(module, nn.Linear):
        return functools.partial(nn.Linear.reset_parameters, module)
    if "lora_B" in name:
        return functools.partial(nn.init.zeros_, module.weight)
    if deviation is None:
        return _stay
    if isinstance(module, nn.Linear | nn.Embedding):
        return functools.partial(draw_normal, module, deviation)
    # the gain of a norm
    return functools.partial(nn.init.ones_, module.weight)


def _stay() -> None:
    """Leave a pretrained module unchanged."""


EXPECTED = "the folder of a causal model with its tokenizer, or a finished run of lm, as OUT/ARM/seed-0"


def find_model(scale: LmScale) -> Start | None:
    """Return where the model of a scale comes from; None where runs begin with new ones."""
    if scale.pretrained is None:
        return None
    start = find_start(scale.pretrained, EXPECTED)
    if start.of_arms:
        raise DataError(f"{scale.pretrained} is a comparison of {start.task}; expected {EXPECTED}.")
    folder = start.any_folder()
    if not (folder / "tokenizer.json").is_file():
        raise DataError(
            f"{folder} has no tokenizer.json; write one with AutoTokenizer.from_pretrained(FOLDER)"
            ".save_pretrained(FOLDER)."
        )
    require_positions(folder, scale.length, trust_remote_code=scale.trust_remote_code)
    # it is saved with the trained model, and is refused now rather than then
    open_tokenizer(folder, trust_remote_code=scale.trust_remote_code)
    return start


def require_tokenizer(prepared: Path, words: TextTokens, scale: LmScale) -> None:
    """Refuse text that was prepared with another tokenizer than that of the model's folder."""
    assert scale.preparation.tokenizer is not None
    own = read_tokens(scale.preparation.tokenizer)
    if own.to_json() != words.to_json():
        raise DataError(
            f"{prepared} was prepared with another tokenizer than {scale.preparation.tokenizer}; give the text itself "
            "to --data, or prepare it with --tokenizer and that file."
        )


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
