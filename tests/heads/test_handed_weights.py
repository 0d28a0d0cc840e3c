"""Attention that hands weights of projections to a function, as BEiT, Swin V2 and WavLM do, or uses them itself."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import headwise as hw
from cases import cases
from heads.wrappers import LoraLinear

WIDTH, HEADS = 16, 4
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(2))


class Handing(nn.Module):
    """BEiT's: one weight, and biases of queries and values apart."""

    fused_attn = True

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def bias(self) -> Tensor:
        return torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.qkv.weight, self.bias())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.fused_attn:
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    def merge(self, heads: Tensor) -> Tensor:
        return self.proj(heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.merge(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Written(Handing):
    fused_attn = False


class Buffered(Written):
    """EVA-02's: the bias of keys is a buffer of zeros, and a switch calls the projection and adds the biases then."""

    def __init__(self, apart: bool = False) -> None:
        super().__init__()
        self.register_buffer("k_bias", torch.zeros(WIDTH), persistent=False)
        self.apart = apart

    def bias(self) -> Tensor:
        return torch.cat((self.q_bias, self.k_bias, self.v_bias))

    def project(self, x: Tensor) -> Tensor:
        return self.qkv(x) + self.bias() if self.apart else F.linear(input=x, weight=self.qkv.weight, bias=self.bias())


class Cosine(Buffered):
    """Swin V2's: queries and keys of one length, and a scale of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.log(10.0 * torch.rand(HEADS, 1, 1)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.logit_scale.exp()).softmax(-1) @ v


class OneBias(Written):
    """One bias of all three."""

    def __init__(self) -> None:
        super().__init__()
        del self.q_bias, self.v_bias
        self.qkv_bias = nn.Parameter(torch.randn(3 * WIDTH))

    def bias(self) -> Tensor:
        return self.qkv_bias


class EitherOutput(Written):
    """W_O is called, or handed where a switch says so."""

    slow = False

    def merge(self, heads: Tensor) -> Tensor:
        return F.linear(heads, self.proj.weight, self.proj.bias) if self.slow else self.proj(heads)


class HandingOutput(Written):
    """W_O is handed too."""

    def merge(self, heads: Tensor) -> Tensor:
        return F.linear(heads, self.proj.weight, self.proj.bias)


class Separate(Written):
    """Three projections, each handed with its own bias, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        del self.qkv, self.q_bias, self.v_bias
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def project(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(x, one.weight, one.bias) for one in (self.q, self.k, self.v)], -1)


class Joined(Separate):
    """Their weights joined in one matrix, so that none is handed itself."""

    fused_attn = True

    def project(self, x: Tensor) -> Tensor:
        layers = self.q, self.k, self.v
        return F.linear(x, torch.cat([one.weight for one in layers]), torch.cat([one.bias for one in layers]))


class Multiplying(Handing):
    """An expression of its own."""

    def project(self, x: Tensor) -> Tensor:
        return x @ self.qkv.weight.T + self.bias()


class Parts(Handing):
    """Rows of the weight apart."""

    def project(self, x: Tensor) -> Tensor:
        biases = self.bias().chunk(3)
        return torch.cat([F.linear(x, w, b) for w, b in zip(self.qkv.weight.chunk(3), biases, strict=True)], -1)


class Apart(Buffered):
    """The projection is called, and the biases are added after."""

    def __init__(self) -> None:
        super().__init__(apart=True)


CALLED = (Handing, Written, Buffered, Apart, Cosine, OneBias, EitherOutput, HandingOutput, Separate)
USED = (Joined, Multiplying, Parts)


def build(kind) -> tuple[nn.Module, hw.Heads]:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind()).eval()
    return model, hw.find_heads(model)


