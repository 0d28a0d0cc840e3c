"""A mask belongs to one forward: ended by an error, in the middle, computed again by a checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BartConfig, BartModel

import headwise as hw
from heads.families import BY_NAME
from heads.forwards import checkpoint_activations, results, without_dropout
from roles.guided import encoder, random_mask, square, weights_of


def gradients(name: str, *, checkpointing: bool) -> list[Tensor]:
    """Two guided forwards, then their backwards in the other order, with no mask of theirs in place."""
    family = BY_NAME[name]
    model = family.build().double().train()
    without_dropout(model)
    heads = square(hw.find_heads(model))
    captures, _ = weights_of(model, heads, family.inputs())
    masks = [random_mask(*captures[0].weights.shape[:3], empty=empty) for empty in ("regular", "self")]
    if checkpointing:
        checkpoint_activations(model, reentrant=False)
    guidance = hw.guide(heads)
    losses = []
    for mask in masks:
        output = results(model, {**family.inputs(), "role_mask": mask})[0]
        losses.append((output * torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype)).mean())
    guidance.remove()
    (losses[1] * 3.0).backward()
    losses[0].backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "T5"])
def test_what_a_checkpoint_computes_again_has_the_mask_of_its_forward(name: str):
    expected, found = gradients(name, checkpointing=False), gradients(name, checkpointing=True)
    assert len(expected) == len(found) > 0
    for before, after in zip(expected, found, strict=True):
        torch.testing.assert_close(after, before)


def test_a_forward_that_ended_in_an_error_is_over():
    model = encoder().eval()
    x, mask = torch.randn(2, 5, 12), random_mask(2, 3, 5)
    with hw.guide(hw.find_heads(model), mask):
        expected = model(x)
    guidance = hw.guide(hw.find_heads(model))
    failures = (
        (torch.randn(2, 5, 7), mask, (RuntimeError, AssertionError, hw.errors.HeadwiseError)),
        (torch.randn(2, 6, 12), mask, hw.errors.MaskError),
        (torch.randn(3, 5, 12), mask, hw.errors.MaskError),
        (x, "no mask", hw.errors.MaskError),
    )
    for wrong, given, error in failures:
        with pytest.raises(error):
            model(wrong, role_mask=given)
        # its mask is no later forward's, and the next one is not refused for it
        with pytest.raises(
            (hw.errors.NotFired, hw.errors.MaskError), match=r"this forward has no mask|belongs to the previous forward"
        ):
            model(x)
        assert torch.equal(model(x, role_mask=mask), expected)
    guidance(mask)
    with pytest.raises(hw.errors.MaskError, match="has 5 tokens"):
        model(torch.randn(2, 4, 12))
    with pytest.raises(hw.errors.NotFired, match="this forward has no mask"):
        model(x)
    guidance.remove()


def test_a_forward_that_ends_in_the_middle_is_over_too():
    model = encoder().eval()
    x, masks = torch.randn(2, 5, 12), [random_mask(2, 3, 5), random_mask(1, 3, 5)]
    guidance = hw.guide(hw.find_heads(model))
    handle = model.layers[0].norm1.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x, role_mask=masks[0])
    handle.remove()
    found = model(x[:1], role_mask=masks[1])
    assert guidance.calls == {"layers.0.self_attn": 2, "layers.1.self_attn": 1}
    guidance.remove()
    with hw.guide(hw.find_heads(model), masks[1], every_forward=True):
        with pytest.raises(hw.errors.MaskError, match="has 1 sentences"):
            model(x)
        # the mask that stays is still there
        assert torch.equal(model(x[:1]), found)


def test_a_mask_that_is_refused_once_is_not_refused_for_ever():
    model = encoder().eval()
    x, masks = torch.randn(2, 5, 12), [random_mask(2, 3, 5), random_mask(2, 3, 5, empty="self")]
    with hw.guide(hw.find_heads(model), masks[1]):
        expected = model(x)
    with hw.guide(hw.find_heads(model), masks[0]) as guidance:
        with pytest.raises(hw.errors.NotFired, match="2 of 2 attentions"):
            guidance(masks[1])
        assert torch.equal(model(x), expected)


def test_layers_that_training_leaves_out_by_chance_are_no_fault():
    torch.manual_seed(0)
    sizes = {"d_model": 12, "encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 8}
    config = BartConfig(
        vocab_size=60, encoder_layers=2, decoder_layers=1, decoder_ffn_dim=8, encoder_layerdrop=0.5, **sizes
    )
    model = BartModel(config)
    mask = random_mask(2, 3, 5)
    guidance = hw.guide(hw.find_heads(model).kind("self"))
    for _ in range(8):
        model(torch.randint(4, 60, (2, 5)), role_mask=mask)
    assert 0 < sum(guidance.calls.values()) < 16
    # in evaluation every layer runs, and one that does not is a fault
    model.eval()(torch.randint(4, 60, (2, 5)), role_mask=mask)
    guidance(mask)
    with pytest.raises(hw.errors.NotFired, match="2 of 2 attentions"):
        guidance.check()
    guidance.remove()


def test_a_whole_model_that_is_computed_again_does_not_bring_its_mask_again():
    model = encoder()
    x, masks = torch.randn(2, 5, 12), [random_mask(2, 3, 5), random_mask(2, 3, 5, empty="self")]
    guidance = hw.guide(hw.find_heads(model))
    plain = [model(x, role_mask=mask).square().sum() for mask in masks]
    expected = torch.autograd.grad(plain[0], list(model.parameters()))
    again = [checkpoint(model, x, role_mask=mask, use_reentrant=False).square().sum() for mask in masks]
    found = torch.autograd.grad(again[0], list(model.parameters()))
    for before, after in zip(expected, found, strict=True):
        torch.testing.assert_close(after, before)
    # the mask given last is still the one in place, and has guided
    guidance.check()
    guidance.remove()


def test_a_copied_guidance_guides_nothing_and_leaves_the_model_guided():
    model = encoder()
    x, mask = torch.randn(2, 5, 12), random_mask(2, 3, 5)
    guidance = hw.guide(hw.find_heads(model), mask, every_forward=True)
    guided = model(x)
    other = copy.copy(guidance)
    other.remove()
    assert torch.equal(model(x), guided)
    with pytest.raises(hw.errors.NotFired, match="is a copy or was unpickled"):
        other(mask)
    # as a model that holds its guidance is copied for averaged weights
    twin = copy.deepcopy(nn.ModuleDict({"model": model}))
    model.guidance = guidance
    assert not torch.equal(twin["model"](x), guided)
    assert not torch.equal(copy.deepcopy(model)(x), guided)
