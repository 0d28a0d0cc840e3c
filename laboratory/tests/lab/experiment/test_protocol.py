from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from headwise.errors import SettingError
from headwise.nn.multihead import MultiheadAttention
from headwise_lab.experiment.seeding import derive_key, initialize_parameters


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


def shared(one: nn.Module, other: nn.Module) -> list[str]:
    names = dict(other.named_parameters())
    return [name for name, value in one.named_parameters() if name in names and names[name].shape == value.shape]


@pytest.mark.parametrize(("attention", "settings"), ATTENTIONS)
def test_parameters_shared_between_arms_start_bit_equal_though_an_output_projection_was_replaced(attention, settings):
    plain, routed = Encoder(attention, **settings), Encoder(attention, **settings)
    routed.attention.out_proj = Aggregator()
    initialize_parameters(plain, seed=3)
    torch.rand(17)
    initialize_parameters(routed, seed=3)
    names = shared(plain, routed)
    assert {"embedding.weight", "norm.weight", "out.weight", "out.bias"} <= set(names)
    assert any(name.startswith("attention.") for name in names)
    for name in names:
        assert torch.equal(plain.get_parameter(name), routed.get_parameter(name)), name


@pytest.mark.parametrize(("attention", "settings"), ATTENTIONS)
def test_every_parameter_is_drawn_anew_and_depends_on_the_seed_and_on_nothing_else(attention, settings):
    one, other, third = (Encoder(attention, **settings) for _ in range(3))
    for model in (one, other, third):
        for parameter in model.parameters():
            nn.init.constant_(parameter, 7.0)
    initialize_parameters(one, seed=1)
    initialize_parameters(other, seed=1)
    initialize_parameters(third, seed=2)
    for name, value in one.named_parameters():
        assert not (value == 7.0).any(), name
        assert torch.equal(value, other.get_parameter(name)), name
    assert not torch.equal(one.embedding.weight, third.embedding.weight)
    assert not torch.equal(one.out.weight, third.out.weight)


def test_attention_starts_as_torch_starts_it():
    model = Encoder()
    initialize_parameters(model, seed=5)
    bound = (6 / (8 + 24)) ** 0.5
    assert model.attention.in_proj_weight is not None
    assert 0.9 * bound < model.attention.in_proj_weight.abs().max() <= bound
    assert (model.attention.in_proj_bias == 0).all()
    assert (model.attention.out_proj.bias == 0).all()
    assert (model.attention.out_proj.weight != 0).all()


def test_equal_modules_under_different_names_start_differently():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    initialize_parameters(model, seed=0)
    assert not torch.equal(model[0].weight, model[1].weight)


def test_a_module_starts_as_torch_would_start_it_under_the_seed_of_its_name():
    model = Encoder()
    initialize_parameters(model, seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(derive_key(3, "out"))
        assert torch.equal(model.out.weight, nn.Linear(8, 3).weight)


def test_the_global_generator_is_left_as_it_was():
    model = Encoder()
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    initialize_parameters(model, seed=1)
    assert torch.equal(torch.rand(3), expected)


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


def test_keys_are_63_bits_and_the_same_in_every_process():
    keys = {derive_key(seed, name) for seed in range(50) for name in ("data", "noise", "dropout")}
    assert len(keys) == 150
    assert all(0 <= value < 2**63 for value in keys)
    assert max(keys) > 2**62
    assert derive_key(3, "data") == 3671545289025277455
    code = "from headwise_lab.experiment.seeding import derive_key; print(derive_key(3, 'data'))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(answer.stdout) == derive_key(3, "data")


def test_keys_tell_apart_order_type_and_where_one_part_ends():
    parts = [(1, "a"), ("a", 1), ("1", "a"), ("1a",), ("1", "", "a")]
    assert len({derive_key(*some) for some in parts}) == 5
