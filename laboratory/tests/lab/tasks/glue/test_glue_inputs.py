"""The files of GLUE's sets and the models to fine-tune: what is read, answered for the server, and refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2Model,
    MarianConfig,
    MarianMTModel,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    RoFormerConfig,
    RoFormerModel,
    T5Config,
    T5EncoderModel,
)

from cases import cases
from headwise.errors import DataError, SettingError
from headwise.texts.pretrained import require_whole
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.frozen.open import open_frozen
from headwise_lab.tasks.glue.files import GLUE, find_missing_file, find_set, format_submission, read_split
from headwise_lab.training.start import Classifier, find_start, require_positions
from headwise_lab.training.train import train_run
from lab.tasks.glue.glue_toy import PUBLISHED, TASK, sentence, settings, toy, toy_words, write_glue


def altered(model: Path, place: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """A copy of a model's folder with other parameters."""
    shutil.copytree(model, place)
    save_file(change(load_file(model / "model.safetensors")), place / "model.safetensors", {"format": "pt"})
    return place


QUERY = "electra.encoder.layer.1.attention.self.query.weight"


@cases(
    ("change", "said"),
    [
        (lambda kept: {f"module.{name}": value for name, value in kept.items()}, r"has no 'electra\.embeddings"),
        (lambda kept: {name: value for name, value in kept.items() if name != QUERY}, f"has no '{QUERY}'"),
        (lambda kept: {**kept, QUERY: torch.zeros(16, 8)}, f"has another shape of '{QUERY}'"),
        (lambda kept: {**kept, QUERY: kept[QUERY] * float("nan")}, f"'{QUERY}' holds numbers that are not finite"),
    ],
)
def test_a_model_that_is_not_whole_is_refused(change, said, model, tmp_path):
    place = altered(model, tmp_path / "other", change)
    with pytest.raises(DataError, match=said):
        Classifier(place, 2)
    with pytest.raises(DataError, match=r"has no '(encoder|embeddings)|not finite|cannot be loaded by transformers"):
        open_frozen(place)


def written(model: Any, folder: Path) -> Path:
    """A folder of a model with the toy's tokenizer."""
    model.save_pretrained(folder)
    for name, text in toy_words().files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


SEQ2SEQ: dict[str, Any] = {"d_model": 16, "vocab_size": 120, "decoder_start_token_id": 0, "pad_token_id": 0}


def test_what_a_model_makes_itself_or_is_not_read_of_it_does_not_lack(tmp_path):
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    marian = MarianConfig(**SEQ2SEQ, **sizes, max_position_embeddings=32, encoder_ffn_dim=8, decoder_ffn_dim=8)
    t5 = T5Config(**SEQ2SEQ, d_kv=8, d_ff=8, num_layers=1, num_heads=2)
    folders = [written(MarianMTModel(marian), tmp_path / "marian"), written(T5EncoderModel(t5), tmp_path / "t5")]
    flagged = written(T5EncoderModel(t5), tmp_path / "flagged")
    config = json.loads((flagged / "config.json").read_text())
    (flagged / "config.json").write_text(json.dumps({**config, "is_encoder_decoder": True}))
    for folder in [*folders, flagged]:
        frozen = open_frozen(folder)
        (batch,) = frozen.read([sentence(3)])
        with torch.no_grad():
            assert frozen.run(batch).shape[-1] == 16
    with pytest.raises(DataError, match=r"has no 'transformer.decoder|has no 'decoder"):
        Classifier(folders[1], 2)


def test_numbers_of_one_byte_are_looked_at(tmp_path):
    small: Any = torch.nn.Linear(2, 2)
    small.config = PreTrainedConfig()
    small.weight = torch.nn.Parameter(small.weight.to(torch.float8_e4m3fn), requires_grad=False)
    said: dict[str, Any] = {"missing_keys": [], "mismatched_keys": []}
    require_whole(tmp_path, small, said)
    small.weight = torch.nn.Parameter(torch.full((2, 2), float("nan")).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(DataError, match="'weight' holds numbers that are not finite"):
        require_whole(tmp_path, small, said)


def test_a_model_of_unknown_kind_is_refused_in_a_sentence(model, tmp_path):
    shutil.copytree(model, tmp_path / "odd")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**config, "model_type": "odd"}))
    with pytest.raises(DataError, match="cannot be loaded by transformers"):
        require_positions(tmp_path / "odd", 32)
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": -1}))
    require_positions(tmp_path / "odd", 512)


