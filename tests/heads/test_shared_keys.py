"""Layers that use other layers' keys and values, or their keys as values, are read, proved, ablated and repelled."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import headwise as hw
from cases import cases, tiers
from heads.misreadings import misreadings, reordered
from heads.shared import MODELS, SHARING, TOKENS, build, join
from heads.transformers_versions import given_cache
from headwise.heads.heads import Heads

QUICK = ["Gemma 4, keys as values"]


@tiers("name", QUICK, [name for name in MODELS if name not in QUICK])
def test_all_layers_are_found_proved_and_read_and_every_wrong_reading_is_disproved(name: str):
    model = build(name)
    heads = hw.find_heads(model)
    assert [site.num_heads for site in heads] == [4] * 4
    assert [len(site.slices) for site in heads].count(3) in (1, 2, 3)
    assert hw.verify(heads, (TOKENS,)).sites == tuple(site.name for site in heads)
    taps_of = {"outputs": True} if name.startswith("own") else {"outputs": True, "weights": True}
    with torch.no_grad(), hw.Taps(heads, **taps_of) as taps:
        model(TOKENS)
        read = taps.read()
    for site, capture in zip(heads, read, strict=True):
        assert capture.outputs is not None
        assert capture.outputs.shape == (2, 7, 4, site.head_size)
        if capture.weights is not None:
            torch.testing.assert_close(capture.weights.sum(-1), torch.ones(2, 4, 7))
    with torch.no_grad():
        whole = model(TOKENS)
        for site in heads:
            with hw.ablate(Heads(model, (site,), found=heads.found), 1):
                without = model(TOKENS)
            first, second = (output if torch.is_tensor(output) else output.logits for output in (whole, without))
            assert not torch.allclose(first, second)
    partial = {len(site.slices): site for site in heads if len(site.slices) < 3}
    assert partial
    for site in partial.values():
        wrong = [(label, Heads(model, (misread,))) for label, misread in misreadings(site)]
        wrong += [(how, reordered(heads, site, how)) for how in ("strided", "random")]
        for label, misread in wrong:
            # a wrong reading that is proved raises nothing
            with pytest.raises(hw.errors.LayoutError, match="misreads") as refusal:
                hw.verify(misread, (TOKENS,))
            assert site.name in str(refusal.value), label


def test_values_that_are_not_the_keys_are_disproved():
    class RawAttention(nn.Module):
        """Attends to what it gets as values, and not to its keys."""

        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.v_proj = 4, None
            self.q_proj, self.k_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            k, v = (tensor.unflatten(-1, (-1, 8)).transpose(1, 2) for tensor in (self.k_proj(x), x))
            return join(self, x, k, v)

    heads = hw.find_heads(RawAttention())
    assert heads.sites[0].layout == "shared keys as values"
    with pytest.raises(hw.errors.LayoutError, match="with keys at zero, tokens have different values"):
        hw.verify(heads, (torch.randn(2, 6, 32),))


@cases("name", SHARING)
def test_queries_repel_and_what_needs_keys_or_values_of_its_own_says_so(name: str):
    model = build(name)
    heads = hw.find_heads(model)
    readers = [site for site in heads if site.borrows]
    assert readers
    before = [site.slices[0].read().clone() for site in readers]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hw.repel(heads.projection("query"), hw.SVGD(alpha=1.0), optimizer):
        output = model(TOKENS)
        (output if torch.is_tensor(output) else output.logits).sum().mul(0.0).backward()
        optimizer.step()
    for site, old in zip(readers, before, strict=True):
        assert not torch.equal(site.slices[0].read(), old)
    alone = replace(heads, sites=tuple(readers))
    with pytest.raises(
        hw.errors.LayoutError, match="no module computes values of its heads; read their outputs or weights"
    ):
        hw.Taps(alone, values=True)
    with pytest.raises(hw.errors.SettingError, match="has no key and value projection of its own"):
        hw.repel(alone, hw.repulsion.FunctionSVGD(), optimizer)


def test_weights_of_layers_without_keys_are_read_token_by_token():
    model = build("Gemma 4")
    heads = hw.find_heads(model)
    with torch.no_grad(), hw.Taps(heads, weights=True) as taps:
        model(TOKENS, use_cache=False)
        whole = [capture.weights for capture in taps.read()]
        *_, cache = model(TOKENS[:, :-1], use_cache=True, return_dict=False)
        taps.read()
        model(TOKENS[:, -1:], **given_cache(cache))
        for expected, capture in zip(whole, taps.read(), strict=True):
            assert expected is not None
            assert capture.weights is not None
            torch.testing.assert_close(capture.weights[:, :, -1], expected[:, :, -1])


@cases(("one", "other"), [("q_proj", "k_proj"), ("k_proj", "v_proj"), ("q_proj", "v_proj")])
def test_a_projection_that_serves_twice_is_refused_with_remedies_that_hold(one: str, other: str):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 4
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(4))

    model = nn.Sequential(Attention(), Attention())
    setattr(model[0], other, getattr(model[0], one))
    words = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
    with pytest.raises(hw.errors.LayoutError) as refusal:
        hw.find_heads(model)
    assert f"one weight makes its {words[one]} heads and its {words[other]} heads" in str(refusal.value)
    assert "exclude=('0',)" in str(refusal.value)
    assert [site.name for site in hw.find_heads(model, exclude=("0",))] == ["1"]
    setattr(model[0], other, copy.deepcopy(getattr(model[0], one)))
    assert len(hw.find_heads(model)) == 2
