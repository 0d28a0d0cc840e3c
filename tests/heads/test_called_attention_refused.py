"""Calls of the fused kernel from which heads cannot be read are refused in a sentence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from heads.calling import CallingAttention, X
from headwise.heads import find


class Twice(CallingAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) + super().forward(x.flip(1), mask)


class Folded(CallingAttention):
    """Heads in the batch."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.flatten(0, 1) for part in self.project(x))
        heads = F.scaled_dot_product_attention(q, k, v, mask).unflatten(0, (-1, self.num_heads))
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class Channels(CallingAttention):
    """Channels attend to channels, as in XCiT."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.mT for part in self.project(x))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, mask).permute(0, 3, 1, 2).flatten(2))


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (Twice, r"calls scaled_dot_product_attention several times in one forward"),
        (Folded, r"queries of shape \(8, 6, 5\) and keys .*expected \(batch, 4 heads, tokens, 5 features\)"),
        (Channels, r"with queries of shape \(2, 4, 5, 6\)"),
    ],
)
def test_calls_from_which_heads_cannot_be_read_are_refused(
    attention: type[nn.Module], message: str, monkeypatch: pytest.MonkeyPatch
):
    # channels are else refused when heads are found
    monkeypatch.setattr(find, "require_arranged", lambda *_: None)
    model = attention().double()
    plain = model(X)
    with hw.Taps(hw.find_heads(model), weights=True), pytest.raises(hw.errors.LayoutError, match=message):
        model(X)
    assert torch.equal(model(X), plain)


def test_a_forward_that_takes_another_way_is_told():
    class Exponentials(CallingAttention):
        flash = True

        def forward(self, x: Tensor) -> Tensor:
            if self.flash:
                return super().forward(x)
            q, k, v = self.project(x)
            weights = (q @ k.mT).exp()
            weights = weights / weights.sum(-1, keepdim=True)
            return self.o_proj((weights @ v).transpose(1, 2).flatten(2)) * x.softmax(1).sum(1, keepdim=True)

    model = Exponentials().double()
    heads = hw.find_heads(model)
    model.flash = False
    plain = model.eval()(X)
    for attach in (
        lambda: hw.Disagreement(heads, hw.similarity.Position()),
        lambda: hw.bias_heads(heads, torch.zeros(1, 1, 1, 6)),
    ):
        handle = attach()
        with pytest.raises(
            hw.errors.NotFired, match=r"did not call scaled_.*, nor a softmax .* \(but over \(2, 6, 12\)\)"
        ):
            model(X)
        handle.remove()
    assert torch.equal(model(X), plain)


def test_what_no_call_is_found_in_is_refused_when_attached():
    model = CallingAttention()

    class Eager(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 4
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = model.q_proj, model.k_proj, model.v_proj, model.o_proj

    with pytest.raises(
        hw.errors.LayoutError,
        match=r"_attention, a softmax between projections .*, which this one does not",
    ):
        hw.Taps(hw.find_heads(Eager()), weights=True)
