"""How parameters are drawn, and the options of a scale."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from cases import cases
from headwise.errors import DataError, SettingError
from headwise.nn.multihead import MultiheadAttention
from headwise_lab.experiment.scale import ScaleOptions, read_presets, read_task_file, with_options
from headwise_lab.experiment.seeding import derive_key, initialize_parameters
from headwise_lab.experiment.task import ClassifierTask
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.tasks.lm.scales import LM_SCALES
from headwise_lab.tasks.logic.scales import LOGIC_SCALES, LogicScale


class Encoder(nn.Module):
    def __init__(self, attention: type[nn.MultiheadAttention] = nn.MultiheadAttention, **settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = attention(8, 2, **settings)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 3)


class Aggregator(nn.Module):
    """Stands in the place of an output projection: draws more than it, and has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.scale = nn.Parameter(torch.empty(5))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)


ATTENTIONS = [
    (nn.MultiheadAttention, {}),
    (nn.MultiheadAttention, {"bias": False}),
    (nn.MultiheadAttention, {"kdim": 5, "vdim": 6, "add_bias_kv": True}),
    (MultiheadAttention, {}),
    (MultiheadAttention, {"kdim": 5, "vdim": 6}),
]


@cases(("attention", "settings"), ATTENTIONS)
def test_every_parameter_is_drawn_anew_by_seed_and_name_though_an_output_projection_was_replaced(attention, settings):
    one, other, third, routed = (Encoder(attention, **settings) for _ in range(4))
    routed.attention.out_proj = Aggregator()
    for model in (one, other, third):
        for parameter in model.parameters():
            nn.init.constant_(parameter, 7.0)
    for model, seed in ((one, 1), (other, 1), (third, 2), (routed, 1)):
        torch.rand(17)
        initialize_parameters(model, seed=seed)
    for name, value in one.named_parameters():
        assert not (value == 7.0).any(), name
        assert torch.equal(value, other.get_parameter(name)), name
    assert not torch.equal(one.embedding.weight, third.embedding.weight)
    assert not torch.equal(one.out.weight, third.out.weight)
    there = dict(routed.named_parameters())
    names = [name for name, value in one.named_parameters() if name in there and there[name].shape == value.shape]
    assert {"embedding.weight", "norm.weight", "out.weight", "out.bias"} <= set(names)
    assert any(name.startswith("attention.") for name in names)
    assert all(torch.equal(one.get_parameter(name), there[name]) for name in names)


def test_a_module_starts_as_torch_starts_it_under_the_seed_of_its_name_and_the_global_generator_stays():
    model, twins = Encoder(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    initialize_parameters(model, seed=5)
    assert torch.equal(torch.rand(3), expected)
    bound = (6 / (8 + 24)) ** 0.5
    assert 0.9 * bound < model.attention.in_proj_weight.abs().max() <= bound
    assert (model.attention.in_proj_bias == 0).all()
    assert (model.attention.out_proj.bias == 0).all()
    assert (model.attention.out_proj.weight != 0).all()
    torch.manual_seed(derive_key(5, "out"))
    assert torch.equal(model.out.weight, nn.Linear(8, 3).weight)
    initialize_parameters(twins, seed=0)
    assert not torch.equal(twins[0].weight, twins[1].weight)


def test_a_module_that_cannot_draw_its_parameters_is_refused_before_anything_is_drawn():
    class Mute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Mute()))
    before = model[0].weight.clone()
    with pytest.raises(SettingError, match=r"module 1\.0 \(Mute\) owns parameters but has no reset_parameters"):
        initialize_parameters(model, seed=0)
    assert torch.equal(model[0].weight, before)
    with pytest.raises(SettingError, match=r"the model itself"):
        initialize_parameters(Mute(), seed=0)


def test_keys_are_63_bits_and_tell_apart_order_type_and_where_one_part_ends():
    keys = {derive_key(seed, name) for seed in range(50) for name in ("data", "noise", "dropout")}
    assert len(keys) == 150
    assert all(0 <= value < 2**63 for value in keys)
    assert max(keys) > 2**62
    assert derive_key(3, "data") == 3671545289025277455
    parts = [(1, "a"), ("a", 1), ("1", "a"), ("1a",), ("1", "", "a")]
    assert len({derive_key(*some) for some in parts}) == 5


CPU = CLASSIFICATION_SCALES["cpu"]


def test_sizes_are_typed_and_named_and_places_are_not():
    options = ScaleOptions("cpu", Path("p"), Path("e"), 10, ("layers=4", "dropout=0.5", "norm_first=false"))
    scale = with_options(CPU, options, "classification")
    assert (scale.layers, scale.dropout, scale.norm_first, scale.folds) == (4, 0.5, False, 10)
    assert (scale.pipeline, scale.embeddings) == (Path("p"), Path("e"))
    assert scale.name == "cpu-layers=4-dropout=0.5-norm_first=False-folds=10"
    assert with_options(CPU, ScaleOptions("cpu", Path("p")), "classification").name == "cpu"
    assert with_options(CPU, ScaleOptions("cpu"), "classification") is CPU


