"""Taps read what the heads computed: every call once, with its padding, and never silently nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel

import headwise as hw
from cases import cases
from heads.attentions import SeparateAttention
from headwise.heads.scores import huggingface
from headwise.heads.taps import UNREAD_CALLS
from headwise.nn import additive as additive_module
from headwise.nn import checkpointing, multihead


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


@cases("training", [False, True])
def test_projections_that_two_attentions_share_are_read_in_the_calls_of_each(training: bool):
    torch.manual_seed(0)
    model = nn.Sequential(SeparateAttention(key_value_heads=2), SeparateAttention(key_value_heads=2)).train(training)
    model[1].v_proj, model[1].o_proj = model[0].v_proj, model[0].o_proj
    apart = copy.deepcopy(model)
    apart[1].v_proj, apart[1].o_proj = copy.deepcopy(apart[0].v_proj), copy.deepcopy(apart[0].o_proj)
    first, second = torch.randn(3, 5, 12), torch.randn(2, 6, 12)
    read = []
    for own in (model, apart):
        with hw.Taps(hw.find_heads(own), outputs=True, values=True) as taps:
            own(first)
            own(second)
            read.append(taps.read())
    assert [len(captures) for captures in read] == ([4, 4] if training else [2, 2])
    for found, expected in zip(*read, strict=True):
        assert found.site.name == expected.site.name
        assert torch.equal(found.outputs, expected.outputs)
        assert torch.equal(found.values, expected.values)


def test_weights_are_read_before_dropout_and_padding_given_by_position_is_seen():
    attention, x = nn.MultiheadAttention(8, 2, dropout=0.6, batch_first=True), torch.randn(2, 5, 8)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    heads = hw.find_heads(attention)
    with hw.Taps(heads, weights=True) as weighing, hw.Taps(heads, outputs=True) as taps:
        attention(x, x, x, padding)
        torch.testing.assert_close(weighing.read()[0].weights.sum(-1), torch.ones(2, 2, 5))
        assert torch.equal(taps.read()[0].key_keep, ~padding)


def test_an_encoder_called_on_two_sides_gives_both_with_their_own_padding():
    model = encoder()
    first, second = torch.zeros(3, 5, dtype=torch.bool), torch.zeros(3, 7, dtype=torch.bool)
    first[0, 2:], second[1, 6:] = True, True
    with hw.Taps(hw.find_heads(model), outputs=True) as taps:
        model(torch.randn(3, 5, 8), src_key_padding_mask=first)
        model(torch.randn(3, 7, 8), src_key_padding_mask=second)
        captures = taps.read()
    assert [capture.outputs.shape[1] for capture in captures] == [5, 5, 7, 7]
    assert torch.equal(captures[0].query_keep, ~first)
    assert torch.equal(captures[3].query_keep, ~second)


def test_cross_attention_takes_its_queries_padding_from_the_decoder_in_each_of_two_calls():
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    source = torch.zeros(2, 6, dtype=torch.bool)
    source[0, 4:] = True
    paddings = [torch.zeros(2, 4, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool)]
    paddings[0][1, 3:] = paddings[1][0, 1:] = True
    with hw.Taps(hw.find_heads(model).kind("cross"), outputs=True) as taps:
        for padding in paddings:
            model(
                torch.randn(2, 6, 8),
                torch.randn(2, padding.shape[1], 8),
                src_key_padding_mask=source,
                memory_key_padding_mask=source,
                tgt_key_padding_mask=padding,
            )
        for capture, padding in zip(taps.read(), paddings, strict=True):
            assert torch.equal(capture.query_keep, ~padding)
            assert torch.equal(capture.key_keep, ~source)


def test_a_copy_of_a_tapped_model_is_not_captured():
    model = encoder()
    x = torch.randn(3, 5, 8)
    with hw.Taps(hw.find_heads(model), outputs=True, weights=True) as taps:
        model(x)
        twin = copy.deepcopy(model)
        twin(x)
        with torch.no_grad():
            twin.eval()(x)
        assert len(taps.read()) == 2
        model(x)
        hw.verify(hw.find_heads(model), (x,))
        assert all(capture.outputs.dtype == torch.float32 for capture in taps.read())


def test_evaluation_does_not_accumulate():
    model = encoder().eval()
    with hw.Taps(hw.find_heads(model), outputs=True) as taps, torch.no_grad():
        for _ in range(5):
            model(torch.randn(3, 5, 8))
        assert len(taps.read()) == 2
        model.layers[0](torch.randn(3, 5, 8))
        model.layers[0](torch.randn(3, 5, 8))
        model.layers[1](torch.randn(3, 5, 8))
        assert len(taps.read()) == 2


def test_what_an_evaluation_left_unread_does_not_enter_the_next_penalty():
    model = encoder(1)
    with hw.Taps(hw.find_heads(model), outputs=True) as taps:
        with torch.no_grad():
            model.eval()(torch.randn(3, 5, 8))
        model.train()(torch.randn(3, 7, 8))
        (capture,) = taps.read()
    assert capture.outputs.shape[1] == 7


class Split(nn.Module):
    """A model whose parts are called alone, too."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.fails = encoder, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        return x if not self.fails else x / (1 // 0)


