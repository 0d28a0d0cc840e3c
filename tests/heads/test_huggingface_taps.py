"""Taps on every family: what they read is what the heads computed, and reading it changes nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import headwise as hw
from cases import cases
from heads.families import BY_NAME, FAMILIES, REACHED, bed, sweep
from heads.family import Family
from heads.forwards import checkpoint_activations, no_bias, require_same_gradients, results, same


@sweep(FAMILIES)
def test_outputs_and_values_of_each_site_are_read_with_their_padding_and_nothing_changes(family: Family):
    model, inputs = family.build(), family.inputs(padded=family.maskable)
    # stock modules change class, and their fast path with them
    [site.expose() for site in hw.find_heads(model)]
    plain = results(model, inputs)
    with hw.Taps(hw.find_heads(model), outputs=True, values=True) as taps:
        assert same(plain, results(model, inputs))
        captures = taps.read()
        model(**family.inputs(padded=False))
        for capture in taps.read():
            for keep in (capture.key_keep, capture.query_keep):
                assert keep is None or bool(keep.all())
    assert same(plain, results(model, inputs))
    expected = sorted(name for kind in family.attentions for name in kind.names for _ in range(kind.calls))
    assert sorted(capture.site.name for capture in captures) == expected
    for capture in captures:
        site = capture.site
        assert capture.outputs.shape[2:] == (site.num_heads, site.head_size)
        assert capture.values.shape[2:] == (site.key_value_heads, site.head_size)
        assert len(capture.outputs) == len(capture.values) >= 2
        if family.maskable:
            require_padding(family, model, inputs, capture)


def require_padding(family: Family, model: nn.Module, inputs: dict, capture: hw.heads.Capture) -> None:
    site, keep = capture.site, capture.key_keep
    if family.name in ("CLIP", "Kosmos-2") and not site.name.startswith("text"):
        assert keep is None
        return
    if site.kind not in ("self", "cross") and "encoder_hidden_states" not in family.inputs():
        # the target has no padding
        assert keep is None or bool(keep.all())
        return
    assert keep.shape == capture.values.shape[:2]
    mask = inputs.get("attention_mask")
    if family.name == "Wav2Vec2":
        mask = model._get_feature_vector_attention_mask(keep.shape[1], mask)
    elif isinstance(model, nn.Transformer):
        mask = ~inputs["src_key_padding_mask"]
    elif site.kind == "cross" and "encoder_attention_mask" in inputs:
        mask = inputs["encoder_attention_mask"]
    assert torch.equal(keep, mask.bool())
    assert not bool(keep.all())
    # Funnel pools its queries between blocks
    if site.kind != "cross" and capture.outputs.shape[1] == keep.shape[1]:
        assert torch.equal(capture.query_keep, keep)


@cases("how", ["plain", "biased", "eager"])
@sweep(REACHED)
def test_weights_beside_the_attention_are_the_same_and_leave_the_outputs_to_the_bit(family: Family, how: str):
    if how == "eager" and not family.interface:
        return
    model, inputs = family.build().eval(), family.inputs(padded=family.maskable)
    heads = hw.find_heads(model)
    # stock modules change class, and their fast path with them
    [site.expose() for site in heads]
    if how == "eager":
        model.set_attn_implementation("eager")
    with torch.no_grad():
        if how == "biased":
            hw.bias_heads(heads, no_bias)
        before = results(model, inputs)
        with hw.Taps(heads, weights=True) as taps:
            explicit = results(model, inputs)
            expected = taps.read()
        with hw.Taps(heads, weights=True, beside=True) as taps:
            assert same(results(model, inputs), before)
            found = taps.read()
        # who attends with the weights decides for all
        with hw.Taps(heads, weights=True, beside=True) as taps, hw.Taps(heads, weights=True) as others:
            assert same(results(model, inputs), explicit)
            assert len(others.read()) == len(taps.read())
    for one, other in zip(found, expected, strict=True):
        assert one.weights is not None
        assert other.weights is not None
        torch.testing.assert_close(one.weights, other.weights, atol=1e-6, rtol=1e-5)


@cases("name", ["BERT", "GPT-2", "Llama", "T5", "Whisper", "ModernBERT", "Gemma", "GPT-OSS"])
def test_weights_are_those_the_familys_own_eager_attention_returns(name: str):
    family = BY_NAME[name]
    model, inputs, heads = bed(family, padded=family.maskable)
    with hw.Taps(heads, weights=True) as taps:
        model(**inputs)
        captures = taps.read()
    model.set_attn_implementation("eager")
    found = model(**inputs, output_attentions=True)
    names = {"self": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    for capture in captures:
        own = "attentions" if "attentions" in found else names[capture.site.kind]
        torch.testing.assert_close(capture.weights, found[own][capture.site.layer], atol=1e-6, rtol=1e-4)
    # and in a model that runs eager, through its own function
    with hw.Taps(heads, weights=True) as taps:
        again = model(**inputs, output_attentions=True)
        for capture in taps.read():
            own = "attentions" if "attentions" in again else names[capture.site.kind]
            torch.testing.assert_close(capture.weights, again[own][capture.site.layer])
    assert model.config._attn_implementation == "eager"


@cases("name", ["T5", "BART", "Marian", "BERT with cross-attention", "GPT-2 with cross-attention"])
def test_cross_attention_has_the_padding_of_both_sides(name: str):
    family = BY_NAME[name]
    inputs = family.inputs(padded=True)
    decoder = torch.ones(2, 5, dtype=torch.long)
    decoder[0, 3:] = 0
    if "decoder_input_ids" in inputs:
        inputs["decoder_attention_mask"] = decoder
        expected = decoder.bool()
    else:
        expected = inputs["attention_mask"].bool()
    model = family.build()
    with hw.Taps(hw.find_heads(model).kind("cross"), outputs=True) as taps:
        model(**inputs)
        captures = taps.read()
    source = inputs.get("encoder_attention_mask", inputs["attention_mask"]).bool()
    for capture in captures:
        assert torch.equal(capture.key_keep, source)
        assert torch.equal(capture.query_keep, expected)


@cases("implementation", ["sdpa", "eager"])
@cases("name", ["GPT-2", "Llama", "Mistral", "BERT"])
def test_padding_on_the_left_is_padding(name: str, implementation: str):
    family = BY_NAME[name]
    model, inputs = family.build(), family.inputs()
    model.set_attn_implementation(implementation)
    inputs["attention_mask"][0, :3] = 0
    with hw.Taps(hw.find_heads(model), outputs=True) as taps:
        model(**inputs)
        for capture in taps.read():
            assert torch.equal(capture.key_keep, inputs["attention_mask"].bool())
            assert torch.equal(capture.query_keep, inputs["attention_mask"].bool())


@sweep(FAMILIES)
def test_the_gradient_of_the_output_penalty_reaches_every_value_weight(family: Family):
    model = family.build().train()
    heads = hw.find_heads(model)
    penalty = hw.Disagreement(heads, hw.similarity.Output())
    torch.manual_seed(0)  # Wav2Vec2 leaves whole layers out at random
    model(**family.inputs(padded=family.maskable))
    penalty().backward()
    for head_slice in heads.slices():
        if head_slice.projection == "value":
            gradient = head_slice.of(*(part.parameter.grad for part in head_slice.parts))
            assert bool((gradient.flatten(1).abs().amax(1) > 0).all()), head_slice.name


@cases("name", ["BERT", "GPT-2", "Llama", "T5", "ModernBERT"])
def test_checkpointing_gives_the_same_gradients_with_backward_outside_and_is_refused_when_reentrant(name: str):
    inputs = BY_NAME[name].inputs(padded=True)
    term = hw.similarity.Output() + 0.5 * hw.similarity.Subspace() + 2 * hw.similarity.Position()

    def step(model: nn.Module) -> None:
        with hw.Disagreement(hw.find_heads(model), term) as penalty:
            results(model, inputs)
            loss = penalty()
        loss.backward()

    require_same_gradients(name, step)
    model = BY_NAME[name].build().train()
    checkpoint_activations(model, reentrant=True)
    model.enable_input_require_grads()
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.Output())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results(model, inputs)
    with pytest.raises(hw.errors.NotFired, match=r"carries no gradient.*use_reentrant=False"):
        penalty()


def test_a_generated_token_is_real_whatever_the_padding_before_it():
    family = BY_NAME["Llama"]
    model, inputs = family.build(), family.inputs()
    inputs["attention_mask"][0, :3] = 0
    with hw.Taps(hw.find_heads(model), outputs=True) as taps:
        model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        captures = taps.read()
    expected = torch.cat([inputs["attention_mask"].bool(), torch.ones(2, 2, dtype=torch.bool)], dim=1)
    for capture in captures:
        assert torch.equal(capture.key_keep, expected)
        assert torch.equal(capture.query_keep, torch.ones(2, 1, dtype=torch.bool))
