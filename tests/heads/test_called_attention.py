"""What attentions that call the fused kernel themselves compute is read and biased there exactly, or refused."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.calling import CallingAttention, EinsumAttention, NanoGPT, X
from heads.forwards import copies
from heads.writing import written_out
from headwise.heads import find


def build(**settings: Any) -> CallingAttention:
    torch.manual_seed(0)
    return CallingAttention(**settings).double()


def test_dropout_acts_on_the_weights_that_are_read_before_it():
    model = build(dropout=0.5)
    expected = written_out(model, X)
    with hw.Taps(hw.find_heads(model), weights=True, outputs=True) as taps:
        torch.manual_seed(7)
        returned = model(X)
        (capture,) = taps.read()
    torch.testing.assert_close(capture.weights, expected["weights"])
    torch.manual_seed(7)
    dropped = F.dropout(expected["weights"], 0.5)
    outputs = torch.einsum("bhqk,bkhe->bqhe", dropped, expected["values"])
    torch.testing.assert_close(capture.outputs, outputs)
    torch.testing.assert_close(returned, model.o_proj(outputs.flatten(2)))
    torch.manual_seed(7)
    plain = model(X)
    with hw.Taps(hw.find_heads(model), weights=True, beside=True):
        torch.manual_seed(7)
        assert torch.equal(model(X), plain)


def test_one_sequence_without_a_batch_is_read_as_a_batch_of_one():
    model = build(causal=True)
    plain = model(X[0])
    with hw.Taps(hw.find_heads(model), weights=True) as taps:
        torch.testing.assert_close(model(X[0]), plain)
        torch.testing.assert_close(taps.read()[0].weights, written_out(model, X[:1])["weights"])


@cases("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_read_as_it_is_computed(dtype: torch.dtype):
    model = build(key_value_heads=2, causal=True)
    expected = written_out(model, X)["weights"]
    model.to(dtype)
    with hw.Taps(hw.find_heads(model), weights=True) as taps:
        model(X.to(dtype))
        (capture,) = taps.read()
    assert capture.weights.dtype == dtype
    torch.testing.assert_close(capture.weights.double(), expected, rtol=0.0, atol=4 * torch.finfo(dtype).eps)


def test_copies_and_pickles_run_their_own_forward_and_what_wraps_it_goes_on():
    model = build(causal=True)
    plain, signature = model(X), inspect.signature(model.forward)
    bias = torch.zeros(1, 4, 1, 6, dtype=torch.float64)
    bias[..., 0] = 5.0
    with hw.bias_heads(hw.find_heads(model), bias):
        assert inspect.signature(model.forward) == signature
        biased = model(X)
        with pytest.raises(hw.errors.NotFired, match=r"replica that nn\.DataParallel made"):
            model._replicate_for_data_parallel()(X)
        for one in copies(model):
            assert vars(one)["forward"] == type(one).forward.__get__(one)
            assert torch.equal(one(X), plain)
    assert not torch.allclose(biased, plain)
    # hooks of Accelerate wrap a forward in this way
    inner = model.forward
    model.forward = lambda x, mask=None: 2.0 * inner(x, mask)
    with hw.bias_heads(hw.find_heads(model), bias):
        torch.testing.assert_close(model(X), 2.0 * biased)
        outer = model.forward
        model.forward = lambda x, mask=None: outer(x, mask) + 1.0
        torch.testing.assert_close(model(X), 2.0 * biased + 1.0)
    torch.testing.assert_close(model(X), 2.0 * plain + 1.0)


def test_heads_in_parameters_are_read_removed_and_biased_at_the_call():
    torch.manual_seed(0)
    model = EinsumAttention().double()
    row = hw.layouts.FusedParameter("mine", fused=("w_qkv",), axes="p d h e", output=("w_o",), output_axes="h e d")
    heads = hw.find_heads(model, row)
    plain = model(X)
    q, k, v = torch.einsum("bld,pdhe->pbhle", X, model.w_qkv)
    scores = (q @ k.mT / 5**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    outputs = (scores.softmax(-1) @ v).transpose(1, 2)
    with hw.Taps(heads, outputs=True, values=True, weights=True, beside=True) as taps:
        assert torch.equal(model(X), plain)
        (capture,) = taps.read()
    torch.testing.assert_close(capture.outputs, outputs)
    torch.testing.assert_close(capture.values, v.transpose(1, 2))
    torch.testing.assert_close(capture.weights, scores.softmax(-1))
    penalty = hw.Disagreement(heads, hw.similarity.Output() + hw.similarity.Subspace())
    model(X)
    penalty().backward()
    assert float(model.w_qkv.grad[2].abs().max()) > 0.0
    penalty.remove()
    keep = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    with torch.no_grad(), hw.ablate(heads, 1, 3) as ablation, hw.Taps(heads, outputs=True) as taps:
        ablated = model(X)
        torch.testing.assert_close(taps.read()[0].outputs, outputs * keep[:, None])
    assert ablation.called
    torch.testing.assert_close(ablated, torch.einsum("blhe,hed->bld", outputs * keep[:, None], model.w_o))
    drops = hw.importance(heads, lambda: float(model(X).std())).drops["(model)"]
    assert float(drops.abs().min()) > 0.0
    assert hw.verify(heads, (X,)).sites == ("",)
    with pytest.raises(hw.errors.LayoutError, match="W_O is the parameter w_o"):
        hw.aggregate(heads, hw.routing.SimpleRouting(capsules=2))


@cases("grouped", ["repeated", "enable_gqa"])
def test_values_of_groups_are_read_once_at_the_call(grouped: str):
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w_q = nn.Parameter(torch.randn(4, 12, 5))
            self.w_k, self.w_v = (nn.Parameter(torch.randn(2, 12, 5)) for _ in range(2))
            self.proj = nn.Linear(20, 12)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (torch.einsum("bld,hde->bhle", x, weight) for weight in (self.w_q, self.w_k, self.w_v))
            if grouped == "repeated":
                k, v = (part.repeat_interleave(2, 1) for part in (k, v))
            heads = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped == "enable_gqa")
            return self.proj(heads.transpose(1, 2).flatten(2))

    model = Grouped().double()
    with hw.Taps(hw.find_heads(model, hw.layouts.SeparateParameters(axes="h d e")), values=True) as taps:
        model(X)
        torch.testing.assert_close(taps.read()[0].values, torch.einsum("bld,hde->blhe", X, model.w_v))


def test_a_role_of_future_tokens_alone_leaves_a_causal_head_regular():
    model = NanoGPT(layers=1, dropout=0.0).double().eval()
    mask = hw.roles.Roles(hw.roles.Separator())(hw.roles.WordTable.split("one two three four five ."), num_heads=3)
    with hw.guide(hw.find_heads(model), mask), hw.Taps(hw.find_heads(model), weights=True) as taps:
        model(X[:1])
        weights = taps.read()[0].weights
    # tokens before the separator have no key that the role and causality allow: their head is regular there
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 3, 6, dtype=torch.float64))
    assert weights[0, 0, 5].nonzero().flatten().tolist() == [5]


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


@cases(
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
        hw.errors.LayoutError, match=r"_attention, a softmax between projections .*, which this one does not"
    ):
        hw.Taps(hw.find_heads(Eager()), weights=True)
