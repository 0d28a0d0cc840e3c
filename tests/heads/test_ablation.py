"""Removing or dropping a head zeroes its slice of what W_O gets and nothing else."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import headwise as hw
from cases import cases
from heads.attentions import LinearAttention, SeparateAttention
from headwise.errors import NotFired, SettingError


@cases(
    "given",
    [([1, 3],), ((3, 1),), (range(1, 4, 2),), ({1, 3},), (torch.tensor([1, 3]),), (1, [3]), (torch.tensor(1), 3)],
)
def test_heads_are_given_one_by_one_or_in_a_list_and_hold_for_every_site(given: tuple):
    model = nn.Sequential(SeparateAttention(), SeparateAttention())
    heads, x = hw.find_heads(model), torch.randn(2, 6, 12)
    with hw.ablate(heads, 1, 3):
        expected = model(x)
    with hw.ablate(heads, *given) as ablation, hw.Taps(heads, outputs=True) as taps:
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
        for capture in taps.read():
            assert [bool((capture.outputs[:, :, head] == 0).all()) for head in range(4)] == [False, True, False, True]
    assert sorted(ablation.indices) == [1, 3]
    with hw.ablate(heads.where("1"), *given):
        assert not torch.allclose(model(x), expected)


def test_importance_is_the_drop_of_the_users_score_for_every_head():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    with torch.no_grad():
        model.layers[1].self_attn.out_proj.weight[:, 4:] = 0.0
    x = torch.randn(3, 5, 8)
    result = hw.importance(hw.find_heads(model), lambda: float(model(x)[..., 0].square().mean()))
    drops = result.drops["layers.1.self_attn"]
    assert drops[1] == pytest.approx(0.0, abs=1e-6)
    assert abs(float(drops[0])) > 1e-4
    assert model(x)[..., 0].square().mean().item() == pytest.approx(result.baseline)
    assert "drop without each head" in str(result)


def test_wrong_heads_and_scores_that_do_not_run_the_model_are_refused():
    heads = hw.find_heads(SeparateAttention())
    for nothing in ((), ([],), (torch.tensor([]),)):
        with pytest.raises(hw.errors.SettingError, match="given no head"):
            hw.ablate(heads, *nothing)
    for given, told in (
        (4, "4"),
        ([0, 4], "4"),
        ([-1], "-1"),
        ([0.0], r"0\.0"),
        ("0", "'0'"),
        ([[0]], r"\[0\]"),
        (torch.ones(4) > 0, "True"),
    ):
        expected = f"head of the model is {told}; expected an integer of .* at most 3"
        with pytest.raises(hw.errors.SettingError, match=expected):
            hw.ablate(heads, given)
    with pytest.raises(hw.errors.NotFired, match="no forward pass"):
        hw.importance(heads, lambda: 1.0)
    with pytest.raises(hw.errors.NotFired, match="no forward pass"), hw.ablate(heads, 0):
        pass
    without = LinearAttention()
    del without.o_proj
    with pytest.raises(hw.errors.LayoutError, match="no output projection was found"):
        hw.ablate(hw.find_heads(without), 0)


def test_a_refusal_leaves_the_model_as_it_was():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    heads = hw.find_heads(model)
    x = torch.randn(2, 3, 8)
    before = model(x)
    blind = dataclasses.replace(heads.sites[1], output_projection=None, output=None)
    with pytest.raises(hw.errors.LayoutError, match="no output projection"):
        hw.ablate(dataclasses.replace(heads, sites=(heads.sites[0], blind)), 1)
    torch.testing.assert_close(model(x), before)


def test_heads_before_an_output_projection_of_two_attentions_are_left_alone():
    model = nn.Sequential(SeparateAttention(), SeparateAttention())
    model[1].o_proj = model[0].o_proj
    heads, x = hw.find_heads(model), torch.randn(2, 6, 12)
    told = r"^1 calls the same output projection as another attention.*of its own"
    for attach in (
        lambda: hw.ablate(heads.layer(1), 2),
        lambda: hw.drop_heads(heads.layer(1), 0.3),
        lambda: hw.importance(heads.layer(1), lambda: model(x).std()),
        lambda: hw.importance(heads.layer(1), lambda: model(x).std((1, 2)), method="first_order"),
    ):
        with pytest.raises(hw.errors.LayoutError, match=told):
            attach()
    assert not model[0].o_proj._forward_pre_hooks


HEADS, SIZE = 4, 2


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(HEADS * SIZE, HEADS, 16, dropout=0.0, batch_first=True)


def gpt2() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"n_embd": HEADS * SIZE, "n_head": HEADS, "n_layer": 1}
    return GPT2Model(GPT2Config(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **sizes))


def llama() -> nn.Module:
    torch.manual_seed(2)
    sizes = {"hidden_size": HEADS * SIZE, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 20}
    return LlamaModel(LlamaConfig(num_attention_heads=HEADS, num_key_value_heads=2, head_dim=SIZE, **sizes))


def run(model: nn.Module, examples: int = 5) -> Tensor:
    torch.manual_seed(7)
    x = torch.randn(examples, 6, HEADS * SIZE)
    return model(x) if isinstance(model, nn.TransformerEncoderLayer) else model(inputs_embeds=x).last_hidden_state


def watch(model: nn.Module) -> list[Tensor]:
    """What W_O gets in each call, as heads [B, L, H, e]."""
    seen: list[Tensor] = []
    projection = hw.find_heads(model).sites[0].expose().module
    projection.register_forward_pre_hook(lambda _module, given: seen.append(given[0].unflatten(-1, (HEADS, SIZE))))
    return seen


@cases("build", [encoder, gpt2, llama])
def test_what_w_o_gets_is_that_of_a_loop_over_examples_and_heads(build: Callable[[], nn.Module]):
    model = build().train()
    before = watch(model)
    dropping = hw.drop_heads(hw.find_heads(model), 0.6, seed=3)
    after = watch(model)
    run(model, examples=40)
    draws = torch.rand(40, HEADS, generator=torch.Generator().manual_seed(3)).tolist()
    whole = 0
    for example, own in enumerate(draws):
        kept = [head for head in range(HEADS) if own[head] >= 0.6]
        whole += not kept
        kept = kept or list(range(HEADS))
        for head in range(HEADS):
            wanted = before[0][example, :, head] * (HEADS / len(kept) if head in kept else 0.0)
            torch.testing.assert_close(after[0][example, :, head], wanted)
    assert 0 < whole < 20
    model.eval()
    run(model)
    assert torch.equal(before[1], after[1])
    dropping.remove()
    model.train()
    run(model)
    assert torch.equal(before[2], after[2])


def test_the_rate_is_set_between_steps_and_0_drops_nothing():
    model = encoder().train()
    whole = run(model)
    dropping = hw.drop_heads(hw.find_heads(model), 0.5, seed=1)
    assert not torch.equal(run(model), whole)
    dropping.rate = 0.0
    assert torch.equal(run(model), whole)
    with pytest.raises(SettingError, match=r"rate is 1\.0"):
        dropping.rate = 1.0


def test_a_seed_is_a_generator_of_its_own_and_none_is_torchs():
    model = encoder().train()
    with hw.drop_heads(hw.find_heads(model), 0.5, seed=1) as dropping:
        state = dropping.generator.get_state()
        first = run(model)
        after = torch.get_rng_state()
        dropping.generator.set_state(state)
        assert torch.equal(run(model), first)
    x = torch.randn(8, 6, HEADS * SIZE)
    with hw.drop_heads(hw.find_heads(model), 0.5, seed=1):
        expected = model(x)
    with torch.device("meta"), hw.drop_heads(hw.find_heads(model), 0.5, seed=1):
        assert torch.equal(model(x), expected)
    with hw.drop_heads(hw.find_heads(model), 0.5):
        assert torch.equal(run(model), run(model))  # run sets torch's seed
        assert not torch.equal(torch.get_rng_state(), after)


def test_checkpoints_drop_the_same_heads_again_and_a_generator_of_its_own_is_refused():
    model = encoder().train()
    gradients = []
    with hw.drop_heads(hw.find_heads(model), 0.5):
        for call in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
            torch.manual_seed(5)
            model.zero_grad()
            call(torch.randn(8, 6, HEADS * SIZE)).square().mean().backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)
    hw.drop_heads(hw.find_heads(model), 0.5, seed=0)
    with pytest.raises(NotFired, match="leave seed out"):
        checkpoint(model, torch.randn(2, 6, HEADS * SIZE), use_reentrant=False)


def test_a_copy_drops_nothing_and_gradients_of_dropped_heads_are_0():
    model = encoder().train()
    whole = run(model)
    dropping = hw.drop_heads(hw.find_heads(model), 0.5, seed=2)
    assert torch.equal(run(copy.deepcopy(model)), whole)
    assert str(dropping) == "HeadDropping(0.5 of the heads of 1 attentions)"
    model.self_attn.out_proj.weight.grad = None
    run(model, examples=1).square().sum().backward()
    columns = model.self_attn.out_proj.weight.grad.unflatten(1, (HEADS, SIZE)).abs().sum((0, 2))
    kept = torch.rand(1, HEADS, generator=torch.Generator().manual_seed(2))[0] >= 0.5
    assert 0 < kept.sum() < HEADS
    assert torch.equal(columns > 0, kept)


def test_what_would_drop_nothing_or_otherwise_is_refused():
    model = encoder()
    heads = hw.find_heads(model)
    with pytest.raises(SettingError, match=r"rate is -0\.1"):
        hw.drop_heads(heads, -0.1)
    with pytest.raises(SettingError, match=r"seed is 0\.5"):
        hw.drop_heads(heads, 0.1, seed=0.5)
    with pytest.raises(SettingError, match="heads"):
        hw.drop_heads(model, 0.1)
    hw.drop_heads(heads, 0.5, seed=0)
    model.self_attn.out_proj = nn.Linear(HEADS * SIZE, HEADS * SIZE)
    model.eval()(torch.randn(2, 3, HEADS * SIZE))
    with pytest.raises(NotFired, match=r"set after hw\.drop_heads"):
        model.train()(torch.randn(2, 3, HEADS * SIZE))
