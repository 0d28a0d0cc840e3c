"""Folders of Hugging Face that name code: Python files, kernels, adapters; it runs with --trust-remote-code only."""

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

import pytest

from architecture.source import FILES, ROOT, read_source
from headwise.errors import DataError
from headwise.stock_folders import refuse_foreign_code
from headwise.texts.pretrained import open_tokenizer
from headwise_lab.frozen.open import open_frozen
from headwise_lab.training.start import Classifier, require_positions
from lab.command import call, refused
from lab.tasks.classification.probing_toy import write_bert
from lab.tasks.glue.glue_toy import write_glue

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


def test_a_number_that_nothing_counts_to_and_a_damaged_file_are_refused_in_a_sentence(folder: Path):
    kept = (folder / "config.json").read_bytes()
    for key, value in {
        "num_hidden_layers": 2**31,
        "num_attention_heads": -3,
        "num_labels": 10**12,
        "hidden_size": 10**40,
    }.items():
        change(folder, "config.json", **{key: value})
        with pytest.raises(DataError, match=rf"config\.json: {key} is {str(value)[:20]}; expected 0 to"):
            open_frozen(folder)
        (folder / "config.json").write_bytes(kept)
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
