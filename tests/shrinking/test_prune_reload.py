"""A model with fewer heads comes back from its folder to the bit.

Where a configuration says it, transformers alone loads it. Where none does, transformers refuses the folder and
`hw.load` reads it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import headwise as hw
from cases import cases
from heads.attentions import SeparateAttention
from heads.families import FAMILIES, sweep
from heads.family import Family
from headwise.atomic import seal
from headwise.routing import Gate, Residual, SimpleRouting
from shrinking.cutting import apart, compute, evenly, named, unevenly

STOCK = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Phi-3", "T5", "Cohere", "Funnel", "GPT-OSS", "MiMo-V2-Flash"),
    *("DeepSeek-V2", "DeepSeek-V3", "ViT"),
)
REFUSED = ("BitNet", "Kosmos-2", "NeoMME", "Bloom", "MPT", "WavLM", "timm ViT", "timm Swin", "torch.nn.Transformer")
# Its tokenizer of images was taken out, so that no configuration builds it.
PARTIAL = ("Chameleon",)


def run(pruning: hw.shrinking.Pruning, folder: Path) -> Any:
    """What the code that a pruning names loads from a folder."""
    return eval(str(pruning.loading), {"transformers": transformers, "hw": hw, "folder": folder})


@sweep([family for family in FAMILIES if family.name not in (*REFUSED, *PARTIAL)])
def test_a_pruned_model_comes_back_from_its_folder(family: Family, tmp_path: Path):
    model: Any = family.build()
    inputs, config = family.inputs(), model.config.to_dict()
    heads = hw.find_heads(model)
    pruning = hw.prune(heads, evenly(heads))
    expected = compute(model, inputs)
    model.save_pretrained(tmp_path)
    again = run(pruning, tmp_path).eval()
    assert apart(expected, compute(again, inputs)) == 0.0
    counts = [(site.num_heads, site.key_value_heads, site.head_size) for site in hw.find_heads(model)]
    assert counts == [(site.num_heads, site.key_value_heads, site.head_size) for site in hw.find_heads(again)]
    assert [count for count, _, _ in counts] == list(pruning.heads.values())
    if family.name in STOCK:
        assert pruning.stock is None
        with pytest.raises(hw.errors.DataError, match="holds no aggregator, and no sizes that its configuration does"):
            hw.save(model, tmp_path / "own")
        return
    assert "configuration" in str(pruning.stock)
    assert "saved for hw.load, as transformers cannot load it: " in str(pruning)
    assert model.config.to_dict() == config
    for options in ({}, {"ignore_mismatched_sizes": True}, {"config": model.config, "ignore_mismatched_sizes": True}):
        with pytest.raises((OSError, ValueError)):
            type(model).from_pretrained(tmp_path, **options)
    # and once more, from what was loaded
    again.save_pretrained(tmp_path / "again")
    assert apart(expected, compute(hw.load(tmp_path / "again"), inputs)) == 0.0


@cases("family", named(FAMILIES, "Llama", "Qwen3", "T5"))
def test_other_numbers_of_heads_in_each_layer_are_for_headwise(family: Family, tmp_path: Path):
    model: Any = family.build()
    inputs = family.inputs()
    heads = hw.find_heads(model)
    first = {site.name: evenly(heads)[site.name] for site in heads if site.layer == 0 or site.kind != "self"}
    if family.name == "T5":
        first = {name: gone for name, gone in evenly(heads).items() if "encoder" in name}
    pruning = hw.prune(heads, first)
    assert pruning.stock == "its configuration holds one number of heads for all layers, and they have 2, 4"
    model.save_pretrained(tmp_path / "uneven")
    assert apart(compute(model, inputs), compute(hw.load(tmp_path / "uneven"), inputs)) == 0.0
    # with the rest of the layers cut as well, the configuration says it
    heads = hw.find_heads(model)
    rest = {site.name: evenly(heads)[site.name] for site in heads if site.num_heads == 4}
    assert hw.prune(heads, rest).stock is None
    model.save_pretrained(tmp_path / "even")
    again = type(model).from_pretrained(tmp_path / "even").eval()
    assert apart(compute(model, inputs), compute(again, inputs)) == 0.0


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 8,
    "patch_size": 4,
    "vocab_size": 61,
}


@cases(
    ("name", "arguments", "shown"),
    [
        ("ViT", {"add_pooling_layer": False}, "transformers.ViTModel.from_pretrained(folder, add_pooling_layer=False)"),
        ("ViT", {"use_mask_token": True}, "transformers.ViTModel.from_pretrained(folder, use_mask_token=True)"),
        ("ViT", {}, "transformers.ViTModel.from_pretrained(folder)"),
        (
            "DeiT",
            {"add_pooling_layer": False, "use_mask_token": True},
            "transformers.DeiTModel.from_pretrained(folder, add_pooling_layer=False, use_mask_token=True)",
        ),
        ("Dinov2", {}, None),
        ("Bert", {"add_pooling_layer": False}, "hw.load(folder)"),
        ("Roberta", {"add_pooling_layer": False}, "hw.load(folder)"),
        ("Electra", {}, "hw.load(folder)"),
    ],
)
def test_what_a_class_is_given_beside_its_configuration_is_told(name: str, arguments: Any, shown: Any, tmp_path: Path):
    config = getattr(transformers, f"{name}Config")(**SMALL)
    model: Any = getattr(transformers, f"{name}Model")(config, **arguments).eval()
    inputs = (
        {"pixel_values": torch.randn(2, 3, 8, 8)}
        if "iT" in name or name == "Dinov2"
        else {"input_ids": torch.arange(4, 14)[None]}
    )
    heads = hw.find_heads(model)
    pruning = hw.prune(heads, {site.name: [0, 2] for site in heads}, inputs=inputs)
    assert shown in (None, pruning.loading)
    assert ("loaded by" in str(pruning)) == bool(arguments and pruning.stock is None)
    model.save_pretrained(tmp_path)
    assert apart(compute(model, inputs), compute(run(pruning, tmp_path).eval(), inputs)) == 0.0


def test_a_configuration_class_that_refuses_a_number_is_cited(tmp_path: Path):
    from transformers import LlamaConfig, LlamaModel

    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 48}
    model: Any = LlamaModel(LlamaConfig(**sizes, num_attention_heads=4)).eval()
    pruning = hw.prune(hw.find_heads(model), {0: [1], 1: [2]})
    assert "its configuration class refuses these numbers" in str(pruning.stock)
    assert "hidden size (64) is not a multiple of the number of attention heads (3)" in str(pruning.stock)
    assert model.config.num_attention_heads == 4
    inputs = {"input_ids": torch.arange(12).view(2, 6)}
    model.save_pretrained(tmp_path)
    assert apart(compute(model, inputs), compute(hw.load(tmp_path), inputs)) == 0.0


def test_numbers_that_a_configuration_does_not_give_are_for_headwise():
    model: Any = named(FAMILIES, "Llama")[0].build()
    model.model.layers[1].self_attn.scaling *= 2
    heads = hw.find_heads(model)
    expected = "the sizes of model.layers.1.self_attn do not follow from its configuration"
    assert hw.prune(heads, evenly(heads)).stock == expected


def test_a_configuration_is_put_back_with_the_model():
    from transformers import LlamaConfig, LlamaModel

    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 48}
    model: Any = LlamaModel(LlamaConfig(**sizes, num_attention_heads=4)).eval()
    heads, config = hw.find_heads(model), model.config.to_dict()
    # something that counts on the heads it was built with, at each call
    size = model.layers[0].self_attn.q_proj.out_features
    model.layers[0].register_forward_hook(
        lambda _m, _i, output: output.roll(model.layers[0].self_attn.o_proj.in_features, -1)
    )
    with pytest.raises(hw.errors.LayoutError, match="something holds heads that was not cut"):
        hw.prune(heads, {0: [1, 2]}, inputs={"input_ids": torch.arange(6)[None]})
    assert model.config.to_dict() == config
    assert model.layers[0].self_attn.q_proj.out_features == size
    assert "save_pretrained" not in vars(model)


def build_own() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(SeparateAttention(), SeparateAttention()).eval()


def test_a_model_of_ones_own_is_loaded_into_one_with_all_its_heads_or_with_those_left(tmp_path: Path):
    model, x = build_own(), torch.randn(2, 6, 12)
    hw.prune(hw.find_heads(model), {"0": [1], "1": [0, 3]}, inputs=(x,))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    expected = model(x)
    hw.save(model, tmp_path)
    torch.testing.assert_close(hw.load(tmp_path, build_own())(x), expected, rtol=0, atol=0)
    cut = copy.deepcopy(model)
    kept = dict(cut.named_parameters())
    torch.testing.assert_close(hw.load(tmp_path, cut)(x), expected, rtol=0, atol=0)
    assert all(kept[name] is parameter for name, parameter in cut.named_parameters())
    with pytest.raises(hw.errors.DataError, match="build one like it, with all its heads"):
        hw.load(tmp_path)


@cases("setting", [SimpleRouting(), Residual(SimpleRouting()), Gate()])
def test_aggregators_stay_in_the_folder_of_a_model_with_fewer_heads(setting, tmp_path: Path):
    family = named(FAMILIES, "BERT")[0]
    model: Any = family.build()
    inputs = family.inputs()
    heads = hw.find_heads(model)
    hw.prune(heads, unevenly(heads))
    aggregation = hw.aggregate(hw.find_heads(model).layer(0), setting)
    model.save_pretrained(tmp_path)
    again = hw.load(tmp_path)
    assert apart(compute(model, inputs), compute(again, inputs)) == 0.0
    # and into a model that is changed already
    assert apart(compute(model, inputs), compute(hw.load(tmp_path, again), inputs)) == 0.0
    aggregation.remove()
    assert "save_pretrained" in vars(model)
    model.save_pretrained(tmp_path / "without")
    assert apart(compute(model, inputs), compute(hw.load(tmp_path / "without"), inputs)) == 0.0


@cases(
    ("edit", "message"),
    [
        (lambda sizes: sizes.update(nowhere={"num_heads": 2}), "the model has no module 'nowhere'"),
        (lambda sizes: sizes["0"].update(heads=2), r"0\.heads is no number of heads or features"),
        (lambda sizes: sizes["0"].update(training=2), r"0\.training is no number of heads or features"),
        (lambda sizes: sizes["0"].update(num_heads=0), "num_heads of 0 is '0'; expected a positive integer"),
        (lambda sizes: sizes["0"].update(num_heads=True), "expected a positive integer"),
        (lambda sizes: sizes.update({"0": 3}), "sizes of 0 is '3'; expected numbers by attribute"),
        (lambda sizes: sizes.clear(), r"has shape \(15, 12\) in"),
    ],
)
def test_a_record_of_sizes_that_does_not_fit_is_refused_and_the_model_left_as_it_was(edit, message, tmp_path: Path):
    model, x = build_own(), torch.randn(2, 6, 12)
    hw.prune(hw.find_heads(model), {"0": [1]}, inputs=(x,))
    hw.save(model, tmp_path)
    file = tmp_path / "headwise.json"
    written = json.loads(file.read_text())
    sizes = {surgery["module"]: surgery["sizes"] for surgery in written["surgeries"]}
    edit(sizes)
    written["surgeries"] = [{"do": "resize", "module": name, "sizes": value} for name, value in sizes.items()]
    file.write_text(json.dumps(seal(written, tmp_path, written["file_digests"])))
    whole: Any = build_own()
    expected = whole(x)
    with pytest.raises(hw.errors.DataError, match=message):
        hw.load(tmp_path, whole)
    torch.testing.assert_close(whole(x), expected, rtol=0, atol=0)
    assert whole[0].num_heads == 4


def test_a_folder_of_a_larger_model_is_refused(tmp_path: Path):
    model, x = build_own(), torch.randn(2, 6, 12)
    hw.prune(hw.find_heads(model), {"0": [1]}, inputs=(x,))
    hw.save(model, tmp_path)
    smaller: Any = build_own()
    hw.prune(hw.find_heads(smaller), {"0": [1, 2]}, inputs=(x,))
    expected = smaller(x)
    with pytest.raises(
        hw.errors.DataError, match=r"has shape \(15, 12\) in .* and \(10, 12\) in the model, which has fewer"
    ):
        hw.load(tmp_path, smaller)
    torch.testing.assert_close(smaller(x), expected, rtol=0, atol=0)
    assert smaller[0].q_proj.out_features == 10
