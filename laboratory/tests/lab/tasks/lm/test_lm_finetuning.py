"""Fine-tuning of a folder of transformers: whole or with LoRA, what it begins with, leaves, and refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    RoFormerConfig,
    RoFormerForCausalLM,
)

from cases import cases
from headwise.errors import DataError, LayoutError, SettingError
from headwise_lab.compare import require_fits
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.scale import ScaleOptions
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.frozen.open import open_frozen
from headwise_lab.options import choose_scale, parse_lora
from headwise_lab.tasks.lm.attention import measure_copying, measure_sinks
from headwise_lab.tasks.lm.task import LmTask
from headwise_lab.training.attach import attach_arm
from headwise_lab.training.train import train_run
from headwise_lab.training.trained import load_trained
from headwise_lab.tune import Tuning, draw_arm
from lab.command import call, refused
from lab.stopping import assert_goes_on_to_the_same_bits
from lab.tasks.lm.lm_toy import TOY, open_toy, prepare_toy

TASK = LmTask()
IDS = torch.tensor([[1, 40, 41, 42, 43, 9]])


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with text, text prepared, and a GPT-2 with its tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    words = open_toy(prepare_toy(folder)).words
    torch.manual_seed(4)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(vocab_size=words.vocabulary_size, **sizes)).save_pretrained(folder / "gpt2")
    for name, text in words.files(32).items():
        (folder / "gpt2" / name).write_text(text)
    return folder


def settings(place: Path, arm: str, **changes) -> RunSettings:
    scale = dataclasses.replace(TOY, pretrained=place / "gpt2", steps=8, **changes)
    return RunSettings("lm", scale, parse_arm(arm), seed=3, data=place / "docs.jsonl", cache=place / "cache")


def compute_logits(model) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@cases("lora", [0, 4])
def test_a_run_begins_with_the_model_of_the_folder(lora, place):
    chosen = settings(place, "plain", lora=lora)
    data = TASK.load(chosen.data, chosen.scale, chosen.cache)
    model, _ = attach_arm(TASK, chosen.arm, data, chosen.scale, seed=3)
    assert torch.equal(
        compute_logits(model.network), compute_logits(AutoModelForCausalLM.from_pretrained(place / "gpt2"))
    )
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    if lora:
        assert all("lora_" in name for name in trained)
        assert {one.shape[0] for name, one in model.named_parameters() if "lora_A" in name} == {4}
    else:
        assert len(trained) == len(list(model.parameters()))


@pytest.mark.full
@pytest.mark.parametrize("arm", ["plain", "svgd:alpha=0.5", "cka", "em:layers=0"])
@pytest.mark.parametrize("lora", [0, 4])
def test_the_folder_of_a_run_computes_what_its_model_does(lora, arm, place, tmp_path):
    chosen = settings(place, arm, lora=lora)
    train_run(chosen, tmp_path / "run")
    model = load_trained(chosen, tmp_path / "run").model
    found = compute_logits(model.network)
    folder = tmp_path / "run" / "model"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert (folder / "headwise.json").is_file() == arm.startswith("em")
    torch.testing.assert_close(compute_logits(loaded), found, rtol=1e-4, atol=1e-5)
    assert not torch.equal(found, compute_logits(AutoModelForCausalLM.from_pretrained(place / "gpt2")))
    assert AutoTokenizer.from_pretrained(folder)("The old clock").input_ids[0] == 1
    said = [
        model.network.generate(IDS, max_new_tokens=5, do_sample=False, use_cache=cached) for cached in (True, False)
    ]
    assert torch.equal(*said)
    # and another run begins with this one
    again = dataclasses.replace(chosen, scale=dataclasses.replace(chosen.scale, pretrained=tmp_path / "run", lora=0))
    data = TASK.load(again.data, again.scale, again.cache)
    torch.testing.assert_close(compute_logits(TASK.model(data, again.scale).network), found, rtol=1e-4, atol=1e-5)
    assert data.fingerprint != TASK.load(chosen.data, chosen.scale, chosen.cache).fingerprint


def test_a_fine_tuned_run_with_gates_is_opened_as_the_model_it_began_with(place, tmp_path):
    begun = Path(shutil.copytree(place / "gpt2", tmp_path / "gpt2"))
    for name, change in {"config": {"dtype": "bfloat16"}, "tokenizer_config": {"model_max_length": 19}}.items():
        path = begun / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    chosen = settings(place, "gated-elements")
    chosen = dataclasses.replace(chosen, scale=dataclasses.replace(chosen.scale, pretrained=begun))
    train_run(chosen, tmp_path / "run")
    opened, trained = open_frozen(tmp_path / "run"), load_trained(chosen, tmp_path / "run").model
    assert type(opened.model).__name__ == "GPT2Model"
    batch = next(iter(opened.read(["The old clock ticks"])))
    with torch.no_grad():
        assert torch.equal(opened.run(batch), trained.network.base_model(**batch.inputs).last_hidden_state)
    assert {one.dtype for one in opened.model.parameters()} == {torch.float32}
    assert opened.longest == "19 tokens", "as the tokenizer of the folder says"
    config = tmp_path / "run" / "start" / "config.json"
    config.write_text('{"model_type": "gpt2", "n_layer": 3}')
    with pytest.raises(DataError, match=r"start.config\.json was changed since it was written"):
        open_frozen(tmp_path / "run")


@torch.no_grad()
def test_measures_of_attention_are_left_out_where_weights_cannot_be_read(place):
    data = open_toy(place / "prepared")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    # it rotates its values, so that weights times values are not what its heads put out
    config = RoFormerConfig(vocab_size=data.words.vocabulary_size, rotary_value=True, is_decoder=True, **sizes)
    model = RoFormerForCausalLM(config).eval()
    assert set(measure_copying(model, data.words, 32)) == {"copied"}
    assert measure_sinks(model, data.dev) == {}


@pytest.mark.full
def test_a_run_with_adapters_goes_on_to_the_same_bits(place, tmp_path):
    assert_goes_on_to_the_same_bits(settings(place, "svgd", lora=4), tmp_path, stopped=3)


def test_a_tokenizer_that_could_not_be_saved_with_the_model_is_refused_before_training(place, tmp_path):
    folder = Path(shutil.copytree(place / "gpt2", tmp_path / "odd"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "tokenizer_class": 3}')
    chosen = settings(place, "plain")
    scale = dataclasses.replace(chosen.scale, pretrained=folder)
    with pytest.raises(DataError, match="odd holds no tokenizer that transformers can load"):
        TASK.load(chosen.data, scale, tmp_path / "cache")


def test_what_cannot_be_fine_tuned_is_refused(place, tmp_path):
    chosen = settings(place, "plain")

    def load(folder: Path, data: Path | None = None, **changes):
        scale = dataclasses.replace(chosen.scale, pretrained=folder, **changes)
        return scale, TASK.load(data or chosen.data, scale, tmp_path / "cache")

    with pytest.raises(DataError, match="holds no model"):
        load(tmp_path)
    with pytest.raises(DataError, match="gpt2 has positions for 32 tokens, and texts are cut at 40"):
        load(place / "gpt2", length=40)
    other = shutil.copytree(place / "gpt2", tmp_path / "other")
    (other / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"other has no tokenizer\.json; write one with AutoTokenizer"):
        load(other)
    text = json.loads((place / "gpt2" / "tokenizer.json").read_text())
    text["model"]["merges"] = text["model"]["merges"][:-1]
    (other / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(DataError, match="was prepared with another tokenizer than"):
        load(other, place / "prepared")
    assert load(place / "gpt2", place / "prepared")[1].record["tokenizer"] == "learned"
    config = json.loads((place / "gpt2" / "config.json").read_text())
    small = shutil.copytree(place / "gpt2", tmp_path / "small")
    GPT2LMHeadModel(GPT2Config(**{**config, "vocab_size": 99})).save_pretrained(small)
    scale, data = load(small)
    with pytest.raises(DataError, match="small has vectors for 99 token ids, and its tokenizer has"):
        TASK.model(data, scale)
    (small / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read as tensors"):
        TASK.model(data, scale)


@cases(
    ("arm", "error", "said"),
    [
        ("muon-heads", LayoutError, "their weights are frozen, as under LoRA"),
        ("talking", LayoutError, "holds adapters of peft, which would not save the matrices"),
        ("gated", LayoutError, "holds adapters of peft, which would not save gates"),
        ("mixture", LayoutError, "holds adapters of peft, which would not save gates"),
        ("plain:dropout=0.2", SettingError, "has none or is that of a folder; leave it out"),
        ("paired", SettingError, r"attention computes nothing that the model of .*gpt2 learned"),
        ("wider", SettingError, r"are drawn anew and forget what the model of .*gpt2 learned"),
    ],
)
def test_arms_that_need_the_whole_model_are_refused_under_adapters(arm, error, said, place, tmp_path):
    with pytest.raises(error, match=said):
        train_run(settings(place, arm, lora=4), tmp_path / "run")


def test_an_arm_that_does_not_fit_adapters_is_refused_before_anything_is_trained(place):
    chosen = settings(place, "plain", lora=4)
    data = TASK.load(chosen.data, chosen.scale, chosen.cache)
    for arm in ("muon", "talking"):
        with pytest.raises(SettingError, match=f"arm {arm} does not fit the model"):
            require_fits(parse_arm(arm), TASK, data, chosen.scale)


def test_a_comparison_is_no_model_and_a_run_of_one_is_named(place, tmp_path):
    run_folder.write_json(tmp_path / "comparison.json", {"task": "lm"})
    with pytest.raises(DataError, match=r"is a comparison of lm; expected the folder of a causal model.*seed-0"):
        TASK.load(place / "docs.jsonl", dataclasses.replace(TOY, pretrained=tmp_path), place / "cache")


def test_the_command_names_the_rank_as_peft_does(place):
    options = ScaleOptions("demo", sizes=parse_lora("lm", "r=8, alpha=24"), pretrained=place / "gpt2")
    scale = choose_scale("lm", options)
    assert (getattr(scale, "lora", 0), getattr(scale, "lora_alpha", 0)) == (8, 24)
    assert parse_lora("lm", None) == ()
    for wrong in ("8", "rank=8", "r=", "", "r=0", "r=-1", "alpha=16", "r=8,r=4", "r=8,alpha=0"):
        with pytest.raises(typer.BadParameter, match="expected r=RANK"):
            parse_lora("lm", wrong)
    with pytest.raises(typer.BadParameter, match="task logic takes no --lora; omit it"):
        parse_lora("logic", "r=8")


def test_sizes_of_the_model_are_the_folders(place):
    for size in ("layers=7", "dropout=0.3", "vocabulary_size=300"):
        with pytest.raises(SettingError, match=f"--set {size}: .* is that of the model in .*gpt2; omit it"):
            choose_scale("lm", ScaleOptions("demo", sizes=(size,), pretrained=place / "gpt2"))
    tuning = Tuning("lm", "cka", 3, 5, dataclasses.replace(TOY, pretrained=place / "gpt2"), place / "tuned")
    assert [draw_arm(tuning, index).dropout for index in range(3)] == [None] * 3
    assert draw_arm(dataclasses.replace(tuning, scale=TOY), 2).dropout is not None


def test_text_is_prepared_with_the_tokenizer_of_a_folder_and_other_sizes(place, tmp_path, capsys):
    model, out = str(place / "gpt2"), str(tmp_path / "prepared")
    given = ("--data", str(place / "docs.jsonl"), "--model", model, "--set", "length=32")
    assert call("prepare", "lm", *given, "--out", out) == 0
    said = f"headwise compare lm --scale demo --pretrained {model} --set length=32 --data {out}"
    assert said in " ".join(capsys.readouterr().out.split())
    scale = choose_scale("lm", ScaleOptions("demo", sizes=("length=32",), pretrained=place / "gpt2"))
    assert TASK.load(tmp_path / "prepared", scale, None).train.length == 32
    other = str(place / "prepared" / "tokenizer.json")
    assert "has its own tokenizer; omit --tokenizer" in refused(
        capsys, "prepare", "lm", *given, "--tokenizer", other, "--out", str(tmp_path / "b")
    )
    longer = (*given[:-1], "length=64")
    assert "has positions for 32 tokens" in refused(capsys, "prepare", "lm", *longer, "--out", str(tmp_path / "b"))
    assert not (tmp_path / "b").exists()
