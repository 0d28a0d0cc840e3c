"""Packed text of language models: rows, positions, tokenizers, and attention that stays inside a document."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from cases import cases
from headwise.errors import DataError, SettingError
from headwise_lab.data import documents as reading
from headwise_lab.data.subwords import describe_tokenizer
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.packed_text import prepare as preparing
from headwise_lab.packed_text.prepare import TextPreparation, prepare_text
from headwise_lab.packed_text.shards import stack_rows
from headwise_lab.tasks.lm.data import PACKING, LmData, Packer, TextRow, make_labels, number_positions
from headwise_lab.tasks.lm.model import keeps_documents_apart
from headwise_lab.tasks.lm.scores import find_items, find_last_words
from headwise_lab.tasks.lm.task import LmTask
from headwise_lab.tasks.lm.tokens import learn_tokens, read_tokens
from headwise_lab.training.attach import attach_arm
from lab.tasks.lm.lm_toy import TOY, open_toy, prepare_toy, write_documents


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return prepare_toy(tmp_path_factory.mktemp("text"))


@cases("end", [1, 2])
@cases("length", [2, 3, 10])
def test_rows_predict_every_token_of_the_text_exactly_once(length, end):
    packer, stream, rows = Packer(length, start=1, end=end), [1], []
    for number in range(40):
        ids = [10 + (number * 7 + place) % 50 for place in range(1 + number % 13)]
        stream += [*ids, end, 1] if end != 1 else [*ids, 1]
        rows.append(packer.add(ids[:3], ends=len(ids) <= 3))
        if len(ids) > 3:
            rows.append(packer.add(ids[3:], ends=True))
    made = np.concatenate(rows)
    assert made.shape == (packer.rows, length)
    assert [1, *made[:, 1:].flatten().tolist(), *packer.held[1:]] == stream
    assert (made[1:, 0] == made[:-1, -1]).all()
    with pytest.raises(SettingError, match="length is 1"):
        Packer(1, 1, 2)


def test_positions_begin_again_with_each_document_and_its_start_is_not_predicted_from_another():
    rows = np.array([[7, 8, 2, 1, 9, 2, 1, 1], [1, 7, 7, 7, 7, 7, 7, 7]])
    assert number_positions(rows, start=1).tolist() == [[0, 1, 2, 0, 1, 2, 0, 0], list(range(8))]
    assert make_labels(rows, 1, 2)[0].tolist() == [7, 8, 2, -100, 9, 2, -100, -100]
    assert make_labels(rows, 1, 1).tolist() == rows.tolist()


def find_second(row: TextRow) -> int:
    """Where a second document begins in a row; 0 where there is none."""
    begins = np.flatnonzero(row.position_ids[1:] == 0)
    return 1 + int(begins[0]) if len(begins) else 0


@cases("family", ["llama", "qwen3"])
def test_attention_does_not_cross_documents(family, prepared):
    data = open_toy(prepared)
    model, _ = attach_arm(LmTask(), parse_arm("plain"), data, dataclasses.replace(TOY, family=family), seed=3)
    row = next(row for row in map(data.train.__getitem__, range(len(data.train))) if 4 < find_second(row) < 28)
    begin = find_second(row)
    other = TextRow(row.input_ids.copy(), row.position_ids, row.labels)
    other.input_ids[:begin] = 5
    batch = stack_rows([row, other])
    positions = batch["position_ids"]
    with torch.no_grad():
        apart = model(batch["input_ids"], positions)["logits"]
        joined = model(batch["input_ids"], torch.arange(len(row.input_ids)).expand_as(positions))["logits"]
        alone = model(batch["input_ids"][:1, begin:])["logits"]
    assert not torch.allclose(apart[0, 1:begin], apart[1, 1:begin])
    torch.testing.assert_close(apart[0, begin:], apart[1, begin:])
    torch.testing.assert_close(apart[:1, begin:], alone)
    assert not torch.allclose(joined[0, begin:], joined[1, begin:], atol=1e-4), "the model does look back"


def test_a_model_that_looks_across_documents_is_noticed():
    class Crossing(LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, **others):  # noqa: ARG002  this is the fault
            return super().forward(input_ids=input_ids, **others)

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    models_: list[tuple[PreTrainedModel, bool]] = [
        (Crossing(config), False),
        (LlamaForCausalLM(config), True),
        (gpt2, True),
    ]
    for model, apart in models_:
        assert keeps_documents_apart(model, 1) is apart, type(model).__name__


def test_a_learned_tokenizer_restores_its_text_and_counts_its_bytes(prepared, tmp_path):
    words = open_toy(prepared).words
    text = "The old clock <s> ticks\u2014caf\u00e9 \U0001f642\n  end."
    (ids,) = words.encode_batch([text])
    assert words.decode(ids) == text
    assert not set(ids) & set(words.special), "a text that spells a special token is text"
    assert words.bytes[ids].sum() == len(text.encode())
    for name, content in words.files(32).items():
        (tmp_path / name).write_text(content)
    (tmp_path / "tokenizer_config.json").unlink()
    again = read_tokens(tmp_path)
    assert (again.start, again.end, again.to_json()) == (words.start, words.end, words.to_json())


def save_words(folder: Path, special: list[str], config: dict | None) -> Path:
    """A tokenizer of whole words in SentencePiece's manner, with special tokens."""
    vocabulary = {
        token: number for number, token in enumerate([*special, "\u2581the", "\u2581caf\u00e9", "<0x0A>", "\u2581"])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=special[0], byte_fallback=True))
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_what_starts_and_ends_documents_is_found_in_the_users_tokenizer(tmp_path):
    cases = {
        "both": (["[a]", "[b]"], {"bos_token": "[a]", "eos_token": {"content": "[b]"}}, (0, 1)),
        "one": (["[a]", "[b]"], {"bos_token": None, "eos_token": "[b]"}, (1, 1)),
        "names": (["<unk>", "<s>", "</s>"], None, (1, 2)),
        "name": (["<|endoftext|>", "[x]"], {"model_max_length": 5}, (0, 0)),
    }
    for name, (special, config, expected) in cases.items():
        words = read_tokens(save_words(tmp_path / name, special, config))
        assert (words.start, words.end) == expected, name
        assert words.bytes[: len(special)].tolist() == [0] * len(special)
        assert words.bytes[len(special) :].tolist() == [4, 6, 1, 1]
        (tmp_path / name / "tokenizer.json").write_text(words.to_json())
        (tmp_path / name / "tokenizer_config.json").unlink(missing_ok=True)
        again = read_tokens(tmp_path / name)
        assert (again.start, again.end) == expected, name
    with pytest.raises(DataError, match="has no token that starts or ends a document; expected bos_token"):
        read_tokens(save_words(tmp_path / "none", ["[a]"], None))


