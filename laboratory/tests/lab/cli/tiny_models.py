"""Tiny models of transformers with their tokenizer, and a text for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from lab.tasks.classification.probing_toy import make_tokenizer

WORDS = ["[PAD]", "[UNK]", *"abcdefghijklmnop"]
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}


def write_models(root: Path) -> Path:
    """Write a decoder, an encoder and a text into a folder."""
    tokenizer = make_tokenizer(WORDS, 64, marked=False)
    torch.manual_seed(0)
    llama: Any = LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=1))
    bert: Any = BertModel(BertConfig(**SIZES))
    for name, model in (("llama", llama), ("bert", bert)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4) if parameter.dim() == 2 else None
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    generator = torch.Generator().manual_seed(0)
    lines = [
        " ".join(WORDS[2 + int(start + place) % 16] for place in range(10 + int(start) % 5))
        for start in torch.randint(16, (60,), generator=generator)
    ]
    root.mkdir(exist_ok=True)
    (root / "text.txt").write_text("\n".join(lines))
    return root
