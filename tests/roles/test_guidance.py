"""A guided head attends where its role allows, in every family; and a mask belongs to one forward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint
from transformers import BartConfig, BartModel

import headwise as hw
from cases import cases
from heads.families import BY_NAME, REACHED, sweep
from heads.family import Family
from heads.forwards import checkpoint_activations, results, same, without_dropout
from roles.guided import encoder, random_mask, square, weights_of


@sweep(REACHED)
@cases("empty", ["regular", "self"])
def test_a_guided_head_keeps_the_weights_its_role_allows_and_the_others_all(family: Family, empty: str):
    model, inputs = family.build(), family.inputs(padded=family.maskable)
    heads = square(hw.find_heads(model))
    heads = hw.Heads(model, tuple(site for site in heads if site.layer == 0), heads.projections, heads.found)
    plain, _ = weights_of(model, heads, inputs)
    batch, total, tokens, _ = plain[0].weights.shape
    mask = random_mask(batch, total, tokens, empty=empty)
    with hw.guide(heads, mask) as guidance:
        guided, _ = weights_of(model, heads, inputs)
    assert guidance.calls == {site.name: sum(c.site is site for c in guided) for site in heads}
    # Albert's one module is called for each layer: later calls see what the first changed
    for before, after in zip(plain[:1], guided[:1], strict=True):
        old, new = before.weights, after.weights
        causal = not bool(old.triu(1).any())
        allowed = mask.allowed(causal=causal)[:, [1, 0]]
        wanted = old[:, [1, 0]] * allowed
        left = wanted.sum(-1, keepdim=True)
        # a sink takes a share of every row, and stays
        sink = 1 - old[:, [1, 0]].sum(-1, keepdim=True)
        whole = left + torch.where(sink > 1e-5, sink, 0.0)
        wanted = torch.where(left > 0, wanted / whole.clamp_min(1e-30), 0.0)
        torch.testing.assert_close(new[:, [1, 0]], wanted, atol=2e-6, rtol=1e-4)
        torch.testing.assert_close(new[:, 2:], old[:, 2:])
        assert not torch.allclose(new, old)


@sweep(REACHED)
def test_a_mask_without_roles_changes_nothing_and_the_model_is_afterwards_what_it_was(family: Family):
    model, inputs = family.build(), family.inputs(padded=family.maskable)
    heads = square(hw.find_heads(model))
    captures, expected = weights_of(model, heads, inputs)
    batch, total, tokens, _ = captures[0].weights.shape
    keep = torch.ones(batch, tokens, dtype=torch.bool)
    if isinstance(model, nn.Transformer):
        # stock modules change class, and their fast path with them
        expected = results(model, inputs)
    plain = results(model, inputs)
    with hw.guide(heads, hw.roles.HeadMask.regular(keep, total)):
        for before, after in zip(expected, results(model, inputs), strict=True):
            torch.testing.assert_close(after, before, atol=2e-6, rtol=1e-4)
    assert same(plain, results(model, inputs))


def test_chosen_layers_are_guided_and_the_others_are_not():
    model = encoder(3).eval()
    heads = hw.find_heads(model)
    x = torch.randn(2, 5, 12)
    mask = random_mask(2, 3, 5)
    with hw.Taps(heads, weights=True) as taps, hw.guide(heads.layers(1), mask):
        model(x)
        first, second, third = taps.read()
    forbidden = ~mask.allowed()
    assert not second.weights[forbidden].any()
    assert bool(first.weights[forbidden].all())
    assert bool(third.weights[forbidden].all())


@cases("name", ["BERT", "ModernBERT", "torch.nn.Transformer"])
def test_a_batch_brings_its_mask_by_name(name: str):
    family = BY_NAME[name]
    model, inputs = family.build(), family.inputs()
    heads = square(hw.find_heads(model))
    captures, _ = weights_of(model, heads, inputs)
    mask = random_mask(*captures[0].weights.shape[:3])
    with hw.guide(heads, mask):
        expected = results(model, inputs)
    with hw.guide(heads):
        assert same(results(model, {**inputs, "role_mask": mask}), expected)
        assert same(results(model, {**inputs, "role_mask": mask}), expected)


def test_regular_heads_are_as_they_were_whatever_the_mask_takes_for_padding():
    model = encoder().eval()
    x, keep = torch.randn(2, 5, 12), torch.tensor([[True] * 5, [True, True, True, False, False]])
    heads = hw.find_heads(model)
    plain, _ = weights_of(model, heads.layer(0), {"src": x})
    with hw.guide(heads, random_mask(2, 3, 5, keep)):
        guided, _ = weights_of(model, heads.layer(0), {"src": x})
    torch.testing.assert_close(guided[0].weights[:, 2], plain[0].weights[:, 2])
    assert not guided[0].weights[1, :2, :, 3:].any()


def test_one_mask_serves_one_forward():
    model = encoder().eval()
    heads = hw.find_heads(model)
    x = torch.randn(2, 5, 12)
    first, second = random_mask(2, 3, 5), random_mask(2, 3, 5, empty="self")
    guidance = hw.guide(heads, first)
    one = model(x)
    with pytest.raises(hw.errors.MaskError, match="belongs to the previous forward"):
        model(x)
    other = guidance(second) and model(x)
    assert not torch.equal(one, other)
    with guidance.paused():
        plain = model(x)
    assert not torch.equal(plain, other)
    # a mask that is given again serves again, also when the forward before it ended in an error
    assert torch.equal(guidance(first) and model(x), one)
    guidance.remove()
    assert torch.equal(model(x), plain)
    kept = hw.guide(heads, first, every_forward=True)
    assert torch.equal(model(x), one)
    assert torch.equal(model(x), one)
    kept.remove()


def test_a_part_that_is_called_alone_is_a_forward_too():
    model = encoder().eval()
    x = torch.randn(2, 5, 12)
    mask = random_mask(2, 3, 5)
    guidance = hw.guide(hw.find_heads(model), mask)
    guided = model.layers[1](model.layers[0](x))
    assert set(guidance.calls.values()) == {1}
    for again in (model.layers[0], model):
        with pytest.raises(hw.errors.MaskError, match="belongs to the previous forward"):
            again(x)
    assert torch.equal(guidance(mask) and model(x), guided)
    with pytest.raises(hw.errors.MaskError, match="belongs to the previous forward"):
        model.layers[0](x)
    guidance.remove()


def test_what_did_not_fire_is_said():
    model = encoder().eval()
    heads = hw.find_heads(model)
    x, mask = torch.randn(2, 5, 12), random_mask(2, 3, 5)
    with (
        pytest.raises(hw.errors.NotFired, match=r"guided no call of 2 of 2 attentions: layers.0.self_attn"),
        hw.guide(heads, mask),
    ):
        pass
    with pytest.raises(hw.errors.NotFired, match="no mask was given"), hw.guide(heads):
        pass
    guidance = hw.guide(heads)
    with pytest.raises(hw.errors.NotFired, match="this forward has no mask"):
        model(x)
    guidance(mask)
    with pytest.raises(hw.errors.NotFired, match="guided no call"):
        guidance(mask)
    model(x)
    guidance(mask)
    model.layers[0](x)
    with pytest.raises(hw.errors.NotFired, match=r"1 of 2 attentions: layers.1.self_attn"):
        guidance.check()
    guidance.remove()


def test_a_second_handle_takes_over_and_a_part_of_the_first_ones_sites_is_refused():
    model = encoder().eval()
    heads = hw.find_heads(model)
    x = torch.randn(2, 5, 12)
    first = hw.guide(heads, random_mask(2, 3, 5))
    with pytest.raises(hw.errors.SettingError, match=r"layers.0.self_attn is guided already"):
        hw.guide(heads.layer(0))
    second = hw.guide(heads, random_mask(2, 3, 5))
    model(x)
    assert (first.calls, second.calls) == (dict.fromkeys(first.calls, 0), dict.fromkeys(first.calls, 1))
    second.remove()
    hw.guide(heads.layer(0)).remove()
    one, other = hw.guide(heads.layer(0), random_mask(2, 3, 5)), hw.guide(heads.layer(1), random_mask(2, 3, 5))
    model(x)
    assert list(one.calls.values()) == list(other.calls.values()) == [1]
    one.remove()
    other.remove()


def test_a_handle_that_was_removed_or_replaced_takes_no_mask():
    model = encoder().eval()
    heads, x, mask = hw.find_heads(model), torch.randn(2, 5, 12), random_mask(2, 3, 5)
    plain = model(x)
    with hw.guide(heads) as first:
        model(x, role_mask=mask)
    second = hw.guide(heads)
    third = hw.guide(heads)
    for handle in (first, second):
        assert repr(handle) == "Guidance(2 attentions, removed)"
        with pytest.raises(
            hw.errors.NotFired, match=r"was removed, .* a later hw.guide, .* call the handle that guides now"
        ):
            handle(mask)
    assert repr(third) == "Guidance(2 attentions, no mask yet)"
    guided = third(mask) and model(x)
    assert not torch.equal(guided, plain)
    shown = "Guidance(2 attentions, HeadMask(2 sentences, 10 tokens, 3 heads; allowed in role 0: "
    assert repr(third).startswith(shown)
    third.remove()
    assert torch.equal(model(x), plain)


# torch's own, where a graph ends between the projections and the scores
@pytest.mark.full
def test_a_compiled_model_is_guided_by_the_mask_of_each_batch():
    model = encoder().eval()
    guidance = hw.guide(hw.find_heads(model))
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    frames = []
    for seed in range(5):
        x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(seed))
        mask = random_mask(2, 3, 5, empty=["regular", "self"][seed % 2])
        expected = model(x, role_mask=mask)
        torch.testing.assert_close(compiled(x, role_mask=mask), expected)
        frames.append(counter.frame_count)
    # the first call marks its sites as reached, which the second is compiled with; a new mask compiles nothing anew
    assert frames[0] > 0
    assert frames[1] <= frames[0] + 1
    assert frames[1:] == frames[1:2] * 4
    with pytest.raises(hw.errors.MaskError, match="belongs to the previous forward"):
        compiled(x)
    guidance.remove()


def test_guided_heads_learn_and_mixed_precision_is_guided():
    model = encoder()
    x, mask = torch.randn(2, 5, 12), random_mask(2, 3, 5)
    with hw.guide(hw.find_heads(model)), torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(x, role_mask=mask)
        low.float().square().sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    with hw.guide(hw.find_heads(model), mask):
        torch.testing.assert_close(low.float(), model(x), atol=0.1, rtol=0.1)


def test_a_causal_mask_given_to_torch_enters_before_the_policy():
    model = encoder().eval()
    heads = hw.find_heads(model)
    x, mask = torch.randn(2, 5, 12), random_mask(2, 3, 5, empty="self")
    future = nn.Transformer.generate_square_subsequent_mask(5)
    with hw.Taps(heads, weights=True) as taps, hw.guide(heads, mask):
        model(x, mask=future, is_causal=True)
        capture = taps.read()[0]
    assert torch.equal(capture.weights[:, [1, 0]] > 0, mask.allowed(causal=True)[:, [1, 0]])


# Forwards


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


@cases("name", ["BERT", "GPT-2", "T5"])
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
