"""Adapters of peft: the effective weight is read where it is W + B A, and refused with why where it is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases, tiers
from heads.attentions import SeparateAttention
from heads.families import BY_NAME
from heads.wrappers import wrap

peft = pytest.importorskip("peft")

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def adapted(module: nn.Module | None = None, config=None, **settings) -> nn.Module:
    """The module under an adapter, away from its start, where it adds nothing."""
    torch.manual_seed(2)
    module = SeparateAttention() if module is None else module
    config = config or peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": [*PROJECTIONS], **settings})
    return fill(peft.get_peft_model(module, config)).double().eval()


def fill(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.4)
    return model


def multiplied(layer: nn.Module) -> Tensor:
    """What a layer multiplies its input by, [d_out, d_in], whatever it is made of."""
    inputs = torch.eye(layer.in_features, dtype=torch.float64)
    return (layer(inputs) - layer(torch.zeros_like(inputs))).T


def assert_read(heads: hw.Heads) -> None:
    for head_slice in heads.sites[0].slices:
        expected = multiplied(head_slice.module)
        rows = [
            expected[head_slice.start + i * head_slice.stride :][: head_slice.head_size]
            for i in range(head_slice.heads)
        ]
        found = head_slice.read().mT if head_slice.transposed else head_slice.read()
        torch.testing.assert_close(found, torch.stack(rows))


@cases(
    "attach",
    [lambda heads: hw.Taps(heads, values=True), lambda heads: hw.Disagreement(heads, hw.similarity.Subspace())],
)
def test_values_are_not_read_from_the_base_of_an_adapter_that_came_later(attach):
    attention = SeparateAttention().double()
    handle = attach(hw.find_heads(attention))
    model = adapted(attention)
    with pytest.raises(
        hw.errors.NotFired, match="what projects its values is now a Linear, set after this was attached"
    ):
        model(X)
    handle.remove()
    handle = attach(hw.find_heads(model))
    model(X)
    handle.remove()


@cases("settings", [{}, {"use_rslora": True}, {"lora_dropout": 0.5}, {"lora_bias": True}])
def test_heads_are_those_of_the_effective_weight(settings):
    attention = SeparateAttention(key_value_heads=2)
    attention.k_proj.bias = nn.Parameter(torch.zeros(10))
    model = adapted(attention, **settings)
    heads = hw.find_heads(model)
    assert_read(heads)
    assert hw.verify(heads, (X,)).sites == ("base_model.model",)
    site = heads.sites[0]
    assert not torch.allclose(site.slices[0].read(), site.slices[0].of(site.slices[0].parameter), atol=0.01)


@tiers(("family", "target"), [("GPT-2", "c_attn")], [("GPT-NeoX", "query_key_value"), ("Phi-3", "qkv_proj")])
def test_fused_layers_and_transposed_ones_are_read_alike(family, target):
    entry = BY_NAME[family]
    model = adapted(entry.build(), target_modules=[target], fan_in_fan_out=family == "GPT-2")
    heads = hw.find_heads(model)
    assert_read(heads)
    assert len(hw.verify(heads, entry.inputs()).sites) == len(heads)


def test_active_merged_and_disabled_adapters_count_as_the_model_counts_them():
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=[*PROJECTIONS]))
    fill(model).double()
    heads = hw.find_heads(model)
    (first, *_) = heads.sites[0].slices
    assert [adapter.name for adapter in first.adapters] == ["default"]
    assert_read(heads)
    model.base_model.set_adapter(["default", "second"])
    assert len(first.adapters) == 2
    assert_read(heads)
    model.merge_adapter(["second"])
    assert first.adapters == ()
    assert_read(heads)
    model.base_model.disable_adapter_layers()
    with pytest.raises(
        hw.errors.LayoutError, match=r"q_proj\.base_layer\.weight has adapters merged that are disabled"
    ):
        first.read()
    model(X)
    assert_read(heads)
    without = first.read()
    model.base_model.enable_adapter_layers()
    assert not torch.allclose(first.read(), without, atol=0.01)


CONFIGS = {
    "DoRA": (peft.LoraConfig(target_modules=[*PROJECTIONS], use_dora=True), r"'default' is a variant \(Dora"),
    "LoHa": (peft.LoHaConfig(target_modules=[*PROJECTIONS]), r"base of a peft\.tuners\.loha\S+, whose adapter is not"),
    "IA3": (peft.IA3Config(target_modules=[*PROJECTIONS], feedforward_modules=[]), r"base of a peft\.tuners\.ia3"),
    "AdaLoRA": (peft.AdaLoraConfig(target_modules=[*PROJECTIONS], total_step=9), r"base of a peft\.tuners\.adalora"),
    "VeRA": (peft.VeraConfig(target_modules=[*PROJECTIONS], r=2), r"base of a peft\.tuners\.vera"),
}


@cases("name", CONFIGS)
def test_what_is_not_w_plus_b_a_is_refused_by_repulsion_and_noted_by_measure(name):
    config, reason = CONFIGS[name]
    attention = SeparateAttention(head_dim=3)
    model = adapted(attention, copy.deepcopy(config))
    heads = hw.find_heads(model)
    assert hw.verify(heads, (X,)).sites == ("base_model.model",)
    with pytest.raises(
        hw.errors.LayoutError, match=rf"^base_model\.model\.q_proj\.base_layer\.weight is the {reason}|{reason}"
    ):
        hw.repel(heads, hw.SVGD(), torch.optim.SGD(model.parameters(), lr=0.1))
    with hw.Taps(heads, values=True) as taps, torch.no_grad():
        model(X)
        (capture,) = taps.read()
    torch.testing.assert_close(capture.values.flatten(-2), attention.v_proj(X))


def test_a_lora_around_torch_s_attention_is_read_but_not_repelled():
    torch.manual_seed(0)
    model = adapted(nn.TransformerEncoderLayer(12, 4, 24, batch_first=True), target_modules=["self_attn"]).float()
    heads = hw.find_heads(model)
    assert hw.verify(heads, (X.float(),)).sites == ("base_model.model.self_attn.base_layer",)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(hw.errors.LayoutError, match=r"in_proj_weight is adapted by a \S+\.MultiheadAttention around"):
        hw.repel(heads, hw.SVGD(), optimizer)


def test_a_trained_copy_of_a_module_is_the_one_that_is_found():
    entry = BY_NAME["BERT"]
    model = adapted(
        entry.build(), peft.LoraConfig(target_modules=["intermediate.dense"], modules_to_save=["attention"])
    )
    heads = hw.find_heads(model)
    assert [site.name for site in heads] == [
        f"base_model.model.encoder.layer.{i}.attention.modules_to_save.default.self" for i in range(2)
    ]
    assert hw.verify(heads, entry.inputs()).sites == tuple(site.name for site in heads)
    model = adapted(entry.build(), peft.LoraConfig(target_modules=["intermediate.dense"], modules_to_save=["query"]))
    heads = hw.find_heads(model)
    assert heads.sites[0].slices[0].name.endswith("query.modules_to_save.default.weight")
    assert hw.repel(heads.projection("query"), hw.SVGD(), torch.optim.SGD(model.parameters(), lr=0.1))
    model.add_adapter("second", peft.LoraConfig(target_modules=["intermediate.dense"]))
    model.set_adapter("second")
    with pytest.raises(
        hw.errors.LayoutError, match=r"query\S+ is not what ModulesToSaveWrapper calls anymore: another adapter"
    ):
        hw.Taps(heads, values=True)


def test_the_penalty_on_values_reaches_a_and_b_through_the_effective_weight():
    model = adapted()
    heads = hw.find_heads(model)
    penalty = hw.Disagreement(heads, hw.similarity.Subspace())
    model.train()
    model(X)
    penalty().backward()
    layer = heads.sites[0].slices[2].lora
    first, second = (factor["default"].weight for factor in (layer.lora_A, layer.lora_B))
    bias = layer.base_layer.bias
    theta = layer.base_layer.weight + layer.scaling["default"] * second @ first
    values = (X @ theta.T + bias).unflatten(-1, (4, 5))
    units = values / values.norm(dim=-1, keepdim=True)
    similarity = (units @ units.mT).mean()
    for factor, expected in zip((first, second), torch.autograd.grad(similarity, (first, second)), strict=True):
        torch.testing.assert_close(factor.grad, expected)


def test_a_report_measures_the_effective_weights():
    entry = BY_NAME["BERT"]
    model = adapted(entry.build(), target_modules=["query", "key", "value", "attention.output.dense"]).float()
    merged, base = copy.deepcopy(model).merge_and_unload(), entry.build()
    reports = [hw.measure(hw.find_heads(own), [entry.inputs()]) for own in (model, merged, base)]
    names = {"query_distance", "key_cosine", "value_parameter_distance", "contribution_cka", "output_span"}
    for found, expected in zip(reports[0].layers, reports[1].layers, strict=True):
        assert names <= set(found.pairs) == set(expected.pairs)
        for name, pairs in found.pairs.items():
            torch.testing.assert_close(torch.tensor(pairs), torch.tensor(expected.pairs[name]), rtol=1e-4, atol=1e-5)
        assert found.effective_heads == pytest.approx(expected.effective_heads, rel=1e-4)
    adapted_to, plain = (torch.tensor(one.layers[0].pairs["query_distance"]) for one in (reports[0], reports[2]))
    assert not torch.allclose(adapted_to, plain, rtol=0.01)
    site = hw.find_heads(model).sites[1]
    torch.testing.assert_close(site.find_output_weights(), hw.find_heads(merged).sites[1].find_output_weights())
    model.merge_adapter()
    model.base_model.disable_adapter_layers()
    assert site.find_output_weights() is None


def freeze(model: nn.Module, part: str) -> None:
    for name, parameter in model.named_parameters():
        if part in name:
            parameter.requires_grad_(False)


def twice() -> nn.Module:
    return wrap(wrap(SeparateAttention(), *PROJECTIONS), *PROJECTIONS)


def inside() -> nn.Module:
    model = wrap(SeparateAttention(), *PROJECTIONS)
    model.q_proj.lora_A["default"] = nn.Sequential(model.q_proj.lora_A["default"])
    return model


def after(change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    model = adapted()
    change(model)
    return lambda: model


@cases(
    ("build", "message"),
    [
        (after(lambda m: m.merge_adapter()), r"q_proj\S+ has the adapters 'default' merged into it.*unmerge_adapter"),
        (after(lambda m: m.base_model.disable_adapter_layers()), r"\('default'\) are disabled; call set_adapter"),
        (after(lambda m: freeze(m, "lora_")), "whose adapters 'default' are frozen; load them with is_trainable"),
        (after(lambda m: freeze(m, "lora_A")), r"A or B alone is trained \(adapters 'default'\); train both"),
        (after(lambda m: m.requires_grad_(True)), r"q_proj\S+ is trained beside its LoRA adapters; freeze it"),
        (twice, r"is the base of several adapted layers \(LoraLinear in LoraLinear\)"),
        (inside, r"base of a heads\.wrappers\.LoraLinear, whose adapter is not a plain A"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused_with_what_to_do(build: Callable[[], nn.Module], message: str):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hw.errors.LayoutError, match=message):
        hw.repel(hw.find_heads(model), hw.SVGD(), optimizer)
