"""Folders of `headwise.save` that were changed or made by others: one sentence each, and nothing in them runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import headwise as hw
from cases import cases, thin, tiers
from fuzz.mutate import BYTES, limit_memory, ran_out, read_in_time
from routing.hostile import CANARY, FOLDERS, RECORD, edit, seal_again, set_value


def make_bert() -> BertModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 8}
    bert = BertModel(BertConfig(vocab_size=20, num_hidden_layers=2, **sizes)).eval()
    heads = hw.find_heads(bert)
    hw.aggregate(heads.layer(0), hw.routing.EMRouting(capsules=2))
    hw.aggregate(heads.layer(1), hw.routing.Residual(hw.routing.SimpleRouting()))
    return bert


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "bert"
    make_bert().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "bert")


def assert_refused(folder: Path, error: hw.errors.HeadwiseError) -> None:
    text = str(error)
    assert str(folder) in text
    assert len(text) < 800
    assert "\n" not in text
    assert not (folder / CANARY).exists()


@tiers("name", *thin(FOLDERS, 3))
def test_a_hostile_folder_is_refused_in_a_sentence_that_names_it(name: str, whole: Path, tmp_path: Path):
    folder = shutil.copytree(whole, tmp_path / "bert")
    FOLDERS[name](folder)
    before = torch.get_rng_state()
    # a second is long for a model of 8 numbers a token
    with pytest.raises(hw.errors.DataError) as refused, limit_memory(BYTES):
        read_in_time(lambda: hw.load(folder))
    assert not ran_out(refused.value)
    assert_refused(folder, refused.value)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_folder_that_the_hostile_ones_were_made_of_loads(folder: Path):
    seal_again(folder)
    tokens = torch.arange(6).view(1, 6)
    with torch.no_grad():
        assert torch.equal(hw.load(folder)(tokens)[0], make_bert()(tokens)[0])


def test_one_flipped_bit_is_noticed_in_every_file(folder: Path):
    draw = torch.Generator().manual_seed(0)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for place in torch.randint(8 * len(content), (50,), generator=draw).tolist():
            changed = bytearray(content)
            changed[place // 8] ^= 1 << place % 8
            path.write_bytes(changed)
            if path.name == RECORD and is_same_record(content, changed):
                continue
            with pytest.raises(hw.errors.DataError, match=path.name) as refused:
                hw.load(folder)
            assert_refused(folder, refused.value)
        path.write_bytes(content)
    hw.load(folder)


def is_same_record(one: bytes, other: bytes) -> bool:
    """Whether two texts are the same JSON: a bit of white space may be flipped."""
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


@cases(
    ("lost", "message"),
    [
        (["record_digest"], r"headwise\.json was changed"),
        (["file_digests"], r"headwise\.json was changed"),
        (["record_digest", "file_digests"], "holds no digests, so that a change would not be noticed; "),
    ],
)
def test_a_record_that_lost_its_digests_is_refused(whole: Path, tmp_path: Path, lost: list[str], message: str):
    folder = shutil.copytree(whole, tmp_path / "bert")
    record = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps({name: value for name, value in record.items() if name not in lost}))
    with pytest.raises(hw.errors.DataError, match=message):
        hw.load(folder)


def test_links_of_the_cache_of_the_hub_are_followed_and_no_others(folder: Path, tmp_path: Path):
    cached = tmp_path / "models--bert" / "snapshots" / "1a2b"
    cached.parent.mkdir(parents=True)
    folder.rename(cached)
    blobs = tmp_path / "models--bert" / "blobs"
    blobs.mkdir()
    for number, path in enumerate(list(cached.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("../../blobs") / str(number))
    hw.load(cached)
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    hw.load(cached)
    elsewhere = shutil.copytree(cached, tmp_path / "bert", symlinks=True)
    for path in elsewhere.iterdir():
        path.unlink()
        path.symlink_to((cached / path.name).resolve())
    with pytest.raises(hw.errors.DataError, match="is a link out of"):
        hw.load(elsewhere)


def make_encoder() -> nn.TransformerEncoder:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)


def test_a_model_that_a_folder_does_not_fit_is_left_as_it_was_to_the_fast_path(tmp_path: Path):
    encoder = make_encoder()
    hw.aggregate(hw.find_heads(encoder), hw.routing.SimpleRouting())
    # the last tensor is the one that does not fit
    for name, width in (("norm", 7), ("no norm", None)):
        encoder.norm = None if width is None else nn.LayerNorm(width)
        hw.save(encoder, tmp_path / name)
    attention = shutil.copytree(tmp_path / "norm", tmp_path / "attention")
    edit(attention, lambda written: written["surgeries"].append({"do": "adopt", "module": "layers.1.linear1"}))
    other = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), num_layers=2)
    other.norm = nn.LayerNorm(8)
    modules = dict(other.named_modules())
    values = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    for name, message in (
        ("norm", r"norm\.weight has shape \(7,\)"),
        ("no norm", "does not fit TransformerEncoder"),
        ("attention", "names 'layers.1.linear1' as an attention of torch, and it is a Linear"),
    ):
        with pytest.raises(hw.errors.DataError, match=message):
            hw.load(tmp_path / name, other)
        assert dict(other.named_modules()) == modules
        assert all(torch.equal(other.state_dict()[name], value) for name, value in values.items())
        assert {type(layer.self_attn) for layer in other.layers} == {nn.MultiheadAttention}
        assert not any(layer.self_attn._forward_pre_hooks for layer in other.layers)
        assert other.use_nested_tensor
    other.norm = nn.LayerNorm(7)
    hw.load(tmp_path / "norm", other)
    assert {type(layer.self_attn) for layer in other.layers} == {hw.nn.MultiheadAttention}
    assert not other.use_nested_tensor


def test_a_kernel_is_taken_from_the_hub_only_when_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers.integrations import hub_kernels

    asked: list[str] = []

    def get_kernel(name: str, **_: object) -> None:
        asked.append(name)
        raise ValueError("no network here")

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    FOLDERS["attention is a kernel"](folder)
    with pytest.raises(hw.errors.DataError, match=r"kernels-community/flash-attn2.*trust_remote_code=True"):
        hw.load(folder)
    assert not asked
    with pytest.raises(hw.errors.DataError, match="no network here"):
        hw.load(folder, trust_remote_code=True)
    assert asked


def test_an_attention_that_the_user_registered_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import AttentionInterface

    monkeypatch.setattr(
        AttentionInterface, "_global_mapping", {**AttentionInterface._global_mapping, "own": lambda *_: None}
    )
    set_value("config.json", "attention", to={"": "own"})(folder)
    assert hw.load(folder).config._attn_implementation == "own"
