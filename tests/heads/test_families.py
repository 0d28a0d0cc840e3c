"""Every attention of every family is found, read and proved, nothing else is, and every wrong reading is rejected."""

from __future__ import annotations

import contextlib
from itertools import chain

import pytest
import torch
from torch import Tensor

import headwise as hw
from heads.families import BY_NAME, CORE, FAMILIES, found, sweep
from heads.family import Family
from heads.misreadings import misreadings, reordered
from headwise.heads.heads import Heads

# Their misreadings are those of tests/heads/test_shifted_rows.py.
IN_RUNS = ("Falcon, 40B and 180B", "CodeGen")


@sweep(FAMILIES, CORE)
def test_its_sites_are_found_one_to_one_and_each_row_of_its_parameters_is_of_one_head(family: Family):
    heads = found(family)
    sites = {s.name: (s.kind, s.stack, s.layer, s.layout, s.num_heads, s.key_value_heads, s.head_size) for s in heads}
    assert sites == {
        name: (a.kind, a.stack, layer, a.layout, a.heads, a.key_value_heads, a.head_size)
        for a in family.attentions
        for layer, name in enumerate(a.names)
    }
    # none where a norm over all heads stands before W_O
    outputs = {site.name: "" if site.output is None else site.output.name for site in heads}
    assert all(outputs[a.names[0]] == a.output for a in family.attentions)
    parameters = dict(heads.model.named_parameters())
    for site in heads:
        assert [head_slice.projection for head_slice in site.slices] == ["query", "key", "value"]
        counted: dict[str, Tensor] = {}
        for head_slice in site.slices:
            assert parameters[head_slice.name] is head_slice.parameter
            count = counted.setdefault(head_slice.name, torch.zeros_like(head_slice.parameter))
            for part in head_slice.parts:
                part.of(count).add_(1.0)
        assert all(bool((count == 1.0).all()) for count in counted.values())
        if site.output is not None:
            assert site.width == parameters[site.output.name].shape[site.output.axes.inputs]


@sweep(FAMILIES, CORE)
def test_its_sites_are_called_as_the_table_says_and_values_are_read_where_they_are_projected(
    family: Family, monkeypatch: pytest.MonkeyPatch
):
    from transformers.modeling_utils import AttentionInterface

    heads = found(family)
    asked, calls, values, handles = [], dict.fromkeys((site.name for site in heads), 0), {}, []
    get = AttentionInterface.get_interface
    monkeypatch.setattr(AttentionInterface, "get_interface", lambda *given: asked.append(given) or get(*given))

    def count(name: str) -> None:
        calls[name] += 1

    for site in heads:
        handles.append(site.module.register_forward_hook(lambda *_, n=site.name: count(n)))
        if site.value_module is not None:

            def see(_module, _args, output, name=site.name, value=site.slices[2]):
                values[name] = value.features(output).shape[-2:]

            handles.append(site.value_module.register_forward_hook(see))
    with torch.no_grad(), heads.exposed():
        heads.model(**family.inputs())
    for handle in handles:
        handle.remove()
    assert bool(asked) == family.interface
    assert calls == {name: a.calls for a in family.attentions for name in a.names}
    assert (values == {}) == (family.name == "torch.nn.Transformer")
    assert all(values[s.name] == (s.key_value_heads, s.head_size) for s in heads if s.name in values)


@sweep(FAMILIES, CORE)
def test_its_right_reading_is_proved_and_its_w_o_multiplies_the_features_of_a_head(family: Family):
    heads = found(family)
    for site in [site for site in heads if site.output is not None][-1:]:
        module, output = site.output_projection.module, site.output
        x = torch.randn(3, site.num_heads * site.head_size)
        without = x.clone()
        output.features(without)[:, 1] = 0.0
        with torch.no_grad():
            expected, own = module(without), output.of(output.parameter)[1]
            before = own.clone()
            own.zero_()
            torch.testing.assert_close(module(x), expected)
            own.copy_(before)
    assert hw.verify(heads, family.inputs()) == hw.heads.Verification(tuple(site.name for site in heads))


class Misread(Exception):
    """An experiment said so, and no other check."""


def prove(heads: Heads, inputs: dict[str, Tensor]) -> None:
    try:
        hw.verify(heads, inputs)
    except hw.errors.LayoutError as error:
        if "misreads" in str(error):
            raise Misread from error
        raise


@sweep(FAMILIES, ("GPT-2", "GPT-NeoX", "Llama", "T5"))
def test_every_wrong_reading_of_every_kind_of_site_is_rejected(family: Family):
    heads = found(family)
    accepted, tried = [], 0
    first = {site.kind: site for site in reversed(heads.sites)}.values() if family.name not in IN_RUNS else ()
    for site in first:
        wrong = ((label, Heads(heads.model, (misread,))) for label, misread in misreadings(site))
        if site.value_module is not None:
            wrong = chain(wrong, ((how, reordered(heads, site, how)) for how in ("strided", "random")))
        for label, misread in wrong:
            tried += 1
            with contextlib.suppress(Misread):
                prove(misread, family.inputs())
                accepted.append(f"{site.kind}: {label}")
    assert accepted == []
    assert tried >= 4 * len(first)


def test_a_cache_of_keys_does_not_grow_and_flash_attention_is_not_asked_for_float64():
    family = BY_NAME["Llama"]
    model = family.build()
    heads = hw.find_heads(model)
    assert model.config.use_cache
    assert len(hw.verify(heads, {**family.inputs(), "use_cache": True}).sites) == 2
    model.config._attn_implementation = "flash_attention_2"
    assert len(hw.verify(heads, family.inputs()).sites) == 2
    assert model.config._attn_implementation == "flash_attention_2"


def test_padding_changes_the_inputs_of_the_families_that_take_it_and_inputs_are_the_same_each_time():
    for family in FAMILIES:
        plain, padded, again = family.inputs(), family.inputs(padded=True), family.inputs()
        assert all(torch.equal(plain[name], again[name]) for name in plain)
        same = plain.keys() == padded.keys() and all(torch.equal(plain[name], padded[name]) for name in plain)
        assert same != family.maskable, family.name
        assert all(len(tensor) == 3 for tensor in family.inputs(batch=3).values())


def test_selections_of_an_encoder_decoder_name_its_attentions():
    heads = hw.find_heads(BY_NAME["T5"].build())
    assert [s.name for s in heads.kind("cross").layer(-1)] == ["decoder.block.1.layer.1.EncDecAttention"]
    names = [s.name for s in heads.where("decoder.*").kind("decoder").layers(0, 1)]
    assert names == [f"decoder.block.{i}.layer.0.SelfAttention" for i in (0, 1)]
    assert len(heads.where("decoder.*")) == 4
    assert heads.kind("cross").projection("value", "query").projections == ("query", "value")
    places = r"'cross' in decoder\.block, 'decoder' in decoder\.block, 'self' in enc"
    with pytest.raises(hw.errors.LayoutError, match=places):
        heads.layer(0)
    names = [head_slice.name for head_slice in heads.kind("self").projection("value").slices()]
    assert names == [f"encoder.block.{i}.layer.0.SelfAttention.v.weight" for i in (0, 1)]


def test_grouped_heads_print_both_numbers():
    text = str(hw.find_heads(BY_NAME["Phi-3"].build()))
    assert text.splitlines()[1].split() == ["layers.0.self_attn", "self", "0", "4/2", "8", "fused", "o_proj:", "Linear"]
