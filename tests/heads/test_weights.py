"""Weights as they are in the model now: parametrized, quantized and under LoRA, and W_O of each head."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import headwise as hw
from cases import cases
from heads.attentions import SeparateAttention
from heads.families import BY_NAME
from heads.wrappers import Linear8bit, wrap
from headwise.heads.taps import Taps

X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3))
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def old_weight_norm(module: nn.Module) -> None:
    # torch deprecates it, and models still have it
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(module)


def outputs_of(heads: hw.Heads) -> torch.Tensor:
    with hw.Taps(heads, outputs=True, values=True) as taps, torch.no_grad():
        heads.model(X)
        (capture,) = taps.read()
    assert capture.values.shape == (2, 6, 4, 5)
    return capture.outputs


@cases(
    ("parametrize", "reason"),
    [
        (nn.utils.parametrizations.spectral_norm, r"parametrization \(SpectralNorm\).*remove_parametrizations"),
        (nn.utils.parametrizations.weight_norm, r"parametrization \(WeightNorm\)"),
        (old_weight_norm, "recomputed before each forward by a hook"),
    ],
)
def test_a_parametrized_weight_can_be_read_and_proved_but_not_repelled(parametrize, reason):
    model = SeparateAttention().eval()
    parametrize(model.k_proj)
    heads = hw.find_heads(model)
    assert outputs_of(heads).shape == (2, 6, 4, 5)
    assert hw.verify(heads, (X,)).sites == ("",)
    with pytest.raises(hw.errors.LayoutError, match=rf"^k_proj\.weight is recomputed.*{reason}|{reason}"):
        hw.repel(heads, hw.SVGD(), torch.optim.SGD(model.parameters(), lr=0.1))
    assert hw.repel(heads.projection("query"), hw.SVGD(), torch.optim.SGD(model.parameters(), lr=0.1))
    assert str(heads).splitlines()[-1].startswith("no repulsion, for example in k_proj.weight: it is recomputed")


def test_a_parametrized_packed_weight_of_torch_is_found_and_not_repelled():
    model = nn.MultiheadAttention(12, 3, batch_first=True)
    nn.utils.parametrizations.weight_norm(model, "in_proj_weight")
    heads = hw.find_heads(model)
    assert heads.sites[0].num_heads == 3
    with pytest.raises(hw.errors.LayoutError, match=r"in_proj_weight is recomputed at each use by a parametrization"):
        hw.repel(heads, hw.SVGD(), torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_aggregator_takes_the_place_of_a_lora_output_projection():
    model = wrap(SeparateAttention().eval(), *PROJECTIONS)
    before = model(X)
    handle = hw.aggregate(hw.find_heads(model), hw.routing.SimpleRouting(capsules=4))
    assert model(X).shape == before.shape
    handle.remove()
    torch.testing.assert_close(model(X), before)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@cases("dynamic", [False, True])
def test_quantized_layers_are_found_and_read_but_not_repelled(dynamic):
    model = SeparateAttention().eval()
    if dynamic:
        for name in PROJECTIONS:
            layer = torch.ao.nn.quantized.dynamic.Linear(
                getattr(model, name).in_features, getattr(model, name).out_features
            )
            setattr(model, name, layer)
        reason = r"q_proj\.weight is not a parameter of Linear, as in quantized layers"
    else:
        wrap(model, *PROJECTIONS, wrapper=Linear8bit)
        reason = r"q_proj\.weight is quantized \(int8\); use the full-precision weights"
    heads = hw.find_heads(model)
    assert (heads.sites[0].num_heads, heads.sites[0].head_size, heads.sites[0].width) == (4, 5, 12)
    assert outputs_of(heads).shape == (2, 6, 4, 5)
    with pytest.raises(hw.errors.LayoutError, match=reason):
        hw.repel(heads, hw.SVGD(), torch.optim.SGD(SeparateAttention().parameters(), lr=0.1))
    # quantized layers take float32 alone
    assert hw.verify(heads, (X,)).sites == ("",)


def test_pruned_heads_are_counted_from_the_weights():
    entry = BY_NAME["BERT"]
    model = entry.build()
    attention = model.encoder.layer[1].attention
    for name in ("query", "key", "value"):
        linear = getattr(attention.self, name)
        linear.weight, linear.bias = nn.Parameter(linear.weight[8:].clone()), nn.Parameter(linear.bias[8:].clone())
    attention.self.num_attention_heads, attention.self.all_head_size = 3, 24
    attention.output.dense.weight = nn.Parameter(attention.output.dense.weight[:, 8:].clone())
    heads = hw.find_heads(model)
    assert [(site.num_heads, site.head_size) for site in heads] == [(4, 8), (3, 8)]
    assert model.config.num_attention_heads == 4
    assert hw.verify(heads, entry.inputs()).sites == tuple(site.name for site in heads)


@cases("exposed", [False, True])
def test_contributions_add_up_to_the_output(exposed: bool):
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).eval().double()
    (site,) = hw.find_heads(model)
    given = torch.randn(2, 5, 12, dtype=torch.float64)
    with Taps(hw.find_heads(model), outputs=True) as taps:
        weights = site.find_output_weights() if exposed else None
        attended = model.self_attn(given, given, given)[0]
        (capture,) = taps.read()
    weights = site.find_output_weights() if weights is None else weights
    contributions = torch.einsum("bqhe,hde->bqd", capture.outputs, weights)
    torch.testing.assert_close(contributions + model.self_attn.out_proj.bias, attended)


def test_none_where_an_aggregator_took_its_place_and_again_after_its_removal():
    model = torch.nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
    heads = hw.find_heads(model)
    handle = hw.aggregate(heads, hw.routing.Trunk())
    assert heads.sites[0].find_output_weights() is None
    handle.remove()
    assert heads.sites[0].find_output_weights().shape == (3, 12, 4)


def test_heads_that_are_rows_of_a_transposed_weight_contribute_too():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=12, n_layer=1, n_head=3, attn_pdrop=0.0, resid_pdrop=0.0
    )
    model = transformers.GPT2Model(config).eval()
    heads = hw.find_heads(model)
    with Taps(heads, outputs=True) as taps:
        found = []
        handle = model.h[0].attn.register_forward_hook(lambda _module, _args, output: found.append(output[0]))
        model(torch.arange(8)[None])
        (capture,) = taps.read()
        handle.remove()
    contributions = torch.einsum("bqhe,hde->bqd", capture.outputs, heads.sites[0].find_output_weights())
    torch.testing.assert_close(contributions + model.h[0].attn.c_proj.bias, found[0])
    penalty = hw.Disagreement(heads, hw.similarity.MapCosine() + hw.similarity.SpanOverlap("output"))
    attention = model.h[0].attn
    value = attention.c_attn.weight[:, 24:].unflatten(1, (3, 4)).movedim(1, 0)
    out = attention.c_proj.weight.unflatten(0, (3, 4))
    maps = torch.nn.functional.normalize((value @ out).flatten(1), dim=-1)
    spans = torch.linalg.qr(out.mT).Q
    pairs = ((0, 1), (0, 2), (1, 2))
    expected = sum((maps[i] @ maps[j]) ** 2 + (spans[i].T @ spans[j]).square().sum() / 4 for i, j in pairs) / 3
    torch.testing.assert_close(penalty(), expected, rtol=1e-4, atol=1e-6)