@cases("training", [True, False])
def test_half_a_forward_that_failed_does_not_enter_the_next_penalty(training: bool):
    model = Split(encoder(1)).train(training)
    with hw.Taps(hw.find_heads(model), outputs=True) as taps:
        for alone in (False, True):
            # then a part is called alone
            call = model.encoder if alone else model
            call(torch.randn(2, 7, 8))
            model.fails = True
            with pytest.raises(ZeroDivisionError):
                model(torch.randn(3, 5, 8))
            model.fails = False
            call(torch.randn(2, 6, 8))
            lengths = [capture.outputs.shape[1] for capture in taps.read()]
            assert lengths == ([7, 6] if training else [6])


def test_a_forward_that_failed_while_nothing_is_read_takes_no_capture_of_an_earlier_one_with_it():
    model = Split(encoder(1))
    with hw.Taps(hw.find_heads(model), outputs=True) as taps:
        model(torch.randn(2, 7, 8))
        model.fails = True
        with taps.paused(), pytest.raises(ZeroDivisionError):
            model(torch.randn(3, 5, 8))
        assert [capture.outputs.shape[1] for capture in taps.read()] == [7]


def test_training_that_never_reads_is_stopped():
    model = encoder(1)
    x = torch.randn(1, 2, 8)
    with hw.Taps(hw.find_heads(model), outputs=True):
        for _ in range(UNREAD_CALLS):
            model(x)
        with pytest.raises(hw.errors.NotFired, match="never read"):
            model(x)


def test_reading_without_a_forward_is_refused_and_names_the_silent_sites():
    model = encoder()
    with hw.Taps(hw.find_heads(model), outputs=True) as taps:
        with pytest.raises(hw.errors.NotFired, match=r"2 of 2 tapped sites.*layers\.0\.self_attn"):
            taps.read()
        model.layers[0](torch.randn(3, 5, 8))
        with pytest.raises(hw.errors.NotFired, match=r"1 of 2 tapped sites.*layers\.1\.self_attn"):
            taps.read()


def bert() -> BertModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    return BertModel(BertConfig(vocab_size=20, **sizes), add_pooling_layer=False)


def additive() -> hw.nn.AdditiveAttention:
    return hw.nn.AdditiveAttention(8, 6, 2)


@cases(
    ("build", "wanted"),
    [(encoder, "weights"), (encoder, "mean_weights"), (bert, "weights"), (bert, "mean_weights"), (additive, "weights")],
)
def test_weights_are_not_computed_while_taps_are_paused_nor_in_evaluation_of_those_for_training(
    build, wanted, monkeypatch
):
    model = build()
    inputs = torch.randint(20, (3, 5)) if build is bert else torch.randn(3, 5, 8)
    computed = []
    original = checkpointing.resolve_request

    def watch(*arguments, **options):
        answer = original(*arguments, **options)
        computed.append(answer.weights or answer.mean_weights)
        return answer

    for module in (multihead, additive_module, huggingface):
        monkeypatch.setattr(module, "resolve_request", watch)
    taps = hw.Taps(hw.find_heads(model), training_only=True, **{wanted: True})
    model.eval()
    model(inputs)
    model.train()
    with torch.no_grad():
        model(inputs)
    with taps.paused():
        model(inputs)
    assert computed
    assert not any(computed)
    model(inputs)
    assert any(computed)
    assert all(getattr(capture, wanted) is not None for capture in taps.read())


def test_recomputation_by_checkpointing_is_not_captured_again():
    model = encoder(1)
    x = torch.randn(3, 5, 8, requires_grad=True)
    with hw.Taps(hw.find_heads(model), outputs=True) as taps:
        loss = checkpoint(model, x, use_reentrant=False).square().mean()
        (capture,) = taps.read()
        (loss + capture.outputs.square().mean()).backward()
        with pytest.raises(hw.errors.NotFired):
            taps.read()


def test_values_that_do_not_match_the_mask_of_their_call_and_taps_of_nothing_are_refused():
    model = SeparateAttention()
    with hw.Taps(hw.find_heads(model), values=True) as taps:
        # broadcast by the attention
        model(torch.randn(3, 6, 12), key_padding_mask=torch.zeros(3, 1, dtype=torch.bool))
        with pytest.raises(hw.errors.NotFired, match=r"values of 6 tokens, and the mask .* for 1 keys"):
            taps.read()
    with pytest.raises(hw.errors.SettingError, match="given nothing to read"):
        hw.Taps(hw.find_heads(model))
