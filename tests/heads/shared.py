"""Models whose layers use the keys and values of other layers, or their keys as values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 50,
    "pad_token_id": 0,
}
KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
TOKENS = torch.tensor([[7, 3, 11, 24, 5, 30, 9], [4, 41, 8, 16, 23, 42, 15]])


def gemma4(**settings: Any) -> nn.Module:
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**{**SIZES, "global_head_dim": 8, **settings}))


def gemma3n(**settings: Any) -> nn.Module:
    few: dict[str, Any] = {"altup_num_inputs": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**SIZES, **few, **settings))


class LendingAttention(nn.Module):
    """Attention that returns its keys and values too, [B, G, L, e]."""

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, groups, 8
        self.q_proj, self.o_proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.k_proj, self.v_proj = nn.Linear(32, groups * 8), nn.Linear(32, groups * 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (projection(x).unflatten(-1, (-1, 8)).transpose(1, 2) for projection in (self.k_proj, self.v_proj))
        return join(self, x, k, v), k, v


class BorrowingAttention(nn.Module):
    """Attention with queries of its own, and the keys and values of another."""

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, groups, 8
        self.q_proj, self.o_proj = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return join(self, x, k, v)


def join(module: Any, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = module.q_proj(x).unflatten(-1, (-1, 8)).transpose(1, 2)
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    return module.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Handing(nn.Module):
    """Every second layer uses the keys and values of the one before."""

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(
            [LendingAttention(groups), BorrowingAttention(groups), LendingAttention(groups), BorrowingAttention(groups)]
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            y, k, v = first(x)
            x = x + y
            x = x + second(x, k, v)
        return x


# What the last two layers of each are: those before hold queries, keys and values, or what is named second.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Gemma 4": lambda: gemma4(num_kv_shared_layers=2),
    "Gemma 4 with biases": lambda: gemma4(num_kv_shared_layers=2, attention_bias=True),
    "Gemma 4 of one group": lambda: gemma4(num_kv_shared_layers=2, num_key_value_heads=1),
    "Gemma 4 without groups": lambda: gemma4(num_kv_shared_layers=2, num_key_value_heads=4),
    "Gemma 4 with wider heads": lambda: gemma4(num_kv_shared_layers=2, global_head_dim=16),
    "Gemma 4 with one that lends nothing": lambda: gemma4(
        num_kv_shared_layers=1, layer_types=["sliding_attention"] + ["full_attention"] * 3
    ),
    "Gemma 4, keys as values": lambda: gemma4(num_kv_shared_layers=0, **KEYS),
    "Gemma 4, keys as values of other groups": lambda: gemma4(
        num_kv_shared_layers=0, attention_k_eq_v=True, num_global_key_value_heads=1
    ),
    "Gemma 4, both": lambda: gemma4(num_kv_shared_layers=2, **KEYS),
    "Gemma 3n": lambda: gemma3n(num_kv_shared_layers=2),
    "own": Handing,
    "own of one group": lambda: Handing(1),
    "own without groups": lambda: Handing(4),
}
SHARING = [name for name in MODELS if "keys as values" not in name]


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # so that what a layer adds is no small part of what it gets
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model
