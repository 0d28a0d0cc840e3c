"""What is not known to be ablation when it is removed is compared with it: sharing, gates, families, precisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import headwise as hw
from cases import cases, thin, tiers
from heads.attentions import SeparateAttention
from heads.families import FAMILIES
from heads.shared import KEYS, MODELS, SHARING, TOKENS, build, gemma4
from headwise.heads.heads import Heads
from headwise.shrinking.proof import TESTED
from shrinking.cutting import Removed, ablated, apart, compute, named
from shrinking.test_prune_families import PRUNED

INPUTS = {"input_ids": TOKENS}
LLAMA: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 16}


def make(name: str, **settings: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")
    return getattr(transformers, f"{name}ForCausalLM")(config(**LLAMA, **settings))


def llama4(**settings: Any) -> nn.Module:
    few = {"intermediate_size_mlp": 48, "num_local_experts": 2, **settings}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**LLAMA, **few))


# Attentions with a gate on the outputs of their heads, and one with norms, temperatures and complex numbers.
OTHERS = {
    "AFMoE": lambda: make("Afmoe", **EXPERTS, num_shared_experts=1, num_dense_layers=1),
    "Laguna, a gate a head": lambda: make("Laguna", **SHARED_EXPERT, gating=True),
    "Laguna, a gate a feature": lambda: make("Laguna", **SHARED_EXPERT, gating="per-element"),
    "Laguna, other heads in each layer": lambda: make(
        "Laguna", **SHARED_EXPERT, gating=True, num_attention_heads_per_layer=[4, 8]
    ),
    "Qwen3-Next": lambda: make(
        "Qwen3Next",
        **SHARED_EXPERT,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
    ),
    "Llama 4": llama4,
}


def build_other(name: str) -> Heads:
    torch.manual_seed(1)
    model = OTHERS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return hw.find_heads(model, exclude=("*.linear_attn",) if name == "Qwen3-Next" else ())


def choose(heads: Heads, seed: int) -> Removed:
    """Random heads: the same groups of all layers, or of one group as many heads."""
    chance = torch.Generator().manual_seed(seed)
    removed = {}
    for site in heads:
        group = site.num_heads // site.key_value_heads
        if site.key_value_heads == 1:
            count = int(torch.randint(1, site.num_heads, (), generator=chance))
            removed[site.name] = tuple(torch.randperm(site.num_heads, generator=chance)[:count].tolist())
        else:
            gone = seed % site.key_value_heads
            removed[site.name] = tuple(range(gone * group, (gone + 1) * group))
    return removed


def save_and_load(model: Any, pruning: hw.shrinking.Pruning, folder: Path) -> Any:
    """What the code that the pruning names loads."""
    if pruning.loading is None:
        return model
    model.save_pretrained(folder)
    return eval(pruning.loading, {"transformers": transformers, "hw": hw, "folder": folder}).eval()


@tiers(("name", "seed"), *thin([(name, seed) for name in (*MODELS, *OTHERS) for seed in (0, 1)], 4))
def test_pruned_is_ablated_and_saved_is_loaded(name: str, seed: int, tmp_path: Path):
    heads = build_other(name) if name in OTHERS else hw.find_heads(build(name))
    removed = choose(heads, seed)
    whole, expected = compute(heads.model, INPUTS), ablated(heads, removed, INPUTS)
    pruning = hw.prune(heads, removed, inputs=INPUTS if name.startswith("own") else None)
    found = compute(heads.model, INPUTS)
    assert apart(expected, found) <= 1e-5
    assert apart(whole, found) > 1e-3
    assert apart(found, compute(save_and_load(heads.model, pruning, tmp_path), INPUTS)) == 0.0


@tiers("name", *thin(SHARING, 3))
def test_layers_left_out_that_read_what_is_removed_are_not_forgotten(name: str):
    model = build(name)
    out = [site.name for site in hw.find_heads(model) if site.borrows]
    heads = hw.find_heads(model, exclude=out)
    before = compute(model, INPUTS)
    removed = choose(heads, 0)
    if heads.sites[0].key_value_heads == 1:
        # of one group no key/value head goes
        expected = ablated(heads, removed, INPUTS)
        hw.prune(heads, removed, inputs=INPUTS)
        assert apart(expected, compute(model, INPUTS)) <= 1e-5
        return
    with pytest.raises(hw.errors.LayoutError, match=r"with these heads removed|counts on the heads"):
        hw.prune(heads, removed, inputs=INPUTS if name.startswith("own") else None)
    assert apart(before, compute(model, INPUTS)) == 0.0
    lending = [site for site in heads if getattr(site.module, "store_full_length_kv", True) and len(site.slices) == 3]
    lending = heads.where(lending[-1].name)
    with pytest.raises(hw.errors.LayoutError, match="are read by other attentions"):
        hw.merge(lending, 1, batches=[INPUTS])
    assert apart(before, compute(model, INPUTS)) == 0.0


@cases("name", ["Gemma 4", "Gemma 3n"])
def test_layers_that_share_keys_lose_the_same_groups(name: str):
    heads = hw.find_heads(build(name))
    first, second, third, fourth = (site.name for site in heads)
    with pytest.raises(
        hw.errors.LayoutError, match=r"computes with the same keys and values as model\.layers\.2"
    ) as refusal:
        hw.prune(heads, {first: [0, 1]})
    assert "remove all query heads of the same groups from each" in str(refusal.value)
    with pytest.raises(hw.errors.LayoutError, match=r"group 1; model\.layers\.3\.self_attn group 0"):
        hw.prune(heads, {second: [2, 3], fourth: [0, 1]})
    hw.prune(heads, {second: [2, 3], fourth: [2, 3]})
    # within groups each layer is its own
    heads = hw.find_heads(heads.model)
    hw.prune(heads, {first: [0, 2], third: [1, 3]})
    heads = hw.find_heads(build(name))
    worth = {site.name: [1.0, 1.0, 0.0, 0.0] if site.borrows else [0.0, 0.0, 0.5, 0.4] for site in heads}
    assert set(hw.prune(heads, keep=0.5, importance=worth).removed.values()) == {(2, 3)}


def test_merging_leaves_what_shares_its_keys_and_takes_the_rest():
    heads = hw.find_heads(build("Gemma 4"))
    for site, message in ((heads.sites[0], "are read by other"), (heads.sites[2], "of another layer and holds none")):
        with pytest.raises(hw.errors.LayoutError, match=message):
            hw.merge(heads.where(site.name), 1, batches=[INPUTS])
    with pytest.raises(hw.errors.LayoutError, match="holds no values beside its keys"):
        hw.merge(hw.find_heads(build("Gemma 4, keys as values")).layer(1), 1, batches=[INPUTS])
    mixed = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], **KEYS}
    heads = hw.find_heads(gemma4(num_kv_shared_layers=0, **mixed).eval())
    merged = hw.merge(heads.layers(0, 1, 2), 1, batches=[INPUTS])
    assert [groups for _, groups in merged.heads.values()] == [1, 1, 1]


@pytest.mark.full
def test_no_call_is_asked_for_where_a_family_is_among_those_tested():
    families = [
        type(site.module)
        for family in PRUNED
        for site in hw.find_heads(family.build())
        if type(site.module).__module__.startswith("transformers.")
    ]
    assert {kind.__name__ for kind in families} | {"MoonshineAttention"} == TESTED


def test_a_call_is_asked_for_where_a_family_is_not_among_those_tested():
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    config = transformers.DeiTConfig(**sizes, image_size=8, patch_size=4)
    model = transformers.DeiTModel(config).eval()
    pixels = {"pixel_values": torch.randn(2, 3, 8, 8)}
    with pytest.raises(
        hw.errors.SettingError, match=r"is not among the attentions .* only a call shows .* pass inputs="
    ):
        hw.prune(hw.find_heads(model), {0: [1]})
    hw.prune(hw.find_heads(model), {0: [1]}, inputs=pixels)
    # a known attention whose forward was replaced is not known any more
    model = named(FAMILIES, "ViT")[0].build()
    attention = hw.find_heads(model).sites[0].module
    attention.forward = attention.forward
    with pytest.raises(hw.errors.SettingError, match="only a call shows"):
        hw.prune(hw.find_heads(model), {0: [1]})


def test_a_shared_weight_is_compared():
    class Twice(nn.Module):
        """Two attentions with the same projections of queries, keys and values."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.MultiheadAttention(12, 4, batch_first=True) for _ in range(2))
            self.second.in_proj_weight = self.first.in_proj_weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for attention in (self.first, self.second):
                x = x + attention(x, x, x, need_weights=False)[0]
            return x

    model, x = Twice().eval(), torch.randn(2, 5, 12)
    with pytest.raises(hw.errors.SettingError, match=r"attentions of the Twice were left out .* only a call shows"):
        hw.prune(hw.find_heads(model, exclude="second"), {"first": [1]})
    with pytest.raises(hw.errors.SettingError, match=r"in_proj_weight is read by several layers; only a call shows"):
        hw.prune(hw.find_heads(model), {"first": [1], "second": [1]})
    heads = hw.find_heads(model)
    expected = ablated(heads, {"first": (1,), "second": (1,)}, {"x": x})
    hw.prune(heads, {"first": [1], "second": [1]}, inputs=(x,))
    assert apart(expected, [model(x)]) <= 1e-5