def test_a_folder_without_a_tokenizer_is_refused(model, glue, tmp_path):
    shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    said = "holds no tokenizer with a vocabulary; save it with the model"
    with pytest.raises(DataError, match=said):
        TASK.load(glue / "RTE", toy(tmp_path / "bare"), None)
    with pytest.raises(DataError, match=said):
        open_frozen(tmp_path / "bare")


def test_texts_of_more_tokens_than_positions_are_refused(model, glue):
    with pytest.raises(DataError, match="has positions for 64 tokens, and texts are cut at 65; give --set length=64"):
        TASK.load(glue / "RTE", toy(model, length=65), None)
    assert TASK.load(glue / "RTE", toy(model, length=64), None).length == 64


def test_a_model_without_a_token_for_padding_is_fine_tuned_in_batches(glue, tmp_path):
    words = toy_words()
    config = GPT2Config(vocab_size=words.vocabulary_size, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    GPT2Model(config).save_pretrained(tmp_path / "gpt")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words.tokenizer, unk_token="[UNK]", eos_token="[SEP]")
    tokenizer.save_pretrained(tmp_path / "gpt")
    scale = toy(tmp_path / "gpt", epochs=1)
    train_run(settings("plain", glue / "RTE", scale), tmp_path / "run")
    assert (tmp_path / "run" / "result.json").is_file()


def test_a_run_ends_without_measures_of_attention_where_weights_cannot_be_read(glue, tmp_path):
    words = toy_words()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    # it rotates its values, so that weights times values are not what its heads put out
    config = RoFormerConfig(
        vocab_size=words.vocabulary_size,
        max_position_embeddings=64,
        pad_token_id=words.padding,
        rotary_value=True,
        **sizes,
    )
    folder = written(RoFormerModel(config), tmp_path / "roformer")
    train_run(settings("plain", glue / "RTE", toy(folder, epochs=1)), tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["position_js"] is None
    assert 1 <= result["effective_heads"] <= 2
    (site,) = result["sites"].values()
    assert "position_js" not in site
    assert site["effective_heads"] == result["effective_heads"]


@cases("arm", ["differential", "wider"])
def test_arms_that_undo_what_the_model_learned_are_refused(arm, model, glue):
    scale = toy(model)
    data = TASK.load(glue / "RTE", scale, None)
    with pytest.raises(SettingError, match=rf"arm {arm} .* the model of .* learned; leave it out"):
        TASK.initial_model(parse_arm(arm), data, scale, 0)


def test_every_set_is_read_in_its_published_form(tmp_path):
    forms = {
        "CoLA": ["gj04\t1\t\tA sentence.", "gj04\t0\t*\tAnother sentence the."],
        "SST-2": ["sentence\tlabel", "fine\t1", "poor\t0"],
        "MRPC": ["\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", '1\t5\t6\tone "word\ttwo', "0\t5\t6\ta\tb"],
        "STS-B": ["index\tsentence1\tsentence2\tscore", "0\ta\tb\t2.500", "1\ta\tb\t5"],
        "QQP": [
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
            "7\t1\t2\ta\tb\t1",
            "8\t1\t2\tbroken",
            "9\t1\t2\ta\tb\t0",
        ],
        "MNLI": ["index\tsentence1\tsentence2\tgold_label", "0\ta\tb\tneutral", "1\ta\tb\tcontradiction"],
        "QNLI": ["index\tquestion\tsentence\tlabel", "0\ta\tb\tentailment", "1\ta\tb\tnot_entailment"],
        "RTE": ["index\tsentence1\tsentence2\tlabel", "0\ta\tb\tentailment", "1\ta\tb\tnot_entailment"],
    }
    assert set(forms) == set(GLUE)
    for name, lines in forms.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        found, left_out = read_split(tmp_path / name, "train")
        assert len(found) == 2, name
        assert left_out == (name == "QQP")
        assert all(len(example.texts) == len(GLUE[name].texts) for example in found)
    assert read_split(tmp_path / "MRPC", "train")[0][0].texts == ('one "word', "two")
    assert [example.label for example in read_split(tmp_path / "MRPC", "train")[0]] == ["1", "0"]


@cases(
    ("name", "line", "said"),
    [
        ("RTE", "9\ta\tb\tmaybe", r"line 3: the label is 'maybe'; expected entailment or not_entailment"),
        ("RTE", "9\ta", r"line 3: a text is missing or empty; expected sentence1, sentence2"),
        ("STS-B", "9\ta\tb\t5.1", r"line 3: the score is '5\.1'; expected a number from 0 to 5"),
        ("STS-B", "9\ta\tb", r"line 3: the score is ''"),
    ],
)
def test_a_bad_line_is_named(name, line, said, tmp_path):
    column = "label" if name == "RTE" else "score"
    good = "entailment" if name == "RTE" else "1"
    (tmp_path / name).mkdir()
    lines = [f"index\tsentence1\tsentence2\t{column}", f"0\ta\tb\t{good}", line]
    (tmp_path / name / "train.tsv").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=rf"train\.tsv, {said}"):
        read_split(tmp_path / name, "train")


