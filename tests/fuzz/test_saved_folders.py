"""Mutated folders of `headwise.save`: a model or a sentence, within two seconds and without much memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import headwise as hw
from fuzz.mutate import INPUTS, fuzz, mutate_bytes, mutate_json
from lab.sealing import resealing
from routing.hostile import CONFIG, RECORD, tensor_file
from routing.test_hostile_folders import make_bert

SLOW = pytest.param(INPUTS, marks=pytest.mark.slow)

pytestmark = pytest.mark.full


def make_pruned() -> BertModel:
    """A model whose record says how many rows each layer has left."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 8, "num_attention_heads": 4, "intermediate_size": 8, "max_position_embeddings": 8}
    bert = BertModel(BertConfig(vocab_size=20, num_hidden_layers=2, **sizes)).eval()
    heads = hw.find_heads(bert)
    hw.prune(heads, {heads.sites[0].name: [1], heads.sites[1].name: [0, 2]})
    return bert


@pytest.fixture(params=[make_bert, make_pruned])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param().save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize("inputs", [100, SLOW])
def test_a_mutated_folder_is_loaded_or_refused(folder: Path, inputs: int):
    for name in (RECORD, CONFIG):
        for mutate in (mutate_json, mutate_bytes):
            read = resealing(folder / RECORD, lambda: hw.load(folder))
            record = (folder / RECORD).read_bytes()
            tally = fuzz(read, folder / name, mutate=mutate, inputs=inputs // 2)
            (folder / RECORD).write_bytes(record)
            # most values of a stock configuration change no size
            assert tally.refused > inputs / (4 if name == RECORD else 20)
    content = tensor_file(folder).read_bytes()
    # of a sealed folder every change of the tensors is refused; some mutations leave a file as it is
    many = max(inputs, 100)
    assert fuzz(lambda: hw.load(folder), tensor_file(folder), inputs=many).read < 0.01 * many + 5
    assert tensor_file(folder).read_bytes() == content
    fuzz(resealing(folder / RECORD, lambda: hw.load(folder)), tensor_file(folder), inputs=inputs)
