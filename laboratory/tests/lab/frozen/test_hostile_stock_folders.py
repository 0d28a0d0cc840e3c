"""Folders of Hugging Face that others changed so that reading them would fill the memory, wait or fail natively."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertModel

from fuzz.mutate import BYTES, limit_memory, ran_out, read_in_time
from headwise.atomic import seal_folder
from headwise.errors import DataError
from headwise.texts.transformer import open_folder
from lab.command import refused
from lab.tasks.classification.probing_toy import WORDS, write_bert
from routing.hostile import Large, pack

INDEX, WEIGHTS, BIN = "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"
TEXTS = [" ".join(WORDS[5:12]), "a" * 30]
Change = Callable[[Path], object]


def edit(name: str, **values: Any) -> Change:
    """Set keys of a file of JSON."""

    def change(folder: Path) -> None:
        kept = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(kept | values))

    return change


def config(**values: Any) -> Change:
    return edit("config.json", **values)


def tokenizer(**values: Any) -> Change:
    return edit("tokenizer.json", **values)


def put_far(folder: Path) -> None:
    """Give a word of a tokenizer an id far behind the others."""
    kept = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokenizer(model=kept | {"vocab": kept["vocab"] | {"zebra": HUGE}})(folder)


def normalizer(*steps: dict[str, Any]) -> Change:
    return tokenizer(normalizer={"type": "Sequence", "normalizers": list(steps)})


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def split(pattern: str) -> Change:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return tokenizer(pre_tokenizer=step)


def template(**values: Any) -> Change:
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    single = [{"Sequence": {"id": "A", "type_id": 0}}]
    made = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {}}
    return tokenizer(post_processor=made | values)


def shard(name: Any, place: Change | None = None) -> Change:
    """Name the weights in an index, as `name`."""

    def change(folder: Path) -> None:
        names = list(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
        if place is not None:
            place(folder)
        written = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
        (folder / INDEX).write_text(json.dumps(written))

    return change


def put_twice(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    places = {}
    for number in (1, 2):
        save_file(tensors, folder / f"{number}.safetensors", {"format": "pt"})
        places |= dict.fromkeys(list(tensors)[number - 1 :: 2], f"{number}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def save_bin(**more: Any) -> Change:
    def change(folder: Path) -> None:
        torch.save(load_file(folder / WEIGHTS) | more, folder / BIN)
        (folder / WEIGHTS).unlink()

    return change


def save_later(folder: Path) -> None:
    """Save with a protocol of pickle that takes the names of what it makes from anywhere."""
    torch.save(load_file(folder / WEIGHTS), folder / BIN, pickle_protocol=4)
    (folder / WEIGHTS).unlink()


def change_sealed(folder: Path) -> None:
    seal_folder(folder)
    config(initializer_range=0.5)(folder)


def save_packed(folder: Path) -> None:
    save_bin(more=torch.zeros(1 << 20))(folder)
    pack(folder / BIN)


def put(name: str, make: Callable[[Path], object]) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def pad(**values: Any) -> Change:
    made = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    return tokenizer(padding=made | {"pad_type_id": 0, "pad_token": "[PAD]"} | values)


def special(**values: Any) -> dict[str, Any]:
    return {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]} | values}


HUGE = 10**9
PAIR = {"single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}
# By name, the change and what the message says.
FOLDERS: dict[str, tuple[Change, str]] = {
    "labels": (config(num_labels=HUGE), "num_labels is 1000000000; expected 0 to 65,536, as"),
    "labels as a fraction": (config(num_labels=1e9), "num_labels is 1000000000.0"),
    "names of labels": (config(id2label={str(i): "x" for i in range(10**5)}), "id2label is 100000"),
    "positions": (config(max_position_embeddings=2 * 10**7), "max_position_embeddings is 20,000,000, which is of a"),
    "a vocabulary": (config(vocab_size=HUGE), "vocab_size is 1,000,000,000"),
    "a width": (config(hidden_size=9 * 10**6), "hidden_size is 9,000,000"),
    "a feed-forward width": (config(intermediate_size=10**6), "intermediate_size is 1,000,000"),
    "kinds of tokens": (config(type_vocab_size=10**7), "type_vocab_size is 10,000,000"),
    "layers": (config(num_hidden_layers=HUGE), "num_hidden_layers is 1000000000; expected 0 to 1,000"),
    "a thousand layers": (config(num_hidden_layers=1000), "num_hidden_layers is 1,000, which is of a model"),
    "heads": (config(num_attention_heads=HUGE), "num_attention_heads is 1000000000"),
    "negative heads": (config(num_attention_heads=-4), "config.json: num_attention_heads is -4; expected 0 to"),
    "a negative width": (config(hidden_size=-1), "config.json: hidden_size is -1; expected 0 to"),
    "a negative vocabulary": (config(vocab_size=-1), "config.json: vocab_size is -1; expected 0 to"),
    "negative layers": (config(num_hidden_layers=-1), "config.json: num_hidden_layers is -1; expected 0 to"),
    "a negative window": (config(sliding_window=-1), "config.json: sliding_window is -1; expected at least 1"),
    "a window of nothing": (config(sliding_window=0), "config.json: sliding_window is 0; expected at least 1"),
    "a rotary factor of 0": (
        config(rope_scaling={"rope_type": "linear", "factor": 0.0}),
        "config.json: rope_scaling.factor is 0.0; expected a number above 0",
    ),
    "one of many rotary factors": (
        config(text_config={"rope_parameters": {"full_attention": {"long_factor": [1.0, -2.0]}}}),
        "config.json: text_config.rope_parameters.full_attention.long_factor is -2.0; expected a number above 0",
    ),
    "a rotary base of 0": (config(rope_theta=0), "config.json: rope_theta is 0; expected a number above 0"),
    "a part": (config(text_config={"num_labels": HUGE}), "text_config.num_labels is 1000000000"),
    "a part in a list": (config(parts=[{"n_layer": HUGE}]), "parts.n_layer is 1000000000"),
    "another file of weights": (config(transformers_weights="../x.safetensors"), "names the file '../x.safetensors'"),
    "a shard above": (shard("../outside.safetensors"), "names the file '../outside.safetensors'"),
    "a shard by its whole path": (shard("/dev/zero"), "names the file '/dev/zero'"),
    "a shard that is a number": (shard(3), "3 is missing"),
    "a shard that is missing": (shard("lost.safetensors"), "lost.safetensors is missing"),
    "a shard that is a folder": (shard("x", lambda folder: (folder / "x").mkdir()), "x is a folder"),
    "a shard that is a pipe": (shard("x", lambda folder: os.mkfifo(folder / "x")), "x is a pipe"),
    "a shard that is a device": (shard("x", lambda folder: (folder / "x").symlink_to("/dev/zero")), "x is a device"),
    "a shard that is a link out": (
        shard("x.safetensors", lambda folder: (folder / "x.safetensors").symlink_to("../outside.safetensors")),
        "is a link out of",
    ),
    "a shard that is a link to itself": (shard("x", lambda folder: (folder / "x").symlink_to("x")), "cannot be read"),
    "a shard in a linked folder": (
        shard("in/outside.safetensors", lambda folder: (folder / "in").symlink_to("..")),
        "is a link out of",
    ),
    "an index without names": (shard(None), "None is missing"),
    "tensors in two shards": (put_twice, "both hold the tensor"),
    "a packed archive": (save_packed, "is packed, so that loading it may fill the memory"),
    "a pickle of something large": (save_bin(more=Large()), "holds '__builtin__ bytearray', which is no tensor"),
    "a pickle of a later protocol": (save_later, "holds 'STACK_GLOBAL', which is no tensor"),
    "a sealed folder that was changed": (change_sealed, "config.json was changed since it was written"),
    "no archive": (put(WEIGHTS, lambda path: path.with_name(BIN).write_bytes(b"x" * 99)), "is no file of torch.save"),
    "a pipe for the generation": (put("generation_config.json", os.mkfifo), "generation_config.json is a pipe"),
    "a pipe for the tokenizer": (put("tokenizer.json", os.mkfifo), "tokenizer.json is a pipe"),
    "a pipe for the weights": (put(WEIGHTS, os.mkfifo), "model.safetensors is a pipe"),
    "a hole of 100 GB": (
        lambda folder: os.truncate(folder / "tokenizer.json", 100 << 30),
        "tokenizer.json has 107,374,182,400 bytes",
    ),
    "extra tokens": (
        edit("tokenizer_config.json", tokenizer_class="T5Tokenizer", extra_ids=HUGE),
        "extra_ids is 1000000000; expected at most 100,000",
    ),
    "a text of doubling": (normalizer(*[replace("a", "aa")] * 30), "its normalizer makes 1.07e+09 characters of one"),
    "a text of trebling, after a trial": (
        normalizer(*[replace("b", "bbb")] * 5),
        "its normalizer makes 62,208 characters of 256",
    ),
    "sequences in sequences": (
        normalizer(*[{"type": "Sequence", "normalizers": [replace("a", "bb"), replace("b", "aa")]}] * 9),
        "its normalizer makes",
    ),
    "a long replacement": (normalizer(replace("a", "x" * 10**6)), "its normalizer makes 1e+06 characters"),
    "a replacement of nothing": (normalizer(replace("x*", "y" * 5000, "Regex")), "its normalizer makes"),
    "a long beginning": (normalizer({"type": "Prepend", "prepend": "x" * 10**6}), "and adds 1e+06"),
    "a decoder that grows": (
        tokenizer(decoder={"type": "Sequence", "decoders": [replace("a", "aaa")] * 20}),
        "its decoder makes",
    ),
    "a pattern that goes back and forth": (split("(a+)+$"), "fails on a text (Onig: Regex search error"),
    "a replaced pattern that does": (normalizer(replace(r"(\s+)+\d", "b", "Regex")), "Regex search error"),
    "pieces of no length": (tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}), "chunk size must be"),
    "a table of nothing": (normalizer({"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "precompiled_charsmap"),
    "an id of no vocabulary": (put_far, "its largest id is 1,000,000,000"),
    "padding": (pad(strategy={"Fixed": HUGE}), "pads each text to 1,000,000,000 tokens"),
    "padding to a multiple": (pad(pad_to_multiple_of=HUGE), "pads each text to 1,000,000,000 tokens"),
    "a template that repeats": (template(single=[{"Sequence": {"id": "A", "type_id": 0}}] * 1000), "1,000 times"),
    "templates that repeat": (
        tokenizer(
            post_processor={
                "type": "Sequence",
                "processors": [
                    {
                        "type": "TemplateProcessing",
                        "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 5,
                        "pair": [{"Sequence": {"id": part, "type_id": 0}} for part in "AB"],
                        "special_tokens": {},
                    }
                ]
                * 5,
            }
        ),
        "repeats a text 3,125 times",
    ),
    "a special token of many ids": (
        template(special_tokens=special(ids=[2] * 10**5, tokens=["[CLS]"] * 10**5), **PAIR),
        "adds 100,000 tokens",
    ),
    "an id that the model does not have": (template(special_tokens=special(ids=[999]), **PAIR), "up to 999, and its"),
    "a kind that the model does not have": (
        lambda folder: (
            template(single=[{"Sequence": {"id": "A", "type_id": 7}}])(folder),
            edit("tokenizer_config.json", model_input_names=["token_type_ids"])(folder),
        ),
        "gives token_type_ids up to 7, and its model has embeddings for 2",
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("models") / "bert")


def read(folder: Path) -> None:
    opened = open_folder(folder)
    for batch in opened.read(TEXTS):
        opened.run(batch)


def test_hostile_folders_are_refused_early_in_a_sentence(whole: Path, tmp_path: Path):
    wrong = {}
    for number, (name, (change, message)) in enumerate(FOLDERS.items()):
        folder = shutil.copytree(whole, tmp_path / str(number) / "bert")
        change(folder)
        with pytest.raises(DataError) as refusal, limit_memory(BYTES):
            read_in_time(lambda folder=folder: read(folder))
        text = str(refusal.value)
        sentence = "\n" not in text and len(text) < 800 and str(folder) in text
        if message not in text or not sentence or ran_out(refusal.value):
            wrong[name] = text
    assert not wrong


def test_the_folder_that_they_were_made_of_is_read_in_every_form(whole: Path, tmp_path: Path):
    read(whole)
    folder = shutil.copytree(whole, tmp_path / "bert")
    save_bin()(folder)
    read(folder)
    tensors = torch.load(folder / BIN, weights_only=True)
    torch.save(tensors, folder / BIN, _use_new_zipfile_serialization=False)
    read(folder)
    sharded = tmp_path / "sharded"
    BertModel.from_pretrained(whole).half().save_pretrained(sharded, max_shard_size="4KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    for path in whole.glob("tokenizer*"):
        shutil.copy(path, sharded)
    read(sharded)


def test_a_panic_in_a_command_is_a_sentence(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = shutil.copytree(whole, tmp_path / "bert")
    split("(a+)+$")(folder)
    (tmp_path / "text.txt").write_text("aaaa\n")
    said = refused(capsys, "inspect", str(folder), "--text", str(tmp_path / "text.txt"))
    assert "fails on a text" in said