def test_one_fold_is_one_cut_and_a_size_may_be_absent_or_one_of_some_words():
    paper = CLASSIFICATION_SCALES["paper"]
    assert paper.folds == 10
    scale = with_options(paper, ScaleOptions("paper", folds=1), "classification")
    assert (scale.folds, scale.name) == (None, "paper-folds=1")
    with pytest.raises(SettingError, match="folds"):
        with_options(paper, ScaleOptions("paper", folds=2), "classification")
    assert with_options(CPU, ScaleOptions("cpu", sizes=("train_examples=50",)), "classification").train_examples == 50
    scale = with_options(LM_SCALES["demo"], ScaleOptions("demo", sizes=("family=qwen3",)), "lm")
    assert (scale.family, scale.name) == ("qwen3", "demo-family=qwen3")
    with pytest.raises(SettingError, match=r"^--set family=gpt: expected llama or qwen3\.$"):
        with_options(LM_SCALES["demo"], ScaleOptions("demo", sizes=("family=gpt",)), "lm")


def test_the_options_are_shown_as_they_are_typed_and_for_others_without_places():
    options = ScaleOptions("cpu", Path("a b"), None, 5, ("layers=4",))
    assert options.words() == ["--scale", "cpu", "--pipeline", "a b", "--folds", "5", "--set", "layers=4"]
    assert options.words(for_others=True)[:4] == ["--scale", "cpu", "--pipeline", "DIR"]


def test_what_a_scale_does_not_have_or_cannot_be_is_refused():
    for options, message in (
        (ScaleOptions("cpu", pipeline=Path("p")), "task logic takes no --pipeline; omit it"),
        (ScaleOptions("cpu", folds=5), "task logic takes no --folds; omit it"),
        (ScaleOptions("cpu", sizes=("layers",)), "--set layers: expected size=value, with one of the sizes width, lay"),
        (ScaleOptions("cpu", sizes=("name=x",)), "--set name=x: expected size=value"),
        (ScaleOptions("cpu", sizes=("layers=two",)), "--set layers=two: expected an integer"),
        (ScaleOptions("cpu", sizes=("norm_first=1",)), "--set norm_first=1: expected true or false"),
        (ScaleOptions("cpu", sizes=("layers=0",)), "layers is 0; expected an integer of at least 1"),
    ):
        with pytest.raises(SettingError, match=message):
            with_options(LOGIC_SCALES["cpu"], options, "logic")


LOGIC = Path(inspect.getfile(LogicScale)).with_name("task.toml").read_text(encoding="utf-8")


def test_a_preset_has_the_shared_sizes_and_its_own(tmp_path):
    place = tmp_path / "task.toml"
    place.write_text(LOGIC.replace("[scales.cpu]\n", "[scales.cpu]\nlayers = 5\n", 1), encoding="utf-8")
    found = read_presets(place, LogicScale)
    assert found == {**LOGIC_SCALES, "cpu": dataclasses.replace(LOGIC_SCALES["cpu"], layers=5)}
    assert {name: scale.name for name, scale in found.items()} == {name: name for name in ("demo", "cpu", "paper")}
    assert found["paper"].test_bins == tuple(range(1, 13))


def test_a_file_of_settings_that_is_wrong_is_refused_with_its_place(tmp_path):
    place, missed = tmp_path / "task.toml", []
    shown = '[[shown]]\nkey = "a"\nnames = "b"'
    for old, new, kind, message in (
        ("metric", "metric metric", DataError, f"{place}: .*expected the settings of a task as TOML"),
        ("metric", "metrics", DataError, f"{place}: metrics is not a setting of Wrong; correct its name"),
        ("[scales]", f"{shown}\n[scales]", DataError, f"{place}: .*'names'; correct what is shown"),
        ("layers = 2", "depth = 2", DataError, rf"{place}, \[scales\.demo\]: .*'depth'; correct the sizes"),
        ("layers = 2", "", DataError, rf"{place}, \[scales\.demo\]: .*'layers'; correct the sizes"),
        ("layers = 2", "layers = 0", SettingError, "LogicScale.layers is 0; expected"),
    ):
        place.write_text(LOGIC.replace(old, new, 1), encoding="utf-8")
        read_task_file.cache_clear()
        try:
            type("Wrong", (ClassifierTask,), {}, settings=place)
            read_presets(place, LogicScale)
        except kind as error:
            missed += [] if re.search(message, str(error)) else [str(error)]
        else:
            missed.append(new)
    assert not missed
