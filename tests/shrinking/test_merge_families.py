"""Families that take fewer key/value heads, how they are saved, and families that do not take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from cases import cases, thin, tiers
from heads.families import FAMILIES
from heads.family import Family
from shrinking.cutting import apart, compute, named
from shrinking.planted import HEADS, KINDS, build, tokens

HELD = ("BERT", "ALBERT", "DistilBERT", "BART", "ViT", "CLIP", "Wav2Vec2")
REFUSED = {
    "GPT-2": "cannot run with these heads merged",
    "DeBERTa": "cannot run with these heads merged",
    "GPT-NeoX": "cannot run with these heads merged",
    "T5": r"so its query heads must stay where they are; use grouping=.order.",
    "Cohere": r"has k_norm\.weight with a separate part for each key/value head",
    "Falcon, 40B and 180B": "is not FalconModel with each of them in the place of several",
    "BitNet": "passes its heads through a BitNetRMSNorm before W_O",
    "DeepSeek-V2": "latent attention",
    "Bloom": "is given ALiBi slopes",
    "WavLM": "hands its weights to torch's function",
    "torch.nn.Transformer": "its code takes no fewer",
}


@tiers(("kind", "groups"), *thin([(kind, groups) for kind in KINDS for groups in (4, 1)], 3))
def test_a_merged_decoder_is_loaded_by_transformers_alone(kind: str, groups: int, tmp_path: Path):
    model = build(kind, HEADS)
    assert hw.merge(hw.find_heads(model), groups, batches=[tokens(0)]).stock is None
    model.save_pretrained(tmp_path)
    again: Any = type(model).from_pretrained(tmp_path).eval()
    assert apart([model(tokens(3)).logits], [again(tokens(3)).logits]) == 0.0
    assert again.config.num_key_value_heads == groups
    assert again.model.layers[0].self_attn.k_proj.weight.shape[0] * HEADS == 64 * groups
    _, cache = again(tokens(3), return_dict=False)
    assert cache.layers[0].keys.shape == (4, groups, 24, 8)


@cases("family", named(FAMILIES, "Phi-3", "GPT-OSS", "MiMo-V2-Flash", "Gemma"))
def test_other_decoders_with_grouped_queries_are_too(family: Family, tmp_path: Path):
    model: Any = family.build()
    heads, inputs = hw.find_heads(model), family.inputs(padded=True)
    if heads.sites[0].key_value_heads == 1:
        with pytest.raises(hw.errors.SettingError, match="has 1 key/value heads; expected fewer"):
            hw.merge(heads, 1)
        return
    assert hw.merge(heads, 1, batches=[inputs]).stock is None
    model.save_pretrained(tmp_path)
    assert apart(compute(model, inputs), compute(type(model).from_pretrained(tmp_path).eval(), inputs)) == 0.0


@tiers("family", *thin(named(FAMILIES, *HELD), 3))
def test_a_merged_encoder_is_refused_by_transformers_and_loaded_by_headwise(family: Family, tmp_path: Path):
    model: Any = family.build()
    heads, inputs = hw.find_heads(model), family.inputs()
    merging = hw.merge(heads, 1, batches=[inputs])
    assert "follow from its configuration" in str(merging.stock)
    expected = compute(model, inputs)
    model.save_pretrained(tmp_path)
    with pytest.raises((OSError, ValueError)):
        type(model).from_pretrained(tmp_path)
    again: Any = hw.load(tmp_path)
    assert apart(expected, compute(again, inputs)) == 0.0
    counts = [(site.num_heads, site.key_value_heads) for site in hw.find_heads(again)]
    assert counts == [(site.num_heads, 1) for site in heads]


def test_one_layer_merged_is_for_headwise_and_all_of_them_for_transformers(tmp_path: Path):
    model = build("Llama", HEADS)
    merging = hw.merge(hw.find_heads(model).layer(1), 4, batches=[tokens(0)])
    assert merging.stock == "its configuration holds one number of key/value heads for all layers, and they have 4, 8"
    assert [site.key_value_heads for site in hw.find_heads(model)] == [8, 4]
    model.save_pretrained(tmp_path / "one")
    assert apart([model(tokens(3)).logits], [hw.load(tmp_path / "one")(tokens(3)).logits]) == 0.0
    assert hw.merge(hw.find_heads(model).layer(0), 4, batches=[tokens(0)]).stock is None
    model.save_pretrained(tmp_path / "all")
    again: Any = type(model).from_pretrained(tmp_path / "all").eval()
    assert apart([model(tokens(3)).logits], [again(tokens(3)).logits]) == 0.0


@cases("family", named(FAMILIES, *REFUSED))
def test_a_family_whose_heads_cannot_be_merged_is_refused_and_left_as_it_was(family: Family):
    model = family.build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(hw.errors.LayoutError, match=REFUSED[family.name]):
        hw.merge(hw.find_heads(model), 1, batches=[family.inputs()])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_sinks_move_with_their_query_heads():
    family = named(FAMILIES, "GPT-OSS")[0]
    stock: Any = family.build()
    stock.config.num_key_value_heads = 4
    model: Any = type(stock)(stock.config).eval()
    attention = model.layers[0].self_attn
    with torch.no_grad():
        attention.sinks.copy_(torch.arange(4.0))
        # heads 0 and 2 are alike, and so are 1 and 3: merging them brings the query heads into another order
        for projection in (attention.k_proj, attention.v_proj):
            projection.weight.copy_(projection.weight[:16].repeat(2, 1))
            projection.bias.copy_(projection.bias[:16].repeat(2))
    before = compute(model, family.inputs())
    heads = hw.find_heads(model).layer(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    hw.merge(heads, 2, batches=[family.inputs()], optimizer=optimizer)
    assert attention.sinks.tolist() == [0.0, 2.0, 1.0, 3.0]
    assert apart(before, compute(model, family.inputs())) < 1e-4
    # what they were is of other heads
    assert attention.sinks.grad is None
    assert attention.sinks not in optimizer.state
    assert model.layers[1].self_attn.sinks in optimizer.state
