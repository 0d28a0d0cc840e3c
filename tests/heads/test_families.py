"""`find_heads` finds every attention of every family, and nothing else, with its kind, layer and head counts."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from heads.families import FAMILIES
from heads.family import Family


def facts(family: Family) -> dict[str, tuple]:
    return {
        name: (a.kind, a.stack, layer, a.layout, a.heads, a.key_value_heads, a.head_size)
        for a in family.attentions
        for layer, name in enumerate(a.names)
    }


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_sites_of_a_family_are_found_one_to_one(family: Family):
    heads = hw.find_heads(family.build())
    found = {s.name: (s.kind, s.stack, s.layer, s.layout, s.num_heads, s.key_value_heads, s.head_size) for s in heads}
    assert found == facts(family)
    # none where a norm over all heads stands before W_O
    outputs = {site.name: "" if site.output is None else site.output.name for site in heads}
    assert {a.names[0]: outputs[a.names[0]] for a in family.attentions} == {
        a.names[0]: a.output for a in family.attentions
    }


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_slices_of_a_family_are_rows_of_its_own_parameters_and_no_row_is_of_two_heads(family: Family):
    model = family.build()
    parameters = dict(model.named_parameters())
    for site in hw.find_heads(model):
        assert [head_slice.projection for head_slice in site.slices] == ["query", "key", "value"]
        counted: dict[str, torch.Tensor] = {}
        for head_slice in site.slices:
            assert parameters[head_slice.name] is head_slice.parameter
            count = counted.setdefault(head_slice.name, torch.zeros_like(head_slice.parameter))
            for part in head_slice.parts:
                part.of(count).add_(1.0)
        for name, count in counted.items():
            assert count.max() == 1.0, name
            assert count.min() == 1.0, f"{name} has rows of no head"
        if site.output is not None:
            assert site.width == parameters[site.output.name].shape[site.output.axes.inputs]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_site_is_called_as_often_as_the_table_says_and_values_are_read_where_they_are_projected(family: Family):
    model = family.build()
    calls: dict[str, int] = {}
    seen: dict[str, torch.Size] = {}
    heads = hw.find_heads(model)
    for site in heads:
        site.expose()
        site.module.register_forward_hook(lambda *_, n=site.name: calls.update({n: calls.get(n, 0) + 1}))
        if site.value_module is not None:
            value = site.slices[2]
            site.value_module.register_forward_hook(
                lambda _m, _i, out, n=site.name, v=value: seen.update({n: v.features(out).shape[-2:]})
            )
    with torch.no_grad():
        model(**family.inputs())
    assert calls == {name: a.calls for a in family.attentions for name in a.names}
    assert (seen == {}) == (family.name == "torch.nn.Transformer")
    assert all(seen[s.name] == (s.key_value_heads, s.head_size) for s in heads if s.name in seen)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_table_says_truly_whether_a_family_uses_the_attention_interface(family: Family, monkeypatch):
    from transformers.modeling_utils import AttentionInterface

    asked = []
    get = AttentionInterface.get_interface
    monkeypatch.setattr(AttentionInterface, "get_interface", lambda *given: asked.append(given) or get(*given))
    with torch.no_grad():
        family.build()(**family.inputs())
    assert bool(asked) == family.interface


@pytest.mark.parametrize("family", [f for f in FAMILIES if any(a.output for a in f.attentions)], ids=str)
def test_the_heads_of_w_o_are_what_it_multiplies_the_features_of_a_head_by(family: Family):
    site = next(site for site in reversed(hw.find_heads(family.build()).sites) if site.output is not None)
    module, output = site.output_projection.module, site.output
    x = torch.randn(3, site.num_heads * site.head_size)
    without = x.clone()
    output.features(without)[:, 1] = 0.0
    with torch.no_grad():
        expected = module(without)
        output.of(output.parameter)[1] = 0.0
        torch.testing.assert_close(module(x), expected)


def test_padding_changes_the_inputs_of_the_families_that_take_it_and_inputs_are_the_same_each_time():
    for family in FAMILIES:
        plain, padded, again = family.inputs(), family.inputs(padded=True), family.inputs()
        assert all(torch.equal(plain[name], again[name]) for name in plain)
        same = plain.keys() == padded.keys() and all(torch.equal(plain[name], padded[name]) for name in plain)
        assert same != family.maskable, family.name
        assert all(len(tensor) == 3 for tensor in family.inputs(batch=3).values())


def test_selections_of_an_encoder_decoder_name_its_attentions():
    heads = hw.find_heads(next(f for f in FAMILIES if f.name == "T5").build())
    assert [s.name for s in heads.kind("cross").layer(-1)] == ["decoder.block.1.layer.1.EncDecAttention"]
    assert [s.name for s in heads.where("decoder.*").kind("decoder").layers(0, 1)] == [
        "decoder.block.0.layer.0.SelfAttention",
        "decoder.block.1.layer.0.SelfAttention",
    ]
    assert len(heads.where("decoder.*")) == 4
    with pytest.raises(
        hw.errors.LayoutError, match=r"'cross' in decoder\.block, 'decoder' in decoder\.block, 'self' in enc"
    ):
        heads.layer(0)
    only = heads.kind("self").projection("value")
    assert [head_slice.name for head_slice in only.slices()] == [
        f"encoder.block.{i}.layer.0.SelfAttention.v.weight" for i in (0, 1)
    ]


def test_grouped_heads_print_both_numbers():
    text = str(hw.find_heads(next(f for f in FAMILIES if f.name == "Phi-3").build()))
    assert text.splitlines()[1].split() == ["layers.0.self_attn", "self", "0", "4/2", "8", "fused", "o_proj:", "Linear"]
