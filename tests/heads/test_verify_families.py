"""`verify` proves the right row in every family, and rejects every wrong one."""

from __future__ import annotations

import contextlib
from itertools import chain

import pytest
from torch import Tensor

import headwise as hw
from heads.families import FAMILIES
from heads.family import Family
from heads.misreadings import misreadings, reordered
from headwise.heads.heads import Heads

# Their misreadings are those of tests/heads/test_runs.py.
IN_RUNS = ("Falcon, 40B and 180B", "CodeGen")


class Misread(Exception):
    """An experiment said so, and no other check."""


def prove(heads: Heads, inputs: dict[str, Tensor]) -> None:
    try:
        hw.verify(heads, inputs)
    except hw.errors.LayoutError as error:
        if "misreads" in str(error):
            raise Misread from error
        raise


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_right_reading_of_every_site_is_proved(family: Family):
    heads = hw.find_heads(family.build())
    assert hw.verify(heads, family.inputs()) == hw.heads.Verification(tuple(site.name for site in heads))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name not in IN_RUNS], ids=str)
def test_every_wrong_reading_of_every_kind_of_site_is_rejected(family: Family):
    heads = hw.find_heads(family.build())
    inputs = family.inputs()
    first = {site.kind: site for site in reversed(heads.sites)}.values()
    accepted = []
    tried = 0
    for site in first:
        wrong = ((label, Heads(heads.model, (misread,))) for label, misread in misreadings(site))
        if site.value_module is not None:
            wrong = chain(wrong, ((how, reordered(heads, site, how)) for how in ("strided", "random")))
        for label, misread in wrong:
            tried += 1
            with contextlib.suppress(Misread):
                prove(misread, inputs)
                accepted.append(f"{site.kind}: {label}")
    assert accepted == []
    assert tried >= 4 * len(first)


def test_a_cache_of_keys_does_not_grow_and_flash_attention_is_not_asked_for_float64():
    family = next(f for f in FAMILIES if f.name == "Llama")
    model = family.build()
    heads = hw.find_heads(model)
    assert model.config.use_cache
    assert len(hw.verify(heads, {**family.inputs(), "use_cache": True}).sites) == 2
    model.config._attn_implementation = "flash_attention_2"
    assert len(hw.verify(heads, family.inputs()).sites) == 2
    assert model.config._attn_implementation == "flash_attention_2"
