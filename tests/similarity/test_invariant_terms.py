"""The penalties on invariant similarities, attached to models: values, gradients, padding, calls and refusals."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from cases import cases, tiers
from headwise.errors import SettingError
from headwise.functional.alignment import multiply_features
from headwise.heads.taps import Taps, count_effective_heads
from reference import metrics as loops

TERMS = (
    hw.similarity.Output(),
    hw.similarity.Subspace(),
    hw.similarity.SquaredCosine(),
    hw.similarity.CKA(),
    hw.similarity.CKA(debiased=False),
    hw.similarity.CKA(of="contributions"),
    hw.similarity.CKA(sketch=3),
    hw.similarity.CKA(of="contributions", sketch=3),
    hw.similarity.HSIC(),
    hw.similarity.HSIC(of="contributions"),
    hw.similarity.HSIC(sketch=3),
    hw.similarity.HSIC(of="contributions", sketch=3),
    hw.similarity.CrossCorrelation(),
    hw.similarity.CrossCorrelation(matched=True),
    hw.similarity.LogDeterminant(epsilon=0.02),
    hw.similarity.LogDeterminant(of="contributions"),
    hw.similarity.SpanOverlap(),
    hw.similarity.SpanOverlap("query"),
    hw.similarity.SpanOverlap("output"),
    hw.similarity.MapCosine(),
)


def make(seed: int = 0, layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(seed)
    layer = torch.nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).double()


def given(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    padding = torch.zeros(4, 7, dtype=torch.bool)
    padding[0, 5:] = padding[2, 3:] = True
    return torch.randn(4, 7, 12, dtype=torch.float64), padding


@cases("term", TERMS)
def test_a_step_down_the_gradient_lowers_it(term):
    model = make()
    x, padding = given()
    penalty = hw.Disagreement(hw.find_heads(model), term)
    values = []
    for _ in range(2):
        # a sketch follows the generator's state
        torch.manual_seed(7)
        model(x, src_key_padding_mask=padding)
        values.append(penalty())
        model.zero_grad()
        values[-1].backward()
        with torch.no_grad():
            for parameter in (own for own in model.parameters() if own.grad is not None):
                parameter.sub_(1e-3 * parameter.grad / parameter.grad.norm().clamp_min(1e-9))
    assert values[1] < values[0]


@cases("term", TERMS)
def test_padding_changes_nothing(term):
    model = make().eval()
    x, padding = given()
    penalty = hw.Disagreement(hw.find_heads(model), term)
    found = []
    for value in (0.0, 50.0):
        torch.manual_seed(7)
        model(x.masked_fill(padding.unsqueeze(-1), value), src_key_padding_mask=padding)
        found.append(penalty().detach())
    torch.testing.assert_close(found[0], found[1])


def test_alignment_is_that_of_a_loop_over_tokens():
    model = make(layers=1).eval()
    x, padding = given()
    heads = hw.find_heads(model)
    with Taps(heads, outputs=True) as taps:
        model(x, src_key_padding_mask=padding)
        (capture,) = taps.read()
    outputs, keep = capture.outputs.detach(), ~padding
    contributions = torch.einsum("bqhe,hde->bqhd", outputs, heads.sites[0].find_output_weights())
    for of, features in (("outputs", outputs), ("contributions", contributions)):
        penalty = hw.Disagreement(heads, hw.similarity.CKA(of=of))
        model(x, src_key_padding_mask=padding)
        pairs = [loops.debiased_cka(features[:, :, list(pair)], keep) for pair in ((0, 1), (0, 2), (1, 2))]
        assert penalty().item() == pytest.approx(sum(max(pair, 0.0) for pair in pairs) / 3)
        penalty.remove()


def test_a_sketch_is_unbiased_and_drawn_anew_in_each_call():
    torch.manual_seed(3)
    x = torch.randn(60, 4, 5, dtype=torch.float64)
    x[:, 1] += x[:, 0]
    out = torch.randn(4, 9, 5, dtype=torch.float64)
    for metric in (None, out.mT @ out):
        exact = multiply_features(x, None, metric).squares
        torch.manual_seed(4)
        # an optimizer would null the directions of a step, were they those of every step
        draws = [multiply_features(x, None, metric, sketch=2).squares for _ in range(500)]
        found = torch.stack(draws)
        error = found.std(0) / len(draws) ** 0.5
        assert ((found.mean(0) - exact).abs() <= 4.5 * error + 1e-5 * exact).all()
        assert found.std(0).diagonal().max() < 1e-9


def test_contributions_are_compared_in_single_precision_in_a_model_of_half_precision():
    torch.manual_seed(2)
    model = make(layers=1).float()
    attention = model.layers[0].self_attn
    size = attention.head_dim
    # head 1 is head 0 in a basis of unequal directions
    turns = [torch.linalg.qr(torch.randn(size, size))[0] for _ in range(2)]
    basis = turns[0] @ torch.diag(torch.logspace(-1, 1, size)) @ turns[1]
    with torch.no_grad():
        value, output = attention.in_proj_weight[2 * 12 :], attention.out_proj.weight
        attention.in_proj_bias.zero_()
        value[size : 2 * size] = basis @ value[:size]
        output[:, size : 2 * size] = output[:, :size] @ torch.linalg.inv(basis)
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.CKA(of="contributions"))
    x = given()[0].float()
    with torch.no_grad():
        model(x)
        whole = penalty()
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
            half = penalty()
    assert whole > 0.3
    torch.testing.assert_close(half.float(), whole, rtol=0.03, atol=0.0)


def test_the_effective_number_of_heads_is_counted_in_single_precision_under_autocast():
    model = make(layers=1).float()
    with Taps(hw.find_heads(model), outputs=True) as taps:
        model(given()[0].float())
        captures = taps.read()
    counted = count_effective_heads(captures)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(count_effective_heads(captures), counted)


@tiers("of", ["outputs"], ["contributions"])
def test_a_sketch_of_hsic_has_the_mean_of_the_whole_value(of):
    model = make(layers=1)
    x, padding = given()
    values = []
    for term, draws in ((hw.similarity.HSIC(of), 1), (hw.similarity.HSIC(of, sketch=2), 300)):
        penalty = hw.Disagreement(hw.find_heads(model), term)
        found = []
        for seed in range(draws):
            torch.manual_seed(seed)
            with torch.no_grad():
                model(x, src_key_padding_mask=padding)
                found.append(penalty())
        values.append(torch.stack(found))
        penalty.remove()
    exact, drawn = values
    assert drawn.std() > 0.01 * exact.abs()
    assert (drawn.mean() - exact).abs() <= 4 * drawn.std() / len(drawn) ** 0.5


def test_a_span_is_turned_and_not_stretched():
    model = make()
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.SpanOverlap("value"))
    penalty().backward()
    for site in hw.find_heads(model):
        value = site.slices[2]
        rows = value.of(value.parameter.detach())
        gradient = value.of(value.parameter.grad)
        assert gradient.norm() > 1e-4
        assert (gradient @ rows.mT).abs().max() < 1e-6


def test_maps_do_not_change_with_the_basis_inside_a_head():
    model = make(layers=1)
    heads = hw.find_heads(model)
    penalty = hw.Disagreement(heads, hw.similarity.MapCosine())
    before = penalty().detach()
    (site,) = heads
    torch.manual_seed(4)
    with torch.no_grad():
        value, output = site.slices[2], site.output
        for rows, columns in zip(value.of(value.parameter), output.of(output.parameter), strict=True):
            mix = torch.randn(4, 4, dtype=torch.float64)
            rows.copy_(mix @ rows)
            columns.copy_(columns @ torch.linalg.inv(mix))
    torch.testing.assert_close(penalty().detach(), before)


@cases(
    "term",
    [hw.similarity.CKA(), hw.similarity.HSIC(), hw.similarity.CrossCorrelation(), hw.similarity.LogDeterminant()],
)
def test_three_tokens_say_nothing_and_are_not_counted(term):
    model = make(layers=1)
    x, _ = given()
    penalty = hw.Disagreement(hw.find_heads(model), term)
    model(x)
    whole = penalty().detach()
    model(x)
    model(x[:1, :3])
    model(x, src_key_padding_mask=torch.ones(4, 7, dtype=torch.bool))
    torch.testing.assert_close(penalty().detach(), whole)
    model(x[:1, :3])
    assert penalty().item() == 0.0


def test_grouped_queries_compare_maps_of_every_query_head():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaModel(config)
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.MapCosine() + hw.similarity.SpanOverlap("key"))
    penalty().backward()
    attention = model.layers[0].self_attn
    assert all(part.weight.grad is not None for part in (attention.v_proj, attention.o_proj, attention.k_proj))


@cases("term", [*TERMS, hw.similarity.CKA(sketch=2)])
def test_nothing_of_tokens_by_heads_by_heads_is_made(term):
    """16 heads of 2 numbers and 512 tokens: the largest tensor is the projections of all tokens."""
    model = torch.nn.TransformerEncoderLayer(32, 16, 4, dropout=0.0, batch_first=True)
    penalty = hw.Disagreement(hw.find_heads(model), term)
    model(torch.randn(8, 64, 32))
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            sizes.extend(one.numel() for one in torch.utils._pytree.tree_leaves(made) if isinstance(one, torch.Tensor))
            return made

    with Watch():
        penalty().backward()
    assert max(sizes) <= 512 * 3 * 32 < 512 * 16 * 16


@cases(
    ("term", "setting", "value"),
    [
        (hw.similarity.CKA, "of", "weights"),
        (hw.similarity.CKA, "sketch", -1),
        (hw.similarity.HSIC, "sketch", -2),
        (hw.similarity.LogDeterminant, "epsilon", 0.0),
        (hw.similarity.SpanOverlap, "projection", "q"),
        (hw.similarity.Position, "recompute", 1),
    ],
)
def test_wrong_settings_are_refused(term, setting: str, value: object):
    with pytest.raises(SettingError, match=rf"{term.__name__}\.{setting} is {value!r}"):
        term(**{setting: value})