@cases("most", [1, 2_000])
def test_one_document_is_split_by_its_rows_which_add_up_to_it(most, tmp_path):
    text = "\n".join(json.loads(line)["text"] for line in write_documents(tmp_path / "a", 60).read_text().splitlines())
    (tmp_path / "one.txt").write_text(re.sub(r"\n\s*", "\n", text))
    sizes = TextPreparation(330, 32, shard_bytes=20 * 64, held_out_rows=most)
    prepare_text(PACKING, (tmp_path / "one.txt",), sizes, "f" * 16, tmp_path / "made")
    folder = tmp_path / "made"
    shards = [np.load(path) for path in sorted(folder.glob("train-*.npy"))]
    dev, test = (np.load(folder / f"{split}.npy") for split in ("dev", "test"))
    assert {len(shard) for shard in shards[:-1]} == {20}
    rows = np.concatenate([*shards, dev, test])
    assert len(dev) == len(test) == min(most, round(0.02 * len(rows)))
    words = read_tokens(folder / "tokenizer.json")
    packer = Packer(32, words.start, words.end)
    (ids,) = words.encode_batch([(tmp_path / "one.txt").read_text()])
    assert rows.tolist() == packer.add(ids, ends=True).tolist()
    record = json.loads((folder / "record.json").read_text())
    assert "1 document, too few to split by" in LmData(folder, record, words, None, None).summary()


def test_a_preparation_stopped_in_the_middle_of_a_document_goes_on_to_the_same_shards(tmp_path, monkeypatch):
    files = (write_documents(tmp_path / "docs.jsonl", 250),)
    text = " ".join(json.loads(line)["text"] for line in files[0].read_text().splitlines())
    files[0].write_text(json.dumps({"text": text}))
    monkeypatch.setattr(reading, "LONGEST", 500)
    sizes = TextPreparation(330, 32, shard_bytes=20 * 64, held_out_rows=9)
    prepare_text(PACKING, files, sizes, "f" * 16, tmp_path / "whole")
    write = preparing._write_array

    def stopping(path, rows):
        if path.name == "train-00003.npy" and not path.with_suffix(".stop").exists():
            path.with_suffix(".stop").touch()
            raise KeyboardInterrupt
        write(path, rows)

    monkeypatch.setattr(preparing, "_write_array", stopping)
    monkeypatch.setattr(preparing, "BATCH", 5)
    with pytest.raises(KeyboardInterrupt):
        prepare_text(PACKING, files, sizes, "f" * 16, tmp_path / "again")
    prepare_text(PACKING, files, sizes, "f" * 16, tmp_path / "again")
    (tmp_path / "again" / "train-00003.stop").unlink()
    content = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "again")]
    assert content[0] == content[1]
    assert len(content[0]) > 8


def test_cloze_items_end_with_the_last_word_of_a_sentence(prepared):
    data = open_toy(prepared)
    items = find_items(data.test, data.words)
    assert len(items) > 4
    for item in items:
        word = data.words.decode(item.ids[item.first :])
        before = data.words.decode(item.ids[: item.first])
        assert word.startswith(" ")
        assert word.strip().isalpha()
        assert len(before.split()) >= 8
        assert item.ids[0] == data.words.start
        assert len(item.ids) <= data.test.length
    texts = [data.words.decode(data.test.ids(number)) for number in range(len(data.test))]
    assert all(any(data.words.decode(item.ids[-4:]) + "." in text for text in texts) for item in items)


def test_a_point_inside_a_sentence_ends_none():
    text = " He met Mr. Smith of St. Ives vs. the men, i.e. some, and Dr . Lee saw . She slept! they left? “So.”"
    assert [match[1] for match in find_last_words(text)] == ["saw", "left"]
    lines = " He slept! They left.\nand no. more of it"
    assert [match[1] for match in find_last_words(lines)] == ["slept", "left"]
    assert [match[1] for match in find_last_words(" на улице. и потом пришёл. Он")] == ["пришёл"]


def test_what_is_said_beside_a_tokenizer_is_part_of_what_text_is_prepared_from(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    alone = describe_tokenizer(tmp_path / "tokenizer.json", 300)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    beside = describe_tokenizer(tmp_path / "tokenizer.json", 300)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    assert len({alone, beside, describe_tokenizer(tmp_path / "tokenizer.json", 300)}) == 3
    assert describe_tokenizer(None, 300) == ("learned", 300)


def test_a_tokenizer_is_learned_from_the_text():
    words = learn_tokens(lambda: ["the cat sat"] * 3, 270)
    assert words.vocabulary_size <= 270
    assert words.names == ("<s>", "</s>")
