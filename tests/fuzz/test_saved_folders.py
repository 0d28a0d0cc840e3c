"""Mutated folders of `headwise.save`: a model or a sentence, within two seconds and without much memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import headwise as hw
from fuzz.mutate import INPUTS, Mutation, fuzz, mutate_bytes, mutate_json
from lab.sealing import resealing
from routing.hostile import CONFIG, RECORD, tensor_file
from routing.test_hostile_folders import make_bert

SLOW = pytest.param(INPUTS, marks=pytest.mark.slow)


def make_pruned() -> BertModel:
    """A model whose record says how many rows each layer has left."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 8, "num_attention_heads": 4, "intermediate_size": 8, "max_position_embeddings": 8}
    bert = BertModel(BertConfig(vocab_size=20, num_hidden_layers=2, **sizes)).eval()
    heads = hw.find_heads(bert)
    hw.prune(heads, {heads.sites[0].name: [1], heads.sites[1].name: [0, 2]})
    return bert


@pytest.fixture(scope="module", params=[make_bert, make_pruned])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "bert"
    request.param().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "bert")


@pytest.mark.parametrize("inputs", [100, SLOW])
@pytest.mark.parametrize("mutate", [mutate_json, mutate_bytes])
@pytest.mark.parametrize("name", [RECORD, CONFIG])
def test_a_mutated_record(folder: Path, name: str, inputs: int, mutate: Mutation):
    read = resealing(folder / RECORD, lambda: hw.load(folder))
    tally = fuzz(read, folder / name, mutate=mutate, inputs=inputs // 2)
    # most values of a stock configuration change no size
    assert tally.refused > inputs / (4 if name == RECORD else 20)


@pytest.mark.parametrize("inputs", [100, SLOW])
def test_mutated_tensors(folder: Path, inputs: int):
    fuzz(resealing(folder / RECORD, lambda: hw.load(folder)), tensor_file(folder), inputs=inputs)


@pytest.mark.parametrize("inputs", [100, SLOW])
def test_of_a_sealed_folder_every_change_of_the_tensors_is_refused(whole: Path, tmp_path: Path, inputs: int):
    folder = shutil.copytree(whole, tmp_path / "bert")
    content = tensor_file(folder).read_bytes()
    tally = fuzz(lambda: hw.load(folder), tensor_file(folder), inputs=inputs)
    # some mutations leave a file as it is
    assert tally.read < 0.01 * inputs + 5
    assert tensor_file(folder).read_bytes() == content
