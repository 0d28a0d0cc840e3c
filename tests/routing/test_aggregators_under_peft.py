"""Aggregators in models of peft, put there before the adapter or after: trained, saved and loaded with the adapter."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import headwise as hw
from cases import cases
from headwise.errors import LayoutError, SettingError

peft = pytest.importorskip("peft")

SETTINGS = {
    "EM": hw.routing.EMRouting(capsules=4, iterations=2),
    "residual": hw.routing.Residual(hw.routing.SimpleRouting(capsules=2, iterations=2)),
    "gate": hw.routing.Gate(),
}
PATH = "encoder.layer.1.attention.output.dense"
IDS = torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(5))
TARGET = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(6))


def base() -> nn.Module:
    """The same model each time; most of it is embeddings, which no adapter holds."""
    config = BertConfig(
        vocab_size=2000,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(3)
    return BertModel(config)


def lora(**settings: object) -> object:
    return peft.LoraConfig(**{"r": 2, "target_modules": ["query", "value"], **settings})


def build(order: str, setting) -> tuple[nn.Module, hw.routing.Aggregation]:
    """A model with an aggregator in its second layer."""
    model = base()
    torch.manual_seed(7)
    if order == "before":
        handle = hw.aggregate(hw.find_heads(model).layers(1), setting)
        return peft.get_peft_model(model, lora(modules_to_save=[PATH])), handle
    model = peft.get_peft_model(model, lora())
    return model, hw.aggregate(hw.find_heads(model).layers(1), setting)


def states(model: nn.Module) -> Tensor:
    return model(input_ids=IDS).last_hidden_state


def train(model: nn.Module) -> dict[str, Tensor]:
    """Train two steps and return what changed, by name."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        (states(model) - TARGET).square().mean().backward()
        optimizer.step()
    return {name: p for name, p in model.named_parameters() if not torch.equal(p, before[name])}


@cases("order", ["before", "after"])
@cases("name", SETTINGS)
def test_an_aggregator_is_trained_saved_and_loaded_with_the_adapter(name: str, order: str, tmp_path: Path):
    model, _ = build(order, SETTINGS[name])
    changed = train(model)
    wrapper = model.get_submodule(f"base_model.model.{PATH}")
    trained = {id(parameter) for parameter in wrapper.modules_to_save["default"].parameters()}
    assert trained <= {id(parameter) for parameter in changed.values()}
    assert not [place for place in changed if "lora_" not in place and id(changed[place]) not in trained]
    model.eval()
    model.save_pretrained(tmp_path)

    size = sum(parameter.numel() * 4 for parameter in model.parameters() if parameter.requires_grad)
    whole = sum(parameter.numel() * 4 for parameter in model.parameters())
    saved = (tmp_path / "adapter_model.safetensors").stat().st_size
    assert size <= saved < size + 6000
    assert saved < whole / 4

    again = base()
    hw.aggregate(hw.find_heads(again).layers(1), SETTINGS[name])
    loaded = peft.PeftModel.from_pretrained(again, str(tmp_path)).eval()
    assert torch.equal(states(loaded), states(model))
    # and goes on training where it is loaded to be trained
    resumed = base()
    hw.aggregate(hw.find_heads(resumed).layers(1), SETTINGS[name])
    resumed = peft.PeftModel.from_pretrained(resumed, str(tmp_path), is_trainable=True)
    train(resumed)
    train(model.train())
    torch.testing.assert_close(states(resumed), states(model), rtol=0.0, atol=1e-6)


@cases("name", SETTINGS)
def test_without_the_adapter_the_model_is_as_it_was(name: str):
    plain = base().eval()
    model, _ = build("after", SETTINGS[name])
    train(model)
    model.eval()
    with model.disable_adapter():
        assert torch.equal(states(model), states(plain))
    assert not torch.allclose(states(model), states(plain), atol=1e-3)


