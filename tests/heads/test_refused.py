"""What is no head, or cannot be read as one, is refused with its reason: by `find_heads`, or else by `verify`."""

from __future__ import annotations

import re

import pytest

import headwise as hw
from heads.refused import REFUSED, Refused


@pytest.mark.parametrize("refused", [entry for entry in REFUSED if entry.found], ids=str)
def test_find_heads_refuses_with_its_candidates(refused: Refused):
    model = refused.build()
    with pytest.raises(hw.LayoutError, match="(?s)" + refused.found) as refusal:
        hw.find_heads(model)
    named = [
        name for name, _ in model.named_modules() if name and re.search(rf"\b{re.escape(name)}\b", str(refusal.value))
    ]
    assert named
    assert "exclude=(" in str(refusal.value)


@pytest.mark.parametrize("refused", [entry for entry in REFUSED if entry.disproved], ids=str)
def test_what_names_suggest_verify_disproves(refused: Refused):
    heads = hw.find_heads(refused.build())
    with pytest.raises(hw.LayoutError, match=refused.disproved):
        hw.verify(heads, refused.inputs())


def test_the_softmax_layers_of_a_hybrid_are_found_and_proved_when_the_others_are_left_out():
    entry = next(refused for refused in REFUSED if refused.families.startswith("Qwen3-Next"))
    heads = hw.find_heads(entry.build(), exclude=("*.linear_attn",))
    (site,) = heads.sites
    assert (site.name, site.layout, site.layer) == ("layers.1.self_attn", "separate gated", 1)
    assert hw.verify(heads, entry.inputs()).sites == (site.name,)
