"""A model without heads and neurons computes what it does with them zeroed, in every family that is not refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headwise as hw
from cases import cases
from heads.families import FAMILIES, sweep
from heads.family import Family
from headwise.shrinking import Mix
from headwise.shrinking.neurons import zeroed
from shrinking.cutting import apart, compute, compute_in_float64, lift, named

# the package has the function under the name of its module
module = sys.modules[Mix.__module__]

REFUSED = {
    "BitNet": "layers.0 .BitNetDecoderLayer. has no MLP that is understood",
    "Kosmos-2": "text_model.model.layers.0 .Kosmos2TextBlock. has no MLP that is understood",
    "MiMo-V2-Flash": "layers.1.mlp.experts .MiMoV2FlashExperts. holds experts",
    "GPT-OSS": "layers.0.mlp.experts .GptOssExperts. holds experts",
    "CodeGen": "holds its heads in 4 parts of 2",
    "NeoMME": "is given value embeddings of each head",
    "Bloom": "is given ALiBi slopes of each head",
    "MPT": "is given position biases of each head",
    "WavLM": "hands its weights to torch's function",
}
SINGLE = ("XGLM", "CANINE")
SHRUNK = [family for family in FAMILIES if family.name not in REFUSED]


def plan_of(model: torch.nn.Module, inputs: dict[str, Tensor], **settings) -> hw.shrinking.ShrinkPlan:
    def losses() -> Iterator[Tensor]:
        # windows of an image are rows of their own, so that items come one by one
        for place in range(len(next(iter(inputs.values())))):
            found = model(**{name: tensor[place : place + 1] for name, tensor in inputs.items()})
            found = next(iter(found.values())) if hasattr(found, "items") else found
            yield found.square().flatten(1).mean(1)

    return hw.shrink(hw.find_heads(model), losses, **{"params": 0.7, "inputs": inputs, **settings})


@sweep(SHRUNK)
def test_what_is_cut_is_what_was_zeroed(family: Family, monkeypatch: pytest.MonkeyPatch):
    model, inputs = family.build(), family.inputs()
    tolerance = 1e-5
    if family.name not in SINGLE:
        inputs, tolerance = lift(model, inputs), 1e-12
        compute_in_float64(monkeypatch)
    plan = plan_of(model, inputs)
    mix = next(mix for mix in plan.mixes if mix.removed and any(mix.gone.values()))
    object.__setattr__(plan, "chosen", mix)
    with zeroed(mix.removed, mix.gone):
        expected = compute(model, inputs)
    whole, before = compute(model, inputs), sum(parameter.numel() for parameter in model.parameters())
    pruning = plan.apply()
    found = compute(model, inputs)
    assert apart(expected, found) <= tolerance
    assert apart(whole, found) > 1e-4
    assert pruning.parameters == (before, sum(parameter.numel() for parameter in model.parameters()))
    assert pruning.parameters[1] < before
    assert mix.parameters <= 0.7


@sweep(named(FAMILIES, "Llama", "Phi-3", "T5", "GPT-2", "BERT"), quick=("Phi-3", "GPT-2"))
def test_a_smaller_model_is_loaded_as_it_was_saved(family: Family, tmp_path: Path):
    model, inputs = family.build(), family.inputs()
    plan = plan_of(model, inputs)
    pruning = plan.apply()
    # where a configuration says it, every layer has the same counts and transformers loads it alone
    assert (pruning.stock is None) == (family.name in ("Llama", "Phi-3", "T5"))
    assert all(mix.even for mix in plan.mixes) == (pruning.stock is None)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path) if pruning.stock is None else hw.load(tmp_path)
    assert apart(compute(model, inputs), compute(again.eval(), inputs)) == 0.0


def test_a_neuron_is_worth_its_activation_times_its_gradient():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, activation="gelu").eval()
    x, y = torch.randn(2, 3, 5, 8)

    def losses() -> Tensor:
        return (layer(x) - y).square().mean((1, 2))

    plan = hw.shrink(hw.find_heads(layer), losses, params=0.7)
    hidden: list[Tensor] = []
    hook = layer.linear2.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    (gradient,) = torch.autograd.grad(losses().sum(), hidden)
    hook.remove()
    expected = (hidden[0] * gradient).sum(1).abs().mean(0)
    (name,) = plan.neurons or ["linear2"]
    torch.testing.assert_close(plan.importance[name].float(), expected)
    # and heads as hw.importance has them
    drops = hw.importance(hw.find_heads(layer), losses, method="first_order").drops
    torch.testing.assert_close(plan.importance["self_attn"], drops["self_attn"])
    (mlp,) = plan.chosen.gone
    gone = plan.chosen.gone[mlp]
    assert set(gone) == set(expected.argsort()[: len(gone)].tolist())


@cases("tokens", [4, 5, 8])
def test_neurons_of_items_are_told_apart_whichever_axis_items_are(tokens: int):
    x, y = torch.randn(2, 4, tokens, 8)

    def weigh(*, batch_first: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = torch.nn.TransformerEncoderLayer(8, 2, 12, batch_first=batch_first).eval()

        def losses() -> Tensor:
            found = model(x) if batch_first else model(x.transpose(0, 1)).transpose(0, 1)
            return (found - y).square().mean((1, 2))

        return hw.shrink(hw.find_heads(model), losses, params=0.7).importance

    torch.testing.assert_close(weigh(batch_first=False), weigh(batch_first=True))


class Normed(torch.nn.Module):
    """A layer whose MLP may mix its neurons."""

    def __init__(self, between: torch.nn.Module):
        super().__init__()
        self.self_attn = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.between, self.down = torch.nn.Linear(8, 16), between, torch.nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x, x, x)[0]
        return x + self.down(self.between(self.up(x)))


@cases("between", [torch.nn.LayerNorm(16), torch.nn.Softmax(-1)])
def test_neurons_that_depend_on_one_another_are_refused(between: torch.nn.Module):
    model = Normed(between).eval()
    x = torch.randn(3, 5, 8)
    with pytest.raises(hw.errors.LayoutError, match="has no MLP that is understood"):
        hw.shrink(hw.find_heads(model), lambda: model(x).square().mean((1, 2)), params=0.8)


def test_of_linear_maps_in_a_row_no_map_belongs_to_two_mlps():
    model = Normed(torch.nn.Linear(16, 16)).eval()
    x = torch.randn(3, 5, 8)
    (mlp,) = hw.shrink(hw.find_heads(model), lambda: model(x).square().mean((1, 2)), params=0.8).chosen.gone
    assert [part.name for part in (*mlp.up, mlp.down)] == ["up", "between"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "expected either params"),
        ({"params": 0.5, "time": 0.5}, "expected either params"),
        ({"params": 1.5}, "params is 1.5; expected"),
        ({"params": 0.01}, "no mix of heads and neurons leaves 1%"),
    ],
)
def test_a_size_that_cannot_be_is_refused(settings: dict[str, float], reason: str):
    model = Normed(torch.nn.GELU()).eval()
    x = torch.randn(3, 5, 8)
    with pytest.raises(hw.errors.SettingError, match=reason):
        hw.shrink(hw.find_heads(model), lambda: model(x).square().mean((1, 2)), **settings)


def test_a_share_of_the_time_is_measured_and_training_goes_on(monkeypatch: pytest.MonkeyPatch):
    measure = module._milliseconds

    def steady(heads: hw.Heads, inputs: object, mixes: list[Mix]) -> list[float]:
        assert all(one > 0 for one in measure(heads, inputs, mixes))
        return [10 * mix.parameters for mix in mixes]

    monkeypatch.setattr(module, "_milliseconds", steady)
    model = Normed(torch.nn.GELU()).eval()
    x = torch.randn(3, 5, 8)
    plan = hw.shrink(hw.find_heads(model), lambda: model(x).square().mean((1, 2)), time=0.8, uniform=True)
    assert plan.whole.milliseconds == 10
    assert all((mix.milliseconds or 99) <= 8 for mix in plan.mixes)
    assert "<- the plan" in str(plan)
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).square().mean().backward()
    optimizer.step()
    plan.apply(optimizer)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in model.parameters())


@cases("family", named(FAMILIES, *REFUSED))
def test_what_is_not_understood_is_refused_and_left_as_it_was(family: Family):
    model, inputs = family.build(), family.inputs()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(hw.errors.LayoutError, match=REFUSED[family.name]):
        plan_of(model, inputs)
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
