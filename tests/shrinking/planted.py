"""Decoders with grouped queries, and the same decoders as multi-head attention: heads copied, turned and shuffled."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from headwise.shrinking.alignment import KeyFreedom

WIDTH, HEADS, GROUPS, SIZE, VOCABULARY = 32, 8, 2, 8, 61
KINDS = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma")
# with a bias of queries, keys and values


def build(kind: str, key_value_heads: int = GROUPS, seed: int = 3) -> Any:
    """A decoder with weights that matter: attention is far from even."""
    import transformers

    config: Any = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=key_value_heads,
        head_dim=SIZE,
        intermediate_size=48,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():
            if "_proj." in name:
                nn.init.normal_(parameter, std=0.35)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def tokens(seed: int = 0, batch: int = 4, length: int = 24) -> Tensor:
    return torch.randint(4, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def plant(model: Any, kind: str, *, key: KeyFreedom, value: KeyFreedom, shuffled: bool = False) -> Any:
    """The same function with a key/value head for each query head, turned at random within what is free."""
    whole: Any = build(kind, HEADS).to(next(model.parameters()).dtype)
    state = copy.deepcopy(model.state_dict())
    generator = torch.Generator().manual_seed(5)
    members = HEADS // GROUPS
    for layer in range(2):
        keys, key_inverses = key.draw(HEADS, SIZE, generator)
        values, value_inverses = value.draw(HEADS, SIZE, generator)
        order = torch.randperm(HEADS, generator=generator) if shuffled else torch.arange(HEADS)
        turns = {"q": key_inverses, "k": keys, "v": values}
        for name, turn in turns.items():
            for part in ("weight", "bias"):
                path = f"model.layers.{layer}.self_attn.{name}_proj.{part}"
                if path in state:
                    rows = state[path].double().unflatten(0, (-1, SIZE))
                    rows = rows if name == "q" else rows.repeat_interleave(members, 0)
                    rows = rows if rows.dim() == 3 else rows[..., None]
                    turned = (turn.mT @ rows)[order].flatten(0, 1)
                    state[path] = turned if part == "weight" else turned[:, 0]
        path = f"model.layers.{layer}.self_attn.o_proj.weight"
        columns = state[path].double().unflatten(1, (HEADS, SIZE)).movedim(1, 0)
        state[path] = (columns @ value_inverses)[order].movedim(0, 1).flatten(1)
    whole.load_state_dict(state)
    return whole


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gram_of(features: Tensor) -> Tensor:
    """Moments y_i^H y_j of features [N, m, e]."""
    return torch.einsum("nie,njf->iejf", features.conj(), features)


def weights_of(readers: Tensor) -> Tensor:
    """S_i = sum_h R_h^T R_h of readers [m, n, d, e]."""
    return torch.einsum("mnde,mndf->mef", readers, readers)
