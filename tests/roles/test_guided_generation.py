"""Under generate() the prompt is guided, what comes after it is not, and beams have their example's mask."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.forwards import generator, prompt
from heads.transformers_versions import given_cache

DECODERS = ["GPT-2", "Llama"]
ENCODER_DECODERS = ["T5", "BART", "Marian"]


def mask_for(inputs: dict[str, Tensor], heads: int = 4) -> hw.roles.HeadMask:
    """Three heads see the diagonal and one earlier token, so that the outputs are others than without."""
    keep = (
        inputs["attention_mask"].bool() if "attention_mask" in inputs else torch.ones_like(inputs["input_ids"]).bool()
    )
    batch, tokens = keep.shape
    near = torch.eye(tokens, dtype=torch.bool) | torch.eye(tokens, dtype=torch.bool).roll(2, 0)
    return hw.roles.HeadMask(near.expand(batch, 3, -1, -1), keep, heads)


def greedy(model: nn.Module, inputs: dict[str, Tensor], guidance: hw.roles.Guidance, steps: int) -> list[Tensor]:
    """The logits of greedy decoding by hand: the prompt guided, then from the cache without guidance."""
    logits = []
    tokens, keep = inputs["input_ids"], inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    guidance(mask_for(inputs))
    with torch.no_grad():
        found = model(input_ids=tokens, attention_mask=keep, use_cache=True)
        guidance.remove()
        for step in range(steps):
            logits.append(found.logits[:, -1])
            tokens = torch.cat([tokens, found.logits[:, -1:].argmax(-1)], dim=1)
            keep = torch.cat([keep, torch.ones_like(keep[:, :1])], dim=1)
            if step < steps - 1:
                cache = given_cache(found.past_key_values)
                found = model(input_ids=tokens[:, -1:], attention_mask=keep, **cache, use_cache=True)
    return logits


# a static cache has more keys than the mask, which are not filled yet
@cases(("name", "cache"), [*((name, None) for name in DECODERS), ("Llama", "static")])
def test_rows_after_the_prompt_are_regular(name: str, cache: str | None):
    model, inputs = generator(name), prompt(name)
    heads = hw.find_heads(model)
    settings = {
        "cache_implementation": cache,
        "max_new_tokens": 5,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    plain = model.generate(**inputs, **settings).logits
    expected = greedy(model, inputs, hw.guide(heads), 5)
    with hw.guide(heads, mask_for(inputs)) as guidance:
        found = model.generate(**inputs, **settings).logits
    assert len(found) == len(expected) == 5
    for step, logits in enumerate(found):
        torch.testing.assert_close(logits, expected[step])
    assert not torch.allclose(found[0], plain[0])
    assert set(guidance.calls.values()) == {1}


@cases("name", DECODERS)
def test_beams_have_the_mask_of_their_example(name: str):
    model, inputs = generator(name), prompt(name)
    heads = hw.find_heads(model)
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "num_beams": 3, "do_sample": False}
    roles = torch.zeros(2, 3, 7, 7, dtype=torch.bool)
    roles[0] = torch.eye(7, dtype=torch.bool)
    roles[1, :, :, 0] = True
    mask = hw.roles.HeadMask(roles, num_heads=4)
    with hw.guide(heads, mask):
        both = model.generate(**inputs, **settings)
    for example in range(2):
        one = {key: value[example : example + 1] for key, value in inputs.items()}
        with hw.guide(heads, mask[example]):
            assert torch.equal(model.generate(**one, **settings)[0], both[example])
    assert not torch.equal(both, model.generate(**inputs, **settings))


def test_a_second_prompt_wants_a_mask_of_its_own():
    model, inputs = generator("Llama"), prompt("Llama")
    settings = {"max_new_tokens": 2, "do_sample": False}
    guidance = hw.guide(hw.find_heads(model), mask_for(inputs))
    model.generate(**inputs, **settings)
    with pytest.raises(hw.errors.MaskError, match="belongs to the previous forward"):
        model.generate(**inputs, **settings)
    guidance(mask_for({"input_ids": inputs["input_ids"][:, :5]}))
    with pytest.raises(hw.errors.MaskError, match="has 5 tokens and this call 7"):
        model.generate(**inputs, **settings)
    guidance.remove()


def test_without_a_cache_generating_is_refused_with_the_way_out():
    model, inputs = generator("GPT-2"), prompt("GPT-2")
    guidance = hw.guide(hw.find_heads(model), mask_for(inputs), every_forward=True)
    with pytest.raises(hw.errors.MaskError, match="use_cache=True"):
        model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False, use_cache=False)
    guidance.remove()


@cases("beams", [1, 2])
@cases("name", ["GPT-2", *ENCODER_DECODERS])
def test_a_mask_of_fewer_prompts_is_refused_and_the_next_one_is_taken(name: str, beams: int):
    model, inputs = generator(name), prompt(name)
    settings = {"max_new_tokens": 3, "num_beams": beams, "do_sample": False}
    heads = hw.find_heads(model)
    heads = heads.kind("self") if any(site.kind == "self" for site in heads) else heads
    mask = mask_for(inputs)
    with hw.guide(heads, mask):
        expected = model.generate(**inputs, **settings)
    guidance = hw.guide(heads)
    with pytest.raises(hw.errors.MaskError, match="1 sentences and generate\\(\\) was given 2 prompts"):
        model.generate(**inputs, **settings, role_mask=mask[:1])
    assert torch.equal(model.generate(**inputs, **settings, role_mask=mask), expected)
    guidance.remove()


def test_a_batch_in_evaluation_is_no_beams():
    model, inputs = generator("GPT-2"), prompt("GPT-2")
    guidance = hw.guide(hw.find_heads(model), mask_for(inputs)[0])
    with pytest.raises(hw.errors.MaskError, match="has 1 sentences and the batch 2"), torch.no_grad():
        model(**inputs, use_cache=True)
    guidance.remove()


@cases("beams", [1, 3])
@cases("name", ENCODER_DECODERS)
def test_the_masks_of_an_encoder_are_kept_during_beam_search(name: str, beams: int):
    model, inputs = generator(name), prompt(name)
    heads = hw.find_heads(model).kind("self")
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": beams, "do_sample": False}
    mask = mask_for(inputs)
    with hw.guide(heads, mask), torch.no_grad():
        encoded = model.get_encoder()(**inputs)
    # generate() writes beams into what it is given
    expected = model.generate(**inputs, encoder_outputs=type(encoded)(**encoded), **settings)
    with hw.guide(heads, mask) as guidance:
        found = model.generate(**inputs, **settings)
        assert set(guidance.calls.values()) == {1}
    assert torch.equal(found, expected)
    with torch.no_grad():
        plain = model.get_encoder()(**inputs).last_hidden_state
    assert not torch.allclose(plain, encoded.last_hidden_state)


@cases("name", ["Llama", "T5"])
def test_generate_takes_the_mask_from_the_batch(name: str):
    model, inputs = generator(name), prompt(name)
    heads = hw.find_heads(model).kind("self")
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    mask = mask_for(inputs)
    with hw.guide(heads, mask):
        expected = model.generate(**inputs, **settings).logits
    with hw.guide(heads) as guidance:
        found = model.generate(**inputs, **settings, role_mask=mask).logits
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
    assert set(guidance.calls.values()) == {1}
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    # what is let go, copied or pickled generates as its class does
    for free in (model, copied, pickled):
        assert free.generate.__func__ is type(model).generate
        assert free.generate.__self__ is free
        with pytest.raises(ValueError, match="role_mask"):
            free.generate(**inputs, role_mask=mask)


def test_two_handles_let_generate_go_in_any_order():
    model, inputs = generator("Llama"), prompt("Llama")
    heads = hw.find_heads(model)
    one, other = hw.guide(heads.layer(0)), hw.guide(heads.layer(1))
    one.remove()
    with pytest.raises(hw.errors.NotFired, match="no mask"):
        model.generate(**inputs, max_new_tokens=1)
    model.generate(**inputs, max_new_tokens=1, role_mask=mask_for(inputs))
    assert set(other.calls.values()) == {1}
    other.remove()
    with pytest.raises(ValueError, match="role_mask"):
        model.generate(**inputs, role_mask=mask_for(inputs))
