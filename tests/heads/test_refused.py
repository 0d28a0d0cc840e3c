"""What is no head, or cannot be read as one, is refused by `find_heads` with its reason."""

from __future__ import annotations

import re

import pytest

import headwise as hw
from cases import cases
from heads.refused import REFUSED, Refused


@cases("refused", REFUSED)
def test_find_heads_refuses_with_its_candidates(refused: Refused):
    model = refused.build()
    with pytest.raises(hw.errors.LayoutError, match="(?s)" + refused.found) as refusal:
        hw.find_heads(model)
    named = [
        name for name, _ in model.named_modules() if name and re.search(rf"\b{re.escape(name)}\b", str(refusal.value))
    ]
    assert named
    assert "exclude=(" in str(refusal.value) or "a row of your own" in str(refusal.value)


def test_a_row_of_ones_own_reads_the_projections_of_irregular_heads_and_verify_disproves_them():
    entry = next(refused for refused in REFUSED if refused.name == "differential attention")
    row = hw.layouts.SeparateLinears("mine")
    heads = hw.find_heads(entry.build(), row)
    assert [site.layout for site in heads] == ["mine", "mine"]
    with pytest.raises(hw.errors.LayoutError, match=r"layout 'mine' .* misreads DiffLlamaAttention"):
        hw.verify(heads, entry.inputs())


def test_what_is_left_out_is_named_by_a_pattern_that_matches_nothing_else():
    from transformers import MiniMaxConfig, MiniMaxModel

    from heads.family import LLAMA

    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = MiniMaxConfig(**{**LLAMA, "num_hidden_layers": 3}, head_dim=8, layer_types=kinds, num_local_experts=2)
    model = MiniMaxModel(config)
    with pytest.raises(hw.errors.LayoutError, match="MiniMaxLightningAttention is linear attention") as refusal:
        hw.find_heads(model)
    left_out = ("layers.0.self_attn", "layers.2.self_attn")
    assert f"exclude={left_out!r}" in str(refusal.value).replace(",))", "))")
    assert [site.name for site in hw.find_heads(model, exclude=left_out)] == ["layers.1.self_attn"]


def test_the_softmax_layers_of_a_hybrid_are_found_and_proved_when_the_others_are_left_out():
    entry = next(refused for refused in REFUSED if refused.families.startswith("Qwen3-Next"))
    heads = hw.find_heads(entry.build(), exclude=("*.linear_attn",))
    (site,) = heads.sites
    assert (site.name, site.layout, site.layer) == ("layers.1.self_attn", "separate gated", 1)
    assert hw.verify(heads, entry.inputs()).sites == (site.name,)
