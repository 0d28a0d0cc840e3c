"""Every model of transformers is read whole or refused with a sentence; none crashes, none is half read."""

from __future__ import annotations

import collections
import re

import pytest
import torch
from torch import nn

import headwise as hw

pytestmark = pytest.mark.full

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "n_layers")


def shortened(config, depth: int = 0) -> None:
    from transformers import PretrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig) and depth < 3:
            shortened(value, depth + 1)
        elif name in LAYERS and isinstance(value, int) and value > 4 and not hasattr(config, "layer_types"):
            setattr(config, name, 4)


def built(kind: str) -> nn.Module | None:
    """The model of a type on no device, shortened where its configuration allows it; None where it cannot be built."""
    from transformers import CONFIG_MAPPING, AutoModel

    for shorten in (shortened, lambda _config: None):
        try:
            config = CONFIG_MAPPING[kind]()
            shorten(config)
            with torch.device("meta"):
                return AutoModel.from_config(config)
        except Exception:
            continue
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_model_of_transformers_is_read_whole_or_refused():
    import transformers

    transformers.logging.set_verbosity_error()
    outcome: dict[str, list[str]] = collections.defaultdict(list)
    for kind, config in transformers.CONFIG_MAPPING.items():
        model = built(kind) if config in transformers.MODEL_MAPPING else None
        if model is None:
            outcome["not built"].append(kind)
            continue
        try:
            heads = hw.find_heads(model)
        except hw.errors.LayoutError as error:
            told = re.search(r"exclude|num_heads=|do not (group|divide)", str(error)) is not None
            outcome["refused" if told else "refused without a way out"].append(kind)
        else:
            assert all(site.num_heads % site.key_value_heads == 0 for site in heads), kind
            outcome["found"].append(kind)
    assert outcome["refused without a way out"] == []
    # half of the refused have no attention at all: convolutions and state spaces
    assert len(outcome["found"]) > 3 * len(outcome["refused"]) > 0
