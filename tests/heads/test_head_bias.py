"""A bias on a head's scores acts on that head alone, in every family, and belongs to the forward it ran with."""

from __future__ import annotations

import contextlib
import functools
import gc
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw
from cases import cases
from heads.families import BY_NAME, REACHED, bed, sweep
from heads.family import Family
from heads.forwards import (
    checkpoint_activations,
    first_key_only,
    generator,
    no_bias,
    prompt,
    results,
    same,
    weighed,
    without_dropout,
)


@sweep(REACHED)
def test_a_bias_on_a_head_changes_that_head_and_no_other(family: Family):
    model, inputs, heads = bed(family, padded=family.maskable)
    with hw.Taps(heads, outputs=True, values=True) as taps:
        results(model, inputs)
        before = taps.read()
        for site in {id(s): s for s in heads.sites if s.layer == 0}.values():
            one = hw.Heads(model, (site,), heads.projections, heads.found)
            with hw.bias_heads(one, first_key_only):
                results(model, inputs)
            after = taps.read()
            index = next(i for i, capture in enumerate(before) if capture.site is site)
            others = [h for h in range(site.num_heads) if h != 1]
            old, new = before[index], after[index]
            torch.testing.assert_close(new.outputs[:, :, others], old.outputs[:, :, others], atol=1e-6, rtol=1e-5)
            group = site.num_heads // site.key_value_heads
            seen = new.values[:, :1, 1 // group].expand_as(new.outputs[:, :, 1])
            rows = torch.ones_like(seen[..., 0], dtype=torch.bool)
            if family.name in ("Mistral", "ModernBERT"):
                # a window that does not hold key 0 leaves no key: the output is 0
                rows = new.outputs[:, :, 1].abs().amax(-1) > 0
                assert bool(rows.any())
            # NeoMME gates its heads, and a sink of GPT-OSS takes a part of the weight
            if family.name not in ("NeoMME", "GPT-OSS"):
                torch.testing.assert_close(new.outputs[:, :, 1][rows], seen[rows])
            assert not torch.allclose(new.outputs[:, :, 1], old.outputs[:, :, 1])


def drawn(site: hw.heads.Site, call: hw.nn.ScoreCall) -> Tensor:
    generator = torch.Generator().manual_seed(site.layer)
    return torch.randn(call.batch, call.heads, call.queries, call.keys, generator=generator)


@sweep(REACHED)
def test_outputs_are_weighted_sums_of_values_under_any_bias_and_a_bias_of_zero_changes_nothing(family: Family):
    model = family.build()
    heads = hw.find_heads(model)
    for padded in {False, family.maskable}:
        inputs = family.inputs(padded=padded)
        plain = expected = results(model, inputs)
        for bias in (None, no_bias, drawn):
            with contextlib.nullcontext() if bias is None else hw.bias_heads(heads, bias):
                expected = results(model, inputs) if bias is drawn else expected
                require_close(results(model, inputs), expected)
                with hw.Taps(heads, outputs=True, values=True, weights=True) as taps:
                    require_close(results(model, inputs), expected)
                    captures = taps.read()
            for capture in captures:
                sums = capture.weights.sum(-1)
                if family.name == "GPT-OSS":
                    assert bool((sums < 1.0).all())
                else:
                    torch.testing.assert_close(sums, torch.ones_like(sums))
                # NeoMME takes the own value out of what its heads compute, and gates it
                if family.name != "NeoMME":
                    groups = capture.site.num_heads // capture.site.key_value_heads
                    values = capture.values.repeat_interleave(groups, dim=2)
                    summed = torch.einsum("bhqk,bkhe->bqhe", capture.weights, values)
                    torch.testing.assert_close(summed, capture.outputs)
        assert same(plain, results(model, inputs)) or isinstance(model, nn.Transformer)


def require_close(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(expected, found, atol=2e-6, rtol=1e-4)


def test_a_bias_is_what_it_is_added_to_in_the_scores():
    attention = hw.nn.MultiheadAttention(12, 3, batch_first=True).double()
    x = torch.randn(2, 5, 12).double()
    bias = torch.randn(2, 3, 5, 5).double()
    expected, weights = attention(x, x, x, attn_mask=bias.flatten(0, 1), average_attn_weights=False)
    with hw.bias_heads(hw.find_heads(attention), bias):
        for need_weights in (False, True):
            found, own = attention(x, x, x, need_weights=need_weights, average_attn_weights=False)
            torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own, weights)
    assert not torch.allclose(attention(x, x, x)[0], expected)


@cases("name", ["BERT", "torch.nn.Transformer"])
def test_two_biases_add_up(name: str):
    family = BY_NAME[name]
    model, inputs = family.build().double(), family.inputs()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    heads = hw.find_heads(model).kind("self")
    first, second = torch.randn(1, 4, 1, 7).double(), torch.randn(2, 1, 7, 7).double()
    with hw.bias_heads(heads, first + second):
        expected = results(model, inputs)
    with hw.bias_heads(heads, first), hw.bias_heads(heads, second):
        torch.testing.assert_close(expected, results(model, inputs))


def test_keys_appended_by_the_module_have_no_bias():
    attention = nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    x = torch.randn(2, 3, 8)
    bias = torch.tensor([0.0, -math.inf]).view(1, 2, 1, 1).repeat(1, 1, 1, 3)
    with pytest.raises(hw.errors.MaskError, match="for every key"):
        hw.bias_heads(hw.find_heads(attention), bias)
    heads = hw.find_heads(attention)
    with hw.bias_heads(heads, lambda _site, _call: bias):
        weights = attention(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(weights[:, 1, :, :3], torch.zeros(2, 3, 3))
    torch.testing.assert_close(weights[:, 1].sum(-1), torch.ones(2, 3))


@cases("name", ["BERT", "GPT-2", "Llama", "T5", "torch.nn.Transformer"])
def test_a_query_without_a_key_has_output_zero_and_finite_gradients(name: str):
    model, inputs, heads = bed(BY_NAME[name])
    heads = heads.kind("self") if name != "torch.nn.Transformer" else heads.kind("decoder")

    def nothing(_site: hw.heads.Site, call: hw.nn.ScoreCall) -> Tensor:
        bias = torch.zeros(1, call.heads, call.queries, call.keys)
        bias[:, 2, 1] = -math.inf
        return bias

    for weights in (False, True):
        model.zero_grad()
        with hw.Taps(heads, outputs=True, weights=weights) as taps, hw.bias_heads(heads, nothing):
            found = results(model, inputs)
            captures = taps.read()
        for capture in captures:
            assert bool((capture.outputs[:, 1, 2] == 0).all())
            assert bool((capture.outputs[:, 2, 2] != 0).any())
            if weights:
                assert bool((capture.weights[:, 2, 1] == 0).all())
        found[0].square().sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@cases("implementation", ["sdpa", "eager"])
def test_a_query_whose_bias_leaves_it_padding_alone_attends_to_nothing(implementation: str):
    family = BY_NAME["BERT"]
    model, inputs = family.build(), family.inputs(padded=True)
    model.set_attn_implementation(implementation)
    heads = hw.find_heads(model).layer(0)
    real = inputs["attention_mask"].bool()[:, None, None, :]

    def only_padding(_site: hw.heads.Site, _call: hw.nn.ScoreCall) -> Tensor:
        return torch.where(real, -math.inf, 0.0)

    with hw.Taps(heads, outputs=True) as taps, hw.bias_heads(heads, only_padding):
        results(model, inputs)
        (capture,) = taps.read()
    assert bool((capture.outputs == 0).all())


def gradients_of_three_forwards(name: str, *, checkpointing: bool) -> list[list[Tensor]]:
    """Forwards with a bias, without and with another; backwards in another order, under biases of others."""
    family = BY_NAME[name]
    model = family.build().double().train()
    without_dropout(model)
    heads = hw.find_heads(model).kind("self")
    given = {k: v.double() if v.is_floating_point() else v for k, v in family.inputs().items()}
    forward = functools.partial(model, **given)
    if checkpointing and name == "torch.nn.Transformer":
        forward = functools.partial(checkpoint, model, **given, use_reentrant=False)
    elif checkpointing:
        checkpoint_activations(model, reentrant=False)
    drawn = torch.Generator().manual_seed(5)
    biases = [torch.randn(1, 4, 1, 7, generator=drawn, dtype=torch.float64) * 3 for _ in range(2)]
    losses = []
    for bias in (biases[0], None, biases[1]):
        with contextlib.nullcontext() if bias is None else hw.bias_heads(heads, bias):
            losses.append(weighed(results(forward, {})[0]))
    found = []
    for index, other in ((1, biases[0]), (0, None), (2, biases[0])):
        model.zero_grad()
        handle = None if other is None else hw.bias_heads(heads, other)
        losses[index].backward()
        if handle is not None:
            handle.remove()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    losses.clear()
    gc.collect()
    if name != "torch.nn.Transformer":
        # not even a graph that is still alive holds it
        assert {site.module.config._attn_implementation for site in heads.sites} == {"sdpa"}
    return found


@cases("name", ["BERT", "GPT-2", "Llama", "T5", "torch.nn.Transformer"])
def test_a_recomputed_forward_has_the_bias_it_ran_with(name: str):
    expected = gradients_of_three_forwards(name, checkpointing=False)
    found = gradients_of_three_forwards(name, checkpointing=True)
    for plain, again in zip(expected, found, strict=True):
        assert len(plain) == len(again) > 0
        torch.testing.assert_close(plain, again)
    assert not torch.allclose(expected[0][5], expected[1][5])
    assert not torch.allclose(expected[1][5], expected[2][5])


def test_a_function_is_asked_once_a_forward_and_not_again_by_its_recomputation():
    model = BY_NAME["BERT"].build().train()
    checkpoint_activations(model, reentrant=False)
    calls = []

    def bias(site: hw.heads.Site, call: hw.nn.ScoreCall) -> Tensor:
        calls.append(site.layer)
        return torch.zeros(1, 1, 1, call.keys)

    with hw.bias_heads(hw.find_heads(model), bias) as handle:
        loss = results(model, BY_NAME["BERT"].inputs())[0].sum()
        loss.backward()
    assert calls == [0, 1]
    assert set(handle.calls.values()) == {1}


@cases("name", ["BERT", "torch.nn.Transformer"])
def test_a_bias_in_a_reentrant_checkpoint_is_refused(name: str):
    family = BY_NAME[name]
    model, inputs = family.build().train(), family.inputs()
    heads = hw.find_heads(model).kind("self")
    forward = functools.partial(results, model, inputs)
    if name == "BERT":
        checkpoint_activations(model, reentrant=True)
    else:
        source = inputs["src"].requires_grad_()
        forward = functools.partial(checkpoint, model.encoder.layers[0], source, use_reentrant=True)
    handle = hw.bias_heads(heads, no_bias)
    with pytest.raises(hw.errors.NotFired, match=r"reentrant activation checkpoint; use use_reentrant=False"):
        forward()
    handle.remove()


def test_a_bias_in_a_checkpoint_inside_a_checkpoint_is_refused_in_the_backward():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 8, requires_grad=True)

    def inner(x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False).cos()

    with hw.bias_heads(hw.find_heads(layer), torch.ones(1, 2, 1, 3)):
        y = checkpoint(inner, x, use_reentrant=False)
        with pytest.raises(hw.errors.NotFired, match="not nested in another checkpoint"):
            y.sum().backward()


def test_a_learned_bias_has_a_gradient():
    family = BY_NAME["BERT"]
    model = family.build()
    bias = torch.zeros(1, 4, 1, 7, requires_grad=True)
    with hw.bias_heads(hw.find_heads(model), bias):
        results(model, family.inputs())[0].square().sum().backward()
    assert bool((bias.grad.abs().sum(-1) > 0).all())


def test_a_bias_that_was_never_used_is_told():
    model = BY_NAME["BERT"].build()
    heads = hw.find_heads(model)
    with pytest.raises(hw.errors.NotFired, match=r"none of the calls of 2 of 2 sites"), hw.bias_heads(heads, no_bias):
        pass
    with (
        pytest.raises(hw.errors.NotFired, match=r"none of the calls of 1 of 2 sites: encoder\.layer\.1"),
        hw.bias_heads(heads, lambda site, call: no_bias(site, call) if site.layer == 0 else None),
    ):
        results(model, BY_NAME["BERT"].inputs())
    with pytest.raises(RuntimeError, match="own"), hw.bias_heads(heads, no_bias):
        raise RuntimeError("own errors are not covered up")
    assert model.config._attn_implementation == "sdpa"


def test_what_is_no_bias_is_refused():
    model = BY_NAME["BERT"].build()
    heads = hw.find_heads(model)
    wrong = torch.zeros(1, 4, 7, 7)
    wrong[0, 2, 3] = -math.inf
    for bias, message in (
        (torch.ones(1, 4, 7, 7, dtype=torch.bool), r"torch\.where\(mask, 0\.0, -torch\.inf\)"),
        (torch.zeros(7, 7), "four axes"),
        (torch.full((1, 1, 1, 7), math.inf), "NaN or"),
        ("head 1", "bias is a str"),
        (wrong, r"for every key at \(batch, head, query\) \(0, 2, 3\)"),
    ):
        with pytest.raises(hw.errors.MaskError, match=message):
            hw.bias_heads(heads, bias)
    inputs = BY_NAME["BERT"].inputs(batch=3)
    for shape in ((2, 1, 1, 7), (1, 3, 1, 7), (1, 1, 1, 6), (1, 1, 2, 7), (1, 1, 1, 8)):
        expected = r"expected \(3 or 1, 4 or 1, 7 or 1, 7\)"
        with pytest.raises(hw.errors.MaskError, match=expected), hw.bias_heads(heads, torch.zeros(shape)):
            results(model, inputs)
    for name in ("WavLM", "Perceiver"):
        with pytest.raises(hw.errors.LayoutError, match="attention weights and biases of heads are reached in"):
            hw.bias_heads(hw.find_heads(BY_NAME[name].build()), no_bias)


def test_a_bias_of_inference_mode_is_moved_to_the_device_of_the_scores():
    with torch.inference_mode():
        bias = torch.zeros(1, 4, 1, 5)
    handle = hw.bias_heads(hw.find_heads(nn.TransformerEncoderLayer(16, 4, 8, batch_first=True)), bias)
    # no other device is here
    assert handle._move(bias, torch.device("meta")).device.type == "meta"
    handle.remove()


@cases("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_bias_in_another_dtype_is_added_in_the_models(dtype: torch.dtype):
    model = BY_NAME["Llama"].build().to(dtype)
    inputs = BY_NAME["Llama"].inputs(padded=True)
    heads = hw.find_heads(model)
    # no float16 number is that small: it must not come out as "forbidden"
    low = torch.full((1, 1, 1, 7), -1e9)
    with hw.Taps(heads, outputs=True, weights=True) as taps, hw.bias_heads(heads, low):
        results(model, inputs)
        for capture in taps.read():
            assert capture.weights.dtype == dtype
            assert bool((capture.weights.sum(-1) > 0.9).all())


GENERATORS = ["GPT-2", "Llama", "T5", "BART", "Marian"]


@cases("name", ["Llama", "BART"])
def test_a_bias_for_each_example_serves_all_its_beams_and_a_tensor_the_whole_length(name: str):
    model, inputs = generator(name), prompt(name)
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "num_beams": 3, "do_sample": False}
    heads = hw.find_heads(model)
    heads = heads if {site.kind for site in heads.sites} == {"self"} else heads.kind("cross")
    length = inputs["input_ids"].shape[1] + (5 if name == "Llama" else 0)
    bias = torch.zeros(2, 4, 1, length)
    # in the second example all heads see the first two keys alone
    bias[1, :, :, 2:] = -math.inf
    with hw.bias_heads(heads, bias):
        both = model.generate(**inputs, **settings)
    alone = [{key: value[i : i + 1] for key, value in inputs.items()} for i in range(2)]
    plain = model.generate(**alone[0], **settings)
    with hw.bias_heads(heads, bias[1:]):
        bound = model.generate(**alone[1], **settings)
    free = model.generate(**alone[1], **settings)
    assert torch.equal(both[0], plain[0])
    assert torch.equal(both[1], bound[0])
    assert not torch.equal(bound[0], free[0])


def test_rows_of_a_tensor_are_those_of_the_queries_of_the_call():
    model, inputs = generator("Llama"), prompt("Llama")
    heads = hw.find_heads(model).layer(0)
    total = inputs["input_ids"].shape[1] + 4
    # every query sees itself alone
    bias = torch.full((1, 1, total, total), -math.inf)
    bias[0, 0].fill_diagonal_(0.0)
    (site,) = heads.sites
    projected: list[Tensor] = []
    site.value_module.register_forward_hook(lambda _module, _args, output: projected.append(output))
    with hw.Taps(heads, outputs=True) as taps, hw.bias_heads(heads, bias):
        model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        (capture,) = taps.read()
    values = site.slices[2].features(projected[-1]).repeat_interleave(2, dim=2)
    torch.testing.assert_close(capture.outputs, values)


def test_a_window_of_cached_keys_has_the_bias_of_their_positions():
    family = BY_NAME["Mistral"]
    import transformers

    model = transformers.MistralForCausalLM(family.build().config).eval()
    seen = []

    def bias(_site: hw.heads.Site, call: hw.nn.ScoreCall) -> Tensor:
        seen.append((call.first, call.queries, call.first_key, call.keys))
        return torch.zeros(1, 1, 1, call.keys)

    inputs = family.inputs()
    with hw.bias_heads(hw.find_heads(model).layer(0), bias):
        model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert seen[0] == (0, 7, 0, 7)
    assert all(first_key + keys == first + queries for first, queries, first_key, keys in seen)
    assert seen[-1][2] > 0
