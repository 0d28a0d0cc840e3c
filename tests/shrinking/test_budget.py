"""Budgets of key/value heads: the cache against a mask over the whole of it, the scores against the loss."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from cases import cases, find_unrefused
from heads.transformers_versions import CACHE

import headwise as hw
from headwise.errors import DataError, LayoutError, SettingError
from headwise.shrinking import KVBudget

SINK, WINDOW, PADS = 2, 6, (0, 3, 9)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 61}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, "bos_token_id": 1, "eos_token_id": None}
EVEN = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("Llama", "sdpa", {}),
    "Llama, eager": ("Llama", "eager", {}),
    "Mistral, all layers slide": ("Mistral", "sdpa", {"sliding_window": 14}),
    "GPT-2": ("GPT2", "sdpa", GPT2),
}
MORE = {
    "Qwen3": ("Qwen3", "sdpa", {"layer_types": EVEN, "sliding_window": 9, "use_sliding_window": True}),
    "Gemma 2, capped": ("Gemma2", "eager", {"layer_types": EVEN, "sliding_window": 10, "query_pre_attn_scalar": 8}),
    "Gemma 3": ("Gemma3Text", "sdpa", {"layer_types": EVEN, "sliding_window": 10}),
    "GPT-NeoX": ("GPTNeoX", "sdpa", {}),
    "OPT": ("OPT", "sdpa", {"word_embed_proj_dim": 32, "ffn_dim": 48}),
    "GPT-OSS, with sinks": ("GptOss", "eager", {"layer_types": EVEN, "sliding_window": 10, **EXPERTS}),
    "Cohere 2": ("Cohere2", "sdpa", {"layer_types": EVEN, "sliding_window": 10}),
}


def build(kind: str, attention: str, own: dict[str, Any]) -> Any:
    """Return a model with weights large enough for heads to matter."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**({} if kind == "GPT2" else SIZES) | own)
    name = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() == 2 else 1.0)
    model.set_attn_implementation(attention)
    return model


def draw(model: Any, *, sink: int = SINK, window: int = WINDOW) -> KVBudget:
    """Return a budget with random scores."""
    heads = hw.find_heads(model)
    budget = hw.kv_budget(heads, [torch.randint(61, (1, 32))], sink=sink, window=window, copies=0)
    generator = torch.Generator().manual_seed(1)
    scores = {layer: tuple(torch.rand(len(one), generator=generator).tolist()) for layer, one in budget.scores.items()}
    return replace(budget, scores=scores, keep=0.5)


def mask_heads(model: Any, budget: KVBudget, keep: torch.Tensor) -> Any:
    """Have streaming heads see the first and last real tokens alone, by a bias on a model without a cache."""
    tokens = keep.cumsum(1) - 1
    far = (tokens[:, None] >= budget.sink) & (tokens[:, :, None] - tokens[:, None] >= budget.window)
    full = budget.full

    def find(site: Any, call: Any) -> torch.Tensor:
        bias = torch.zeros(call.batch, site.num_heads, call.queries, call.keys)
        for group in range(site.key_value_heads):
            if site.layer in full and group not in full[site.layer]:
                bias[:, list(site.list_members(group))] = torch.where(far, -torch.inf, 0.0)[:, None]
        return bias

    return hw.bias_heads(hw.find_heads(model), find)


@torch.no_grad()
def run(model: Any, ids: torch.Tensor, keep: torch.Tensor, cache: Any = None, start: int = 0) -> torch.Tensor:
    """Return logits of the tokens after `start`, with a cache of the others or without one."""
    own = {} if cache is None else {CACHE: cache}
    positions = (keep.cumsum(1) - 1).clamp_min(0)[:, start:]
    return model(ids[:, start:], attention_mask=keep, position_ids=positions, use_cache=bool(own), **own).logits


def pad(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, 61, (len(PADS), length), generator=torch.Generator().manual_seed(2))
    keep = (torch.arange(length)[None] >= torch.tensor(PADS)[:, None]).long()
    return ids * keep, keep


def compare(found: torch.Tensor, wanted: torch.Tensor, keep: torch.Tensor) -> None:
    keep = keep.bool()
    torch.testing.assert_close(found[keep], wanted[keep], rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


def check_family(kind: str, attention: str, own: dict[str, Any]) -> None:
    model = build(kind, attention, own)
    budget = draw(model)
    for ids, keep in (pad(40), (pad(40)[0][:1], pad(40)[1][:1])):
        with mask_heads(model, budget, keep):
            wanted = run(model, ids, keep)
        # blocks of a prompt in one piece are smaller than it; pieces; single tokens
        for ends in ((36, 37, 38, 39, 40), (7, 8, 9, 22, 23, 40)):
            cache, start, parts = budget.cache(), 0, []
            for end in ends:
                parts.append(run(model, ids[:, :end], keep[:, :end], cache, start))
                start = end
            compare(torch.cat(parts, 1), wanted, keep)


@cases("name", FAMILIES)
def test_the_cache_equals_the_same_mask_over_a_whole_cache(name, monkeypatch):
    monkeypatch.setattr("headwise.shrinking.budget_cache.BLOCK", 4)
    check_family(*FAMILIES[name])


@pytest.mark.full
@cases("name", MORE)
def test_the_cache_equals_the_same_mask_in_more_families(name, monkeypatch):
    monkeypatch.setattr("headwise.shrinking.budget_cache.BLOCK", 4)
    check_family(*MORE[name])
