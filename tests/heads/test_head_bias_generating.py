"""A bias on heads while tokens are generated: with beams, examples of their own and cached keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import headwise as hw
from cases import cases, tiers
from heads.families import BY_NAME
from heads.forwards import first_key_only, generator, prompt

GENERATORS = ["GPT-2", "Llama", "T5", "BART", "Marian"]


@tiers("beams", [3], [1])
@cases("name", GENERATORS)
def test_generating_with_a_head_bound_to_the_first_key_gives_its_value(name: str, beams: int):
    model, inputs = generator(name), prompt(name)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": beams, "do_sample": False}
    heads = hw.find_heads(model)
    heads = heads if {site.kind for site in heads.sites} == {"self"} else heads.kind("decoder")
    values: dict[str, Tensor] = {}
    with hw.Taps(heads, values=True) as taps, hw.bias_heads(heads, first_key_only):
        model.generate(**inputs, **{**settings, "max_new_tokens": 1, "min_new_tokens": 1})
        for capture in taps.read():
            values[capture.site.name] = capture.values[:, 0]
    with hw.Taps(heads, outputs=True) as taps, hw.bias_heads(heads, first_key_only):
        model.generate(**inputs, **settings)
        captures = taps.read()
    for capture in captures:
        site = capture.site
        assert capture.outputs.shape[1] == 1
        if site.layer == 0:
            # the first token is the same in every beam of an example
            first = values[site.name][:, 1 // (site.num_heads // site.key_value_heads)]
            torch.testing.assert_close(capture.outputs[:, 0, 1], first)


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