@cases("order", ["before", "after"])
def test_a_merged_model_keeps_the_aggregator(order: str, tmp_path: Path):
    model, _ = build(order, SETTINGS["EM"])
    train(model)
    expected = states(model.eval())
    merged = model.merge_and_unload().eval()
    torch.testing.assert_close(states(merged), expected, rtol=0.0, atol=1e-5)
    merged.save_pretrained(tmp_path)
    assert torch.equal(states(hw.load(tmp_path)), states(merged))


def test_another_adapter_calls_the_old_projection_or_has_its_own():
    model, _ = build("after", SETTINGS["EM"])
    train(model)
    first = states(model.eval())
    model.add_adapter("second", lora(init_lora_weights=False))
    model.set_adapter("second")
    assert type(hw.find_heads(model).layers(1).sites[0].expose().module).__name__ == "ModulesToSaveWrapper"
    second = states(model)
    assert not torch.allclose(first, second, atol=1e-3)
    model.set_adapter("default")
    assert torch.equal(states(model), first)


def test_removing_puts_the_projection_back():
    model = peft.get_peft_model(base(), lora(modules_to_save=["encoder.layer.0.output.dense"]))
    expected = states(model.eval())
    handle = hw.aggregate(hw.find_heads(model), SETTINGS["EM"])
    assert len(model.peft_config["default"].modules_to_save) == 3
    handle.remove()
    assert model.peft_config["default"].modules_to_save == ["encoder.layer.0.output.dense"]
    assert torch.equal(states(model), expected)


def test_penalties_and_repulsion_act_beside_an_aggregator():
    model, _ = build("after", SETTINGS["EM"])
    heads = hw.find_heads(model)
    penalty = hw.Disagreement(heads, hw.similarity.CKA())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    repulsion = hw.repel(heads.projection("query"), hw.SVGD(alpha=0.1), optimizer)
    (states(model).square().mean() + penalty()).backward()
    optimizer.step()
    repulsion.check()


def test_an_aggregator_that_peft_froze_is_not_trained_in_silence():
    model = base()
    hw.aggregate(hw.find_heads(model).layers(1), SETTINGS["EM"])
    copied = copy.deepcopy(model)
    for one in (model, copied):
        adapted = peft.get_peft_model(one, lora())
        with pytest.raises(SettingError, match=rf"modules_to_save=\['{PATH}'"):
            states(adapted.train())
        # it may be read, and be frozen once it has weights that were trained
        states(adapted.eval())
    loaded = base()
    hw.aggregate(hw.find_heads(loaded).layers(1), SETTINGS["EM"])
    loaded.load_state_dict(loaded.state_dict())
    states(peft.get_peft_model(loaded, lora()).train())
    trained = base()
    hw.aggregate(hw.find_heads(trained).layers(1), SETTINGS["EM"])
    train(trained)
    states(peft.get_peft_model(trained, lora()).train())


def test_what_has_no_place_is_refused():
    adapted = peft.get_peft_model(base(), lora(target_modules=["query", "dense"]))
    with pytest.raises(LayoutError, match=r"adapter of its own.*target_modules"):
        hw.aggregate(hw.find_heads(adapted), SETTINGS["EM"])
    kept = peft.get_peft_model(base(), lora(modules_to_save=[PATH]))
    with pytest.raises(LayoutError, match=r"leave it out of modules_to_save"):
        hw.aggregate(hw.find_heads(kept), SETTINGS["EM"])
    part = peft.get_peft_model(base(), lora()).base_model.model.encoder
    with pytest.raises(LayoutError, match=r"hw\.find_heads\(peft_model\)"):
        hw.aggregate(hw.find_heads(part), SETTINGS["EM"])
    twice, _ = build("after", SETTINGS["EM"])
    with pytest.raises(LayoutError, match=r"already has EMAggregator"):
        hw.aggregate(hw.find_heads(twice).layers(1), SETTINGS["gate"])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    with pytest.raises(LayoutError, match=r"nn\.MultiheadAttention"):
        hw.aggregate(
            hw.find_heads(peft.get_peft_model(Model(), lora(target_modules=["attention"]))), SETTINGS["residual"]
        )
