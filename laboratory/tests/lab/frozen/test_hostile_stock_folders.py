"""Folders of Hugging Face that others changed: code of their own, and what would fill the memory, wait or fail."""

from __future__ import annotations

import ast
import builtins
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertModel

from architecture.source import FILES, ROOT, read_source
from fuzz.mutate import BYTES, limit_memory, ran_out, read_in_time
from headwise.atomic import seal_folder
from headwise.errors import DataError
from headwise.stock_folders import refuse_foreign_code
from headwise.texts.pretrained import open_tokenizer
from headwise.texts.transformer import open_folder
from headwise_lab.frozen.open import open_frozen
from headwise_lab.training.start import Classifier, require_positions
from lab.command import call, refused
from lab.tasks.classification.probing_toy import WORDS, write_bert
from lab.tasks.glue.glue_toy import write_glue
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
    "a width of forty digits": (config(hidden_size=10**40), "config.json: hidden_size is 10000000000000000000"),
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


@pytest.mark.full
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


CODE = """
from pathlib import Path
Path({canary!r}).touch()
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

class OwnConfig(BertConfig):
    model_type = "own"

class OwnModel(BertModel):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
NAMES = {
    "AutoConfig": "own.OwnConfig",
    "AutoModel": "own.OwnModel",
    "AutoModelForSequenceClassification": "own.OwnModel",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture
def folder(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with Python code, which nobody names yet; whoever is asked whether to run it says yes."""
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    # where transformers copies code to before it runs it
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = shutil.copytree(plain, tmp_path / "bert")
    (folder / "own.py").write_text(CODE.format(canary=str(tmp_path / "canary")))
    (tmp_path / "text.txt").write_text("it is here .\n")
    return folder


def ran(folder: Path) -> bool:
    return (folder.parent / "canary").exists()


def change(folder: Path, file: str, **values: object) -> None:
    kept = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(kept | values))


def name_model(folder: Path) -> None:
    change(folder, "config.json", auto_map=NAMES, model_type="own")


def name_tokenizer(folder: Path) -> None:
    change(
        folder,
        "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]},
        tokenizer_class="OwnTokenizer",
    )


# By name, the file that is changed and its new values.
WAYS: dict[str, tuple[str, dict[str, object]]] = {
    "model": ("config.json", {"auto_map": NAMES, "model_type": "own"}),
    "kernel": ("config.json", {"attn_implementation": "kernels-community/flash-attn2"}),
    "kernel of a part": (
        "config.json",
        {"text_config": {"_attn_implementation": {"": "someone/kernel@main:forward"}}},
    ),
    # from the Hub, where flash_attn is not installed and kernels is
    "flash attention": ("config.json", {"attn_implementation": "flash_attention_2"}),
    "experts": ("config.json", {"experts_implementation": "deepgemm"}),
    "kernels": ("config.json", {"use_kernels": True}),
    "adapter": (
        "adapter_config.json",
        {"base_model_name_or_path": ".", "megatron_core": "own", "peft_type": "LORA"},
    ),
}
READERS: dict[str, Callable[[Path], object]] = {
    "inspect": open_frozen,
    "classifier": lambda folder: Classifier(folder, 2),
    "tokenizer": open_tokenizer,
    "positions": lambda folder: require_positions(folder, 8),
}


@pytest.mark.parametrize("way", WAYS)
def test_code_that_a_folder_names_does_not_run(way: str, folder: Path):
    file, values = WAYS[way]
    change(folder, file, **values)
    for name, read in READERS.items():
        if (way, name) == ("model", "tokenizer"):
            # it needs none of the code of the model
            read(folder)
        else:
            with pytest.raises(DataError, match=r"--trust-remote-code, or trust_remote_code=True in Python") as refusal:
                read(folder)
            assert str(folder) in str(refusal.value)
            assert "\n" not in str(refusal.value)
        assert not ran(folder)


def test_a_tokenizer_of_the_folder_does_not_run(folder: Path):
    name_tokenizer(folder)
    # its files are those of a tokenizer that transformers knows
    open_tokenizer(folder)
    assert not ran(folder)
    open_tokenizer(folder, trust_remote_code=True)
    assert ran(folder)


@pytest.mark.full
@pytest.mark.parametrize("command", ["inspect", "probe", "compare"])
def test_a_command_refuses_the_folder_in_a_sentence_and_runs_its_code_when_told_to(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    name_model(folder)
    words = {
        "inspect": ["inspect", str(folder), "--text", "text.txt"],
        "probe": ["probe", str(folder), "--data", str(write_probing(tmp_path))],
        "compare": ["compare", "glue", "--pretrained", str(folder), "--data", str(write_glue(tmp_path) / "RTE")],
    }[command]
    assert "holds Python code of its own (auto_map)" in refused(capsys, *words)
    assert not ran(folder)
    if command == "inspect":
        assert call(*words, "--trust-remote-code") == 0
        assert ran(folder)
        assert "--trust-remote-code" in (tmp_path / "runs" / "inspect" / "bert" / "heads.html").read_text()


def write_probing(place: Path) -> Path:
    lines = [f"{part}\t{label}\tit is {label} .\n" for part in ("tr", "va", "te") for label in ("PAST", "PRES") * 20]
    (place / "past_present.txt").write_text("".join(lines))
    return place / "past_present.txt"


@pytest.mark.full
def test_nobody_is_asked_where_stdin_says_yes(folder: Path, tmp_path: Path):
    name_model(folder)
    found = subprocess.run(
        f"yes | {sys.executable} -m headwise inspect bert --text text.txt",
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2
    assert found.stderr.startswith("headwise: bert holds Python code of its own")
    assert "[y/N]" not in found.stdout + found.stderr
    assert not ran(folder)


def test_a_class_of_transformers_that_forgets_to_pass_the_refusal_on_asks_nobody(folder: Path):
    from transformers import AutoConfig

    name_model(folder)
    with pytest.raises(DataError, match="holds Python code of its own"), refuse_foreign_code(folder, trusted=False):
        AutoConfig.from_pretrained(str(folder))
    assert not ran(folder)
    from transformers import dynamic_module_utils

    assert dynamic_module_utils.TIME_OUT_REMOTE_CODE > 0


def test_code_that_transformers_does_not_need_is_left_alone(folder: Path):
    change(folder, "config.json", auto_map=NAMES)
    assert type(open_frozen(folder).model).__module__.startswith("transformers.")
    assert not ran(folder)


@pytest.mark.full
def test_every_loading_of_a_folder_says_whether_its_code_may_run():
    loading = {"from_pretrained", "from_config", "pipeline"}
    silent = [
        f"{path}:{call.lineno}"
        for path in FILES
        for call in ast.walk(ast.parse(read_source(path)))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in loading
        if not {"trust_remote_code", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert not silent, f"{silent} load a folder without trust_remote_code=."


def test_a_damaged_file_is_refused_in_a_sentence(folder: Path):
    contents = [b"", b"[" * 100_000, b"[1]", bytes(range(256)), b'{"model_type": 3}']
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        kept = (folder / name).read_bytes()
        for content in contents[: 4 if name == "tokenizer_config.json" else 5]:
            (folder / name).write_bytes(content)
            with pytest.raises(DataError) as refusal:
                open_frozen(folder)
            assert str(folder) in str(refusal.value)
            assert "\n" not in str(refusal.value)
        (folder / name).write_bytes(kept)
    change(folder, "tokenizer_config.json", model_type=3)
    open_frozen(folder)
