"""The folder of a finished run from which its model is read."""

import shutil
from pathlib import Path
from typing import Any

from headwise.atomic import new_folder
from headwise.lab.experiment.run_folder import write_text
from headwise.lab.models.pretrained import holds_added, quietly
from headwise.lab.tasks.lm.data import LmData
from headwise.lab.tasks.lm.scales import LmScale
from headwise.lab.training.start import CONFIG, MODEL, open_tokenizer
from headwise.routing.save import find_aggregators, save

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
