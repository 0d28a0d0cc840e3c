"""Differential attention: the equation, its gradient, one module made from another, and what it is refused for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases
from headwise.errors import LayoutError, SettingError
from headwise.nn.difference import HeadDifference, pair_heads
from headwise.nn.multihead import DifferentialAttention, MultiheadAttention
from reference.attention import differential_heads

HEADS, SIZE, WIDTH, LAYER = 3, 4, 12, 3
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
ALLOWED = torch.rand(2, HEADS, 5, 5, generator=torch.Generator().manual_seed(4)) > 0.4
ALLOWED[1, 0, 2] = False


def attention(**options: Any) -> Any:
    """Return a module whose vectors and gain are not what they start from."""
    torch.manual_seed(0)
    module: Any = DifferentialAttention(WIDTH, HEADS, layer=LAYER, batch_first=True, **options).double()
    with torch.no_grad():
        for parameter in module.head_difference.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return module


def expected(module: Any, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in module._project(X, X, X))
    difference = module.head_difference
    return differential_heads(q, k, v, allowed, difference.vectors, difference.norm.weight, LAYER)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@cases("need_weights", [False, True])
@cases("observed", ["nothing", "weights", "weights beside", "mean"])
def test_it_computes_what_the_loop_says(observed: str, need_weights: bool):
    module = attention()
    first, difference, outputs = expected(module, ALLOWED)
    assert (difference < 0).any()
    wanted: dict[str, dict[str, bool]] = {
        "nothing": {},
        "weights": {"weights": True},
        "weights beside": {"weights": True, "beside": True},
        "mean": {"mean_weights": True},
    }
    forbidden = (~ALLOWED).flatten(0, 1)
    with hw.Taps(hw.find_heads(module), outputs=True, **wanted[observed]) as taps:
        returned, own = module(X, X, X, attn_mask=forbidden, need_weights=need_weights, average_attn_weights=False)
        capture: Any = taps.read()[0]
    close(capture.outputs.transpose(1, 2), outputs)
    close(returned, module.out_proj(outputs.transpose(1, 2).flatten(2)))
    assert not capture.outputs[1, 2, 0].any()
    if "weights" in observed:
        close(capture.weights, first)
    if observed == "mean":
        close(capture.mean_weights, first.mean(1))
    if need_weights:
        close(own, difference)


def test_a_causal_hint_a_bias_of_each_head_and_projected_states_give_the_same():
    module = attention()
    causal = torch.ones(5, 5).tril().bool()
    _, _, outputs = expected(module, causal.expand(2, HEADS, 5, 5))
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    output = module.out_proj(outputs.transpose(1, 2).flatten(2))
    close(module(X, X, X, attn_mask=mask, is_causal=True, need_weights=False)[0], output)
    with hw.bias_heads(hw.find_heads(module), mask.expand(1, HEADS, 5, 5)):
        close(module(X, X, X, need_weights=False)[0], output)
    q, k, v = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in module._project(X, X, X))
    close(module.attend_heads(q, k, v, causal), outputs)


def test_gradients_are_those_of_central_differences():
    module = attention()
    parameters = dict(module.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        call = (x, x, x), {"attn_mask": (~ALLOWED).flatten(0, 1), "need_weights": False}
        return torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), *call)[0]

    x = X.clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *parameters.values()), fast_mode=True)


@cases("need_weights", [False, True])
def test_under_autocast_it_is_the_same_to_the_digits_of_bfloat16(need_weights: bool):
    module, x = attention().float(), X.float()
    wanted = module(x, x, x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = module(x, x, x, need_weights=need_weights)[0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=0.0, atol=0.05)


def test_the_control_has_one_map_of_the_whole_width_and_the_same_norm():
    module = attention(second=False)
    q, k, v = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in module._project(X, X, X))
    heads = nn.functional.scaled_dot_product_attention(q, k, v)
    gain = module.head_difference.norm.weight
    normed = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain * (1 - module.head_difference.start)
    with hw.Taps(hw.find_heads(module), outputs=True) as taps:
        module(X, X, X)
        capture: Any = taps.read()[0]
        close(capture.outputs.transpose(1, 2), normed)
    # four vectors of half a head
    assert sum(p.numel() for p in attention().parameters()) - sum(p.numel() for p in module.parameters()) == 2 * SIZE


def test_paired_heads_are_differential_attention_with_the_same_projections():
    torch.manual_seed(0)
    plain: Any = MultiheadAttention(WIDTH, 2 * HEADS, batch_first=True).double()
    other = attention()
    other.load_state_dict(plain.state_dict(), strict=False)
    pair_heads(plain, LAYER)
    plain.head_difference.load_state_dict(other.head_difference.state_dict())
    close(plain(X, X, X)[0], other(X, X, X)[0])
    close(copy.deepcopy(plain)(X, X, X)[0], other(X, X, X)[0])
    assert "3      4" in str(hw.find_heads(plain))


def test_its_heads_are_proved_removed_and_pruned_as_those_of_any_attention():
    module = attention().eval()
    heads = hw.find_heads(module)
    assert hw.verify(heads, (X, X, X)).sites == ("",)
    with hw.ablate(heads, 1):
        without = module(X, X, X)[0]
    hw.prune(heads, {0: [1]})
    close(module(X, X, X)[0], without)


@cases(
    ("build", "error", "message"),
    [
        (lambda: HeadDifference(3), SettingError, "heads have 3 numbers; expected an even number"),
        (lambda: pair_heads(MultiheadAttention(12, 3)), LayoutError, "has 3 heads; expected an even number"),
        (lambda: pair_heads(nn.MultiheadAttention(12, 4)), LayoutError, r"is not a headwise\.nn\.MultiheadAttention"),
        (lambda: pair_heads(DifferentialAttention(12, 2)), LayoutError, "paired or talking heads already"),
        (lambda: hw.mix_heads(hw.find_heads(attention())), LayoutError, "whose maps are subtracted in pairs"),
    ],
)
def test_what_cannot_be_paired_is_refused_in_a_sentence(build, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        build()
