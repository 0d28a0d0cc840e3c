"""W_O of each head, as it is in the model now."""

import pytest
import torch

import headwise as hw
from headwise.heads.taps import Taps


@pytest.mark.parametrize("exposed", [False, True])
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