def test_folders_that_are_no_set_or_lack_a_file_are_refused(glue, model, tmp_path):
    with pytest.raises(DataError, match="is none of GLUE's sets; expected a folder named CoLA, SST-2"):
        find_set(tmp_path)
    (tmp_path / "QNLI").mkdir()
    (tmp_path / "QNLI" / "dev.tsv").touch()
    assert find_missing_file(tmp_path / "QNLI") == "train.tsv"
    with pytest.raises(DataError, match=r"lacks train\.tsv, plain or \.gz; QNLI cannot be fine-tuned"):
        TASK.load(tmp_path / "QNLI", toy(model), None)
    with pytest.raises(DataError, match="glue needs --data: the folder of one of GLUE's sets"):
        TASK.load(None, toy(model), None)
    with pytest.raises(DataError, match="glue needs --pretrained: a folder of Hugging Face"):
        TASK.load(glue / "RTE", dataclasses.replace(toy(model), pretrained=None), None)
    with pytest.raises(DataError, match="holds no model; expected a folder of Hugging Face"):
        find_start(tmp_path)


def test_a_test_file_is_read_before_anything_is_trained_and_says_nothing_of_the_data(model, tmp_path):
    glue = write_glue(tmp_path)
    known = TASK.load(glue / "RTE", toy(model), None).fingerprint
    path = glue / "RTE" / "test.tsv"
    good = path.read_text()
    path.write_text(good + "9\tonly one\n")
    with pytest.raises(DataError, match=r"test\.tsv, line 8: a text is missing or empty"):
        TASK.load(glue / "RTE", toy(model), None)
    path.write_text(good + "9\tone\ttwo\n")
    assert TASK.load(glue / "RTE", toy(model), None).fingerprint == known
    path.write_text(good + "9\tone\t\ttwo\n")
    with pytest.raises(DataError, match=r"test\.tsv, line 8: 4 fields, and 3 columns; a text holds a tab"):
        TASK.load(glue / "RTE", toy(model), None)
    path.write_text(good)
    path.with_name("test.tsv.gz").touch()
    with pytest.raises(DataError, match=r"holds both test\.tsv and test\.tsv\.gz"):
        TASK.load(glue / "RTE", toy(model), None)


def test_every_line_of_a_test_file_is_answered(tmp_path):
    (tmp_path / "QQP").mkdir()
    lines = ["id\tquestion1\tquestion2", "4\ta\tb", "5\t\tb", "6\ta", "7\ta\tb"]
    (tmp_path / "QQP" / "test.tsv").write_text("\n".join(lines) + "\n")
    found, left_out = read_split(tmp_path / "QQP", "test")
    assert ([example.index for example in found], left_out) == (["4", "5", "6", "7"], 0)
    assert format_submission(GLUE["QQP"], found, [1, 0, 1, 0]).splitlines()[2:4] == ["5\t0", "6\t1"]


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="HEADWISE_DATA has no GLUE")
def test_the_published_files_are_read_whole():
    sizes = {
        "CoLA": (8551, 1043, 1063),
        "MRPC": (3668, 408, 1725),
        "STS-B": (5749, 1500, 1379),
        "RTE": (2490, 277, 3000),
    }
    for name, counts in sizes.items():
        found = [len(read_split(PUBLISHED / name, split)[0]) for split in ("train", "dev", "test")]
        assert tuple(found) == counts
        assert not find_missing_file(PUBLISHED / name)
    assert find_missing_file(PUBLISHED / "QNLI") == "train.tsv"