@pytest.mark.full
@cases("kind", [*CALLED, *USED])
def test_heads_whose_weights_are_handed_to_a_function_are_proved_read_removed_pruned_and_trained(kind):
    model, heads = build(kind)
    plain = model(X)
    assert hw.verify(heads, (X,)).sites == ("0", "1")
    with hw.Taps(heads, outputs=True, values=True) as taps:
        assert torch.equal(model(X), plain)
        capture = taps.read()[0]
    expected = model[0].project(X)[..., -WIDTH:]
    torch.testing.assert_close(capture.values.flatten(2), expected)
    torch.testing.assert_close(model[0].proj(capture.outputs.flatten(2)), model[0](X))
    with hw.ablate(heads.where("0"), 1):
        without = model(X)
    assert not torch.allclose(without, plain, atol=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    hw.prune(hw.find_heads(model), {"0": [1]}, inputs=(X,))
    torch.testing.assert_close(model(X), without)
    assert model[0].proj.weight.shape == (WIDTH, 3 * WIDTH // HEADS)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    model, heads = build(kind)
    model(X).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with hw.Taps(heads, outputs=True, values=True):
        model(X).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    fused = hw.layouts.FusedLinear("wrong", ("qkv",), ("proj",), num_heads=2)
    row = hw.layouts.SeparateLinears(num_heads=2) if kind in (Separate, Joined) else fused
    with pytest.raises(hw.errors.LayoutError, match="2 heads of 8 misreads"):
        hw.verify(hw.find_heads(model, (row,)), (X,))


def test_values_that_pass_through_no_module_are_refused_for_what_they_are():
    class Neither(Multiplying):
        fused_attn = False

        def merge(self, heads: Tensor) -> Tensor:
            return heads @ self.proj.weight.T

    model, heads = build(Neither)
    assert hw.verify(heads, (X,)).sites == ("0", "1")
    for what in ("values", "outputs"):
        with hw.Taps(heads, **{what: True}) as taps:
            model(X)
            with pytest.raises(hw.errors.NotFired, match=rf"its {what} pass through no module.*F\.linear") as refusal:
                taps.read()
        assert "replaced" not in str(refusal.value)
    with pytest.raises(hw.errors.NotFired, match="its outputs pass through no module"), hw.ablate(heads, 0):
        model(X)
    with pytest.raises(hw.errors.LayoutError, match="hands the weight of its output projection to a function"):
        hw.aggregate(heads, hw.routing.SimpleRouting())


@cases("kind", [Handing, Buffered, EitherOutput, Multiplying])
def test_what_takes_the_place_of_w_o_works_in_the_model_and_in_its_copies(kind):
    for attach in (
        lambda heads: hw.gate_heads(heads, hw.gating.SigmoidGate(scale=3.0)),
        lambda heads: hw.aggregate(heads, hw.routing.Residual(hw.routing.SimpleRouting())),
    ):
        model, heads = build(kind)
        attach(heads)
        changed = model(X)
        assert torch.equal(copy.deepcopy(model)(X), changed)


def test_a_projection_that_does_more_than_multiply_is_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 3.0 * super().forward(x)

    model, _ = build(Written)
    model[0].qkv = Scaled(WIDTH, 3 * WIDTH, bias=False)
    heads, plain = hw.find_heads(model), model(X)
    with hw.Taps(heads, outputs=True):
        assert torch.equal(model(X), plain)


@cases("kind", CALLED)
def test_each_projection_is_called_once_and_no_bit_changes_in_half_precision(kind):
    model, heads = build(kind)
    model.bfloat16()
    plain, calls = model(X.bfloat16()), []
    projections = [part for part in model.modules() if isinstance(part, nn.Linear)]
    with hw.Taps(heads, outputs=True, values=True):
        handles = [part.register_forward_hook(lambda part, *_: calls.append(part)) for part in projections]
        assert torch.equal(model(X.bfloat16()), plain)
        for handle in handles:
            handle.remove()
    assert len(calls) == len(projections) == len({*calls})


ROWS = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))


class FunctionalAttention(nn.Module):
    """WavLM's attention without its positions: fairseq's, which calls no projection."""

    def __init__(self, width: int = 12, num_heads: int = 3) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        x = x.transpose(0, 1)
        output, _ = F.multi_head_attention_forward(
            x,
            x,
            x,
            x.shape[-1],
            self.num_heads,
            torch.empty([0]),
            torch.cat((self.q_proj.bias, self.k_proj.bias, self.v_proj.bias)),
            None,
            None,
            False,
            0.0,
            self.out_proj.weight,
            self.out_proj.bias,
            self.training,
            key_padding_mask,
            use_separate_proj_weight=True,
            q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
        )
        return output.transpose(0, 1)


@cases("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_attached_reads_batches_and_changes_no_bit(dtype: torch.dtype):
    model, x = FunctionalAttention().to(dtype), ROWS.to(dtype)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    plain = model(x, padding)
    plain.float().square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with hw.Taps(hw.find_heads(model), outputs=True, values=True) as taps:
        tapped = model(x, padding)
        (capture,) = taps.read()
    assert torch.equal(tapped, plain)
    tolerance = {"atol": 4e-3, "rtol": 5e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(model.v_proj(x).unflatten(-1, (3, 4)), capture.values, **tolerance)
    torch.testing.assert_close(model.out_proj(capture.outputs.flatten(2)), plain, **tolerance)
    assert torch.equal(capture.key_keep, ~padding)
    tapped.float().square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, **tolerance)


def test_copies_pickles_and_failed_forwards_leave_no_trace():
    model = FunctionalAttention()
    [site.expose() for site in hw.find_heads(model)]
    expected = model(ROWS)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ROWS), expected)
        assert len(hw.verify(hw.find_heads(twin), (ROWS,)).sites) == 1
        with hw.Taps(hw.find_heads(twin), outputs=True) as taps:
            twin(ROWS)
            assert len(taps.read()) == 1
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 6, 12)[..., :11])
    assert _get_current_function_mode_stack() == []


def test_a_wrapped_projection_whose_adapter_the_function_never_saw_stays_unseen():
    model = FunctionalAttention()
    model.v_proj = LoraLinear(model.v_proj)
    nn.init.normal_(model.v_proj.lora_B["default"].weight)
    plain = model(ROWS)
    with hw.Taps(hw.find_heads(model), values=True) as taps:
        assert torch.equal(model(ROWS), plain)
        with pytest.raises(hw.errors.NotFired, match="its values were not computed in the call"):
            taps.read()
