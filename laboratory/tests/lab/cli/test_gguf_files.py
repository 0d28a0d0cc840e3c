"""A GGUF file is read by the commands, as the folder of Hugging Face that it is a packed form of."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from headwise.cli.extensions import find_stock_folder, open_model
from headwise.errors import DataError
from lab.cli.tiny_models import write_models
from lab.command import call, refused

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
WORDS = ["<unk>", "<s>", "</s>", *(f"Ġ{letter}" for letter in "abcdefghijklmnop"), "Ġ", *"abcdefghijklmnop"]
# What parts of a layer are called in the file.
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleave(weight: np.ndarray) -> np.ndarray:
    """The rows of queries or keys in the order of a file, in which the two features of a rotation are neighbors."""
    heads = weight.reshape(SIZES["num_attention_heads"], 2, -1, weight.shape[1])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path) -> Any:
    """Write a Llama with its tokenizer, and return it."""
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **SIZES)).eval()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_dimension_count(SIZES["hidden_size"] // SIZES["num_attention_heads"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3, *[1] * (len(WORDS) - 3)])
    writer.add_token_merges([f"Ġ {letter}" for letter in "abcdefghijklmnop"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    held = {"token_embd": model.model.embed_tokens, "output_norm": model.model.norm, "output": model.lm_head}
    for number, layer in enumerate(model.model.layers):
        held |= {f"blk.{number}.{name}": layer.get_submodule(own) for own, name in NAMES.items()}
    for name, module in held.items():
        weight = module.weight.detach().numpy()
        writer.add_tensor(f"{name}.weight", interleave(weight) if name.endswith(("attn_q", "attn_k")) else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_file_and_its_folder_are_read_pruned_and_saved(tmp_path: Path):
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "tiny.gguf"
    model = write_gguf(file)
    tokens = torch.arange(3, 13)[None]
    for given in (file, file.parent):
        folder = find_stock_folder(given)
        assert folder.name == "tiny"
        again: Any = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)
        assert AutoTokenizer.from_pretrained(folder)("a b c")["input_ids"][-1] == WORDS.index("Ġc")
        assert open_model(given).name == "tiny"
    text = write_models(tmp_path / "own") / "text.txt"
    options = ["--keep", "0.5", "--by", "first-order", "--lines", "20"]
    assert call("prune", str(file), "--text", str(text), "--out", str(tmp_path / "small"), *options) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "small").config.num_attention_heads == 2


def test_what_is_no_model_or_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "damaged.gguf"
    file.write_bytes(b"GGUF\x03" + bytes(40))
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("headwise.texts.pretrained.find_spec", lambda _: None)
    assert "pip install gguf" in refused(capsys, "inspect", str(file), "--text", str(file))
    monkeypatch.undo()
    pytest.importorskip("gguf")
    with pytest.raises(DataError, match="cannot be read as a GGUF file"):
        find_stock_folder(file)
    # of two it is not known which is meant
    (tmp_path / "other.gguf").write_bytes(b"")
    assert find_stock_folder(tmp_path) == tmp_path
