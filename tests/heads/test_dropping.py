"""DropHead on models already built: what W_O gets, schedules, generators, checkpoints and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import headwise as hw
from cases import cases
from headwise.errors import NotFired, SettingError

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
