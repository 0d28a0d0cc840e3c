"""The encoder and the pair classifier: padding, equations, what belongs to whom."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cases import cases
from headwise.errors import SettingError, ShapeError
from headwise.heads.find import find_heads
from headwise_lab.models.encoder import Encoder, EncoderLayer, sinusoids
from headwise_lab.tasks.logic.model import PairClassifier, QueryPooling
from headwise_lab.tasks.logic.scales import LOGIC_SCALES

SMALL = replace(LOGIC_SCALES["demo"], width=8, heads=2, layers=3, classifier_width=16)
POST = replace(SMALL, norm_first=False)
PREMISE = torch.tensor([[4, 5, 6, 7], [8, 3, 0, 0]])
HYPOTHESIS = torch.tensor([[2, 9, 0], [5, 4, 3]])


def built(scale, seed=0):
    torch.manual_seed(seed)
    return PairClassifier(11, 7, scale).eval()


@settings(max_examples=20)
@given(
    norm_first=st.booleans(),
    heads=st.sampled_from([1, 2, 4]),
    queries=st.integers(1, 3),
    layers=st.integers(1, 3),
    more=st.integers(1, 5),
    swap=st.booleans(),
)
def test_padding_does_not_change_the_logits(norm_first, heads, queries, layers, more, swap):
    model = built(replace(SMALL, norm_first=norm_first, heads=heads, queries=queries, layers=layers))
    longer, other = (HYPOTHESIS, PREMISE) if swap else (PREMISE, HYPOTHESIS)
    padded = nn.functional.pad(longer, (0, more))
    logits = model(longer, other)["logits"]
    torch.testing.assert_close(model(padded, other)["logits"], logits, atol=1e-6, rtol=1e-6)
    alone = torch.cat([model(longer[i : i + 1], other[i : i + 1])["logits"] for i in range(2)])
    torch.testing.assert_close(alone, logits, atol=1e-6, rtol=1e-6)


@cases("scale", [SMALL, POST])
def test_order_and_sides_do_change_the_logits(scale):
    model = built(scale)
    logits = model(PREMISE, HYPOTHESIS)["logits"]
    for other in (model(PREMISE[:, [1, 0, 2, 3]], HYPOTHESIS), model(HYPOTHESIS, PREMISE)):
        assert (other["logits"] - logits).abs().amax(dim=1).min() > 1e-4


@cases("norm_first", [True, False])
def test_a_layer_is_its_equation(norm_first):
    torch.manual_seed(1)
    layer = EncoderLayer(6, heads=3, norm_first=norm_first, dropout=0.4).double().eval()
    for norm in (layer.attention_norm, layer.feed_forward_norm):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
    x = torch.randn(1, 4, 6, dtype=torch.float64)
    padding = torch.tensor([[False, False, False, True]])

    def attended(states):
        q, k, v = (states @ w.T for w in layer.attention.in_proj_weight.chunk(3))
        heads = []
        for h in range(3):
            part = slice(2 * h, 2 * h + 2)
            scores = q[0, :, part] @ k[0, :, part].T / math.sqrt(2)
            scores[:, 3] = -math.inf
            heads.append(scores.softmax(dim=1) @ v[0, :, part])
        return (torch.cat(heads, dim=1) @ layer.attention.out_proj.weight.T)[None]

    def normalized(states, norm):
        centered = states - states.mean(dim=2, keepdim=True)
        return centered / (centered.square().mean(dim=2, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias

    def transformed(states):
        inner, outer = layer.feed_forward[0], layer.feed_forward[2]
        return (states @ inner.weight.T + inner.bias).clamp_min(0) @ outer.weight.T + outer.bias

    if norm_first:
        y = x + attended(normalized(x, layer.attention_norm))
        z = y + transformed(normalized(y, layer.feed_forward_norm))
    else:
        y = normalized(x + attended(x), layer.attention_norm)
        z = normalized(y + transformed(y), layer.feed_forward_norm)
    torch.testing.assert_close(layer(x, padding), z)


def test_dropout_acts_on_the_feed_forward_output_alone():
    layer = EncoderLayer(6, heads=3, norm_first=True, dropout=0.5)
    assert layer.attention.dropout == 0.0
    assert [type(module).__name__ for module in layer.feed_forward] == ["Linear", "ReLU", "Linear", "Dropout"]
    assert layer.feed_forward[0].out_features == 12
    with torch.no_grad():
        for parameter in layer.feed_forward.parameters():
            parameter.zero_()
    x, padding = torch.randn(2, 5, 6), torch.zeros(2, 5, dtype=torch.bool)
    assert torch.equal(layer.train()(x, padding), layer(x, padding))


def test_attention_has_no_biases():
    assert not [name for name, _ in built(SMALL).named_parameters() if "attention." in name and "bias" in name]


def test_positions_are_sines_and_cosines_of_slower_and_slower_rates():
    encodings = sinusoids(9, 6, like=torch.zeros(()))
    for t in range(9):
        for i in range(3):
            angle = t / 1000 ** (2 * i / 6)
            assert encodings[t, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert encodings[t, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_the_heads_found_are_the_encoders_and_the_pooling_stands_apart():
    model = built(SMALL)
    heads = find_heads(model.encoder)
    assert len(heads) == 3
    assert all("pooling" not in name for name, _ in model.encoder.named_modules())
    assert len(find_heads(model)) == 4


def test_pooling_is_as_many_vectors_as_queries_whatever_the_heads():
    padding = torch.zeros(3, 5, dtype=torch.bool)
    for queries in (1, 3):
        for heads in (1, 4):
            assert QueryPooling(8, heads=heads, queries=queries)(torch.randn(3, 5, 8), padding).shape == (
                3,
                8 * queries,
            )


def test_every_module_with_own_parameters_can_be_drawn_anew():
    model = built(SMALL)
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            assert hasattr(module, "reset_parameters") or hasattr(module, "_reset_parameters"), type(module)
    before = model.pooling.queries.detach().clone()
    model.pooling.reset_parameters()
    assert not torch.equal(model.pooling.queries, before)
    assert model.pooling.queries.std() > 0.5


def test_the_classifier_keeps_the_size_of_its_signal():
    torch.manual_seed(3)
    model = PairClassifier(11, 7, replace(SMALL, classifier_width=256))
    hidden = torch.randn(500, model.classifier[0].in_features)
    for module in model.classifier[:4]:
        hidden = module(hidden)
        assert not isinstance(module, nn.Linear) or not module.bias.any()
    # E[relu(x)^2] = 1/2 and each layer doubles it, so a mean square of 1 comes out as 1
    assert hidden.square().mean().item() == pytest.approx(1.0, abs=0.25)


@cases("scale", [SMALL, POST])
def test_the_loss_is_the_mean_cross_entropy_and_reaches_every_parameter(scale):
    model = built(scale).train()
    labels = torch.tensor([3, 6])
    output = model(PREMISE, HYPOTHESIS, labels)
    picked = output["logits"].log_softmax(dim=1)[range(2), labels]
    torch.testing.assert_close(output["loss"], -picked.mean())
    assert "loss" not in model(PREMISE, HYPOTHESIS)
    output["loss"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert not model.encoder.embedding.weight[0].any()


def test_one_batch_can_be_learned():
    model = built(SMALL).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(40):
        loss = model(PREMISE, HYPOTHESIS, torch.tensor([0, 6]))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


def test_a_row_of_padding_alone_keeps_one_position_and_stays_finite():
    model = built(SMALL)
    received = []
    model.pooling.register_forward_pre_hook(lambda _module, inputs: received.append(inputs[1]))
    logits = model(torch.zeros_like(PREMISE), HYPOTHESIS)["logits"]
    assert logits.isfinite().all()
    assert (~received[0]).sum(dim=1).tolist() == [1, 1, 2, 3]


def test_the_paper_scale_has_the_papers_size():
    model = PairClassifier(13, 7, LOGIC_SCALES["paper"])
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2) == 1.65


@cases(
    ("premise", "hypothesis"),
    [((4,), (2, 4)), ((2, 4), (3, 4)), ((2, 0), (2, 3)), ((0, 3), (0, 3)), ((2, 3, 1), (2, 3))],
)
def test_sides_that_do_not_fit_are_refused(premise, hypothesis):
    sides = [torch.ones(shape, dtype=torch.int64) for shape in (premise, hypothesis)]
    with pytest.raises(ShapeError, match=r"expected \(B, L\) and \(B, L'\)"):
        built(SMALL)(*sides)


@cases(
    ("changed", "message"),
    [
        ({"width": 7, "heads": 1}, "width is 7 with 1 heads"),
        ({"heads": 3}, "width is 8 with 3 heads"),
        ({"layers": 0}, "layers is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changed, message):
    sizes = {"width": 8, "layers": 1, "heads": 2, "norm_first": True, "dropout": 0.0} | changed
    with pytest.raises(SettingError, match=message):
        Encoder(9, **sizes)


def test_one_label_or_no_query_is_refused():
    with pytest.raises(SettingError, match="num_labels is 1"):
        PairClassifier(9, 1, SMALL)
    with pytest.raises(SettingError, match="queries is 0"):
        QueryPooling(8, heads=2, queries=0)
