from __future__ import annotations

import pytest
import torch
from torch import nn

from cases import cases
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
    assert model.attention.in_proj_weight is not None
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
