"""A penalty pooled over attentions is the one measured attention by attention, to the last gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.similarity import terms

TERMS = {
    "output": hw.similarity.Output(),
    "subspace": hw.similarity.Subspace(),
    "position": hw.similarity.Position(),
    "recomputed": hw.similarity.Position(recompute=True),
    "sum": hw.similarity.Output() + 0.5 * hw.similarity.Subspace() + 2 * hw.similarity.Position(),
}


def penalize(monkeypatch: pytest.MonkeyPatch, most: int, term: object, *, padded: bool, relative: bool) -> list:
    """Return the penalty and all gradients, with stacks of tensors of at most this many numbers."""
    monkeypatch.setattr(terms, "MOST_ON_CPU", most)
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 3, 3, 8, dropout=0.0, batch_first=True).double()
    strength = hw.Relative(0.3) if relative else None
    penalty = hw.Disagreement(hw.find_heads(model), term, weights={"decoder": 0.5, "cross": 0.25}, strength=strength)
    source, target = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(2, 4, 16, dtype=torch.float64)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    out = model(source, target, src_key_padding_mask=mask, memory_key_padding_mask=mask)
    loss = out.square().mean()
    total = penalty.loss(loss) if relative else loss + penalty()
    total.backward()
    return [total.detach(), penalty.last, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.filterwarnings("ignore:.*nested_tensor.*:UserWarning")
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("term", TERMS)
def test_pooled_and_one_by_one_agree(term: str, padded: bool, relative: bool, monkeypatch: pytest.MonkeyPatch):
    found = penalize(monkeypatch, 2**16, TERMS[term], padded=padded, relative=relative)
    expected = penalize(monkeypatch, 0, TERMS[term], padded=padded, relative=relative)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


def test_attentions_of_one_shape_are_stacked_and_others_are_not():
    term, ones = hw.similarity.Output(), torch.ones(2, 3, 4, 5)
    keep = torch.ones(2, 3, dtype=torch.bool)
    sums, counts = terms.measure_together(term, [ones, ones], [keep, ~keep])
    assert sums.tolist() == [pytest.approx(6.0), 0.0]
    assert counts.tolist() == [6, 0]
    for tensors, keeps in (
        ([ones], [None]),
        ([ones, ones[:1]], [None, None]),
        ([ones, ones], [keep, None]),
        ([ones, ones], [None, keep]),
        ([ones, ones.double()], [None, None]),
        ([torch.ones(2, 2**13, 4, 5)] * 2, [None, None]),
    ):
        assert terms.measure_together(term, tensors, keeps) is None
    assert terms.measure_together(hw.similarity.CKA(), [ones, ones], [None, None]) is None


def test_attaching_walks_through_the_model_as_often_for_many_layers_as_for_few(monkeypatch: pytest.MonkeyPatch):
    """The modules passed per layer are then a constant."""
    passed = []
    walk = nn.Module.named_modules

    def counted(self: nn.Module, *given: object, **named: object):
        for found in walk(self, *given, **named):
            passed.append(1)
            yield found

    def count(layers: int) -> int:
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        heads = hw.find_heads(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False))
        passed.clear()
        hw.Disagreement(heads, hw.similarity.Output())
        return len(passed)

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    few, many = count(4), count(32)
    assert many < 9 * few
