"""One attention that several layers share is told its place in the cache at each call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.calling import CallingAttention, X


class PlacedCache:
    """Keys and values of some layers; asked about any other place it raises, as a place of a state space does."""

    def __init__(self, *places: int) -> None:
        self.held: dict[int, tuple[Tensor, Tensor] | None] = dict.fromkeys(places)

    def get_seq_length(self, layer: int) -> int:
        held = self.held[layer]
        return 0 if held is None else held[0].shape[-2]

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        held = self.held[layer]
        self.held[layer] = (
            (key, value) if held is None else (torch.cat([held[0], key], -2), torch.cat([held[1], value], -2))
        )
        return self.held[layer]


class PlacedAttention(CallingAttention):
    """Holds no place of its own, or a wrong one."""

    def __init__(self, held: int | None) -> None:
        super().__init__()
        self.layer_idx = held

    def forward(self, x: Tensor, layer_idx: int, cache: PlacedCache | None = None) -> Tensor:
        q, k, v = self.project(x)
        first = 0
        if cache is not None:
            first = cache.get_seq_length(layer_idx)
            k, v = cache.update(k, v, layer_idx)
        mask = torch.ones(q.shape[-2], k.shape[-2]).tril(first).bool()
        heads = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return self.o_proj(heads.transpose(-2, -3).flatten(-2))


class Sharing(nn.Module):
    """One attention called at places 1, 3 and 4, its place given by position or by name."""

    def __init__(self, held: int | None, named: bool) -> None:
        super().__init__()
        self.attention, self.named = PlacedAttention(held), named

    def forward(self, x: Tensor, cache: PlacedCache | None = None) -> Tensor:
        for place in (1, 3, 4):
            given = ((), {"layer_idx": place, "cache": cache}) if self.named else ((place, cache), {})
            x = x + self.attention(x, *given[0], **given[1])
        return x


@cases("held", [None, -1, 0, 3])
@cases("named", [True, False])
def test_every_call_counts_the_tokens_of_its_own_place(held: int | None, named: bool):
    torch.manual_seed(0)
    model = Sharing(held, named).double().eval()
    heads, expected = hw.find_heads(model), model(X)
    bias = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    with hw.bias_heads(heads, bias):
        biased = model(X)
    assert not torch.allclose(biased, expected)
    cache = PlacedCache(1, 3, 4)
    with hw.Taps(heads, outputs=True, weights=True) as taps, hw.bias_heads(heads, lambda _site, call: part(bias, call)):
        torch.testing.assert_close(model(X[:, :4], cache), biased[:, :4])
        assert [tuple(capture.weights.shape) for capture in taps.read()] == [(2, 4, 4, 4)] * 3
        torch.testing.assert_close(model(X[:, 4:], cache), biased[:, 4:])
        captures = taps.read()
    assert [tuple(capture.weights.shape) for capture in captures] == [(2, 4, 2, 6)] * 3
    assert [tuple(capture.outputs.shape) for capture in captures] == [(2, 2, 4, 5)] * 3
    with hw.Taps(heads, values=True) as taps:
        model(X, PlacedCache(1, 3, 4))
        assert len(taps.read()) == 3
    assert hw.verify(heads, (X, PlacedCache(1, 3, 4))).sites == ("attention",)


def part(bias: Tensor, call: hw.nn.ScoreCall) -> Tensor:
    """The rows of a bias that belong to the queries of a call."""
    return bias[:, :, call.first : call.first + call.queries, : call.keys]


@pytest.mark.filterwarnings("ignore")
def test_a_hybrid_whose_layers_share_an_attention_is_read_and_biased_with_its_cache():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Zamba2Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=48,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_d_state=4,
        n_mamba_heads=4,
        mamba_headdim=16,
        mamba_ngroups=1,
        adapter_rank=4,
        num_mem_blocks=1,
        use_mem_rope=True,
        pad_token_id=0,
    )
    model = transformers.Zamba2ForCausalLM(config).eval()
    heads, tokens = hw.find_heads(model), torch.randint(3, 50, (2, 7))
    with torch.no_grad():
        expected = model(tokens).logits
        for what in ("outputs", "values", "weights", "mean_weights"):
            with hw.Taps(heads, **{what: True}) as taps:
                torch.testing.assert_close(model(tokens, use_cache=True).logits, expected, rtol=1e-4, atol=1e-4)
                assert len(taps.read()) == 2
        with hw.bias_heads(heads, lambda _site, call: torch.zeros(1, 4, 1, call.keys)):
            torch.testing.assert_close(model(tokens, use_cache=True).logits, expected, rtol=1e-4, atol=1e-4)
            generated = model.generate(tokens, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(tokens, max_new_tokens=3, do_sample=False), generated)