class Gated(SeparateAttention):
    """A gate on the outputs of heads, made from what the attention gets, under some name."""

    def __init__(self, name: str, features: int, bias: bool = True) -> None:
        super().__init__(width=20)
        self.name = name
        self.add_module(name, nn.Linear(20, features, bias=bias))

    def forward(self, x: torch.Tensor, key_padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        heads = self.join(nn.functional.scaled_dot_product_attention(q, k, v)).unflatten(-1, (self.num_heads, -1))
        gate = torch.sigmoid(getattr(self, self.name)(x)).unflatten(-1, (self.num_heads, -1))
        assert key_padding_mask is None
        return self.o_proj((heads * gate).flatten(-2))


class GatedAfter(Gated):
    """The same on what W_O gives, which has no heads."""

    def forward(self, x: torch.Tensor, key_padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        return SeparateAttention.forward(self, x, key_padding_mask) * torch.sigmoid(getattr(self, self.name)(x))


class GatedByAll(Gated):
    """The same, each from the outputs of all heads."""

    def forward(self, x: torch.Tensor, key_padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        heads = self.join(nn.functional.scaled_dot_product_attention(q, k, v))
        assert key_padding_mask is None
        return self.o_proj(heads * torch.sigmoid(getattr(self, self.name)(heads)))


@cases("name", ["g_proj", "gate_proj", "gate", "output_gate", "to_gates", "extra"])
@cases("features", [4, 20])
def test_a_gate_of_ones_own_is_cut_with_its_heads(name: str, features: int):
    torch.manual_seed(0)
    model, x = Gated(name, features, bias=name != "gate").double().eval(), torch.randn(2, 6, 20).double()
    heads = hw.find_heads(model)
    expected = ablated(heads, {"": (0, 2)}, {"x": x})
    hw.prune(heads, {0: [0, 2]}, inputs={"x": x})
    assert apart(expected, [model(x)]) <= 1e-12
    assert getattr(model, name).out_features == features // 2


def test_a_gate_that_has_no_heads_stays_and_one_of_all_heads_is_refused():
    torch.manual_seed(0)
    x = torch.randn(2, 6, 20).double()
    model = GatedAfter("gate", 20).double().eval()
    heads = hw.find_heads(model)
    expected = ablated(heads, {"": (1,)}, {"x": x})
    hw.prune(heads, {0: [1]}, inputs=(x,))
    assert apart(expected, [model(x)]) <= 1e-12
    assert model.get_submodule("gate").out_features == 20
    model = GatedByAll("gate", 20).double().eval()
    before = model(x)
    with pytest.raises(hw.errors.LayoutError, match=r"use hw\.ablate"):
        hw.prune(hw.find_heads(model), {0: [1]}, inputs=(x,))
    assert torch.equal(before, model(x))


@pytest.mark.full
@cases("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@cases("name", ["Llama 4", "Gemma 3n", "Laguna, a gate a head", "T5", "BERT", "ModernBERT"])
def test_rounding_is_told_from_what_was_forgotten_in_every_precision(name: str, dtype: torch.dtype):
    """What a model computes in float32, whatever its weights are, is as precise as float32."""
    family = next((family for family in FAMILIES if family.name == name), None)
    if name.startswith("Laguna") and dtype == torch.float64:
        # its experts take no float64
        with pytest.raises(hw.errors.HeadwiseError, match="could not be run on the given inputs"):
            hw.prune(hw.find_heads(build_other(name).model.double()), {0: [0, 1]}, inputs=INPUTS)
        return
    model = build_other(name).model if name in OTHERS else build(name) if family is None else family.build()
    model.to(dtype)
    inputs = INPUTS if family is None else family.inputs()
    heads = hw.find_heads(model)
    hw.prune(heads, choose(heads, 0), inputs=inputs)
