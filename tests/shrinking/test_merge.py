"""Key and value heads become fewer: exactly where they are copies, with little loss where they are not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BartConfig, BartModel

import headwise as hw
from cases import cases
from headwise.shrinking.alignment import KeyFreedom
from headwise.shrinking.layerwise import Passes, Resumable, Steps
from shrinking.cutting import apart, compute_in_float64
from shrinking.planted import GROUPS, HEADS, KINDS, SIZE, build, draw, plant, tokens

SIZES = {"layers": 1, "attention_heads": 3, "ffn_dim": 8}
FREE = {kind: KeyFreedom(SIZE, kind="signs" if kind == "Qwen3" else "general") for kind in KINDS}


@torch.no_grad()
def logits(model: Any, seed: int = 9) -> torch.Tensor:
    return model(tokens(seed)).logits


@cases("kind", KINDS)
def test_planted_grouped_queries_are_recovered_whatever_their_heads_were_turned_and_shuffled_by(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    planted = build(kind).double()
    whole = plant(planted, kind, key=FREE[kind], value=KeyFreedom(0), shuffled=True)
    compute_in_float64(monkeypatch)
    wanted = logits(planted)
    assert apart([wanted], [logits(whole)]) < 1e-12
    naive = copy.deepcopy(whole)
    merging = hw.merge(hw.find_heads(whole), GROUPS, batches=[tokens(0), tokens(1)])
    assert apart([wanted], [logits(whole)]) < 1e-8
    assert merging.heads == {f"model.layers.{layer}.self_attn": (HEADS, GROUPS) for layer in range(2)}
    assert merging.groups["model.layers.0.self_attn"] == ((0, 2, 5, 6), (1, 3, 4, 7))
    assert float(merging.steps[-1].error or 0) < 1e-12
    hw.merge(hw.find_heads(naive), GROUPS, batches=[tokens(0)], alignment="none", grouping="similarity", refit=False)
    assert apart([wanted], [logits(naive)]) > 0.5


@cases(("kind", "exact"), [("rigid", True), ("general", False)])
def test_rotations_bring_turned_heads_together_and_not_stretched_ones(
    kind: Any, exact: bool, monkeypatch: pytest.MonkeyPatch
):
    planted = build("Llama").double()
    whole = plant(planted, "Llama", key=KeyFreedom(SIZE, kind=kind), value=KeyFreedom(0, kind=kind))
    compute_in_float64(monkeypatch)
    hw.merge(hw.find_heads(whole), GROUPS, batches=[tokens(0)], alignment="orthogonal", grouping="order", refit=False)
    assert (apart([logits(planted)], [logits(whole)]) < 1e-8) is exact


def test_weights_alone_recover_planted_heads_too(monkeypatch: pytest.MonkeyPatch):
    planted = build("Qwen2").double()
    whole = plant(planted, "Qwen2", key=FREE["Qwen2"], value=KeyFreedom(0), shuffled=True)
    compute_in_float64(monkeypatch)
    merging = hw.merge(hw.find_heads(whole), GROUPS)
    assert apart([logits(planted)], [logits(whole)]) < 1e-8
    assert [step.error for step in merging.steps] == [None, None]


def test_identical_heads_of_grouped_queries_become_fewer_groups_without_loss(monkeypatch: pytest.MonkeyPatch):
    model = build("Llama", 4).double()
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                heads = projection.weight.unflatten(0, (4, SIZE))
                heads[[3, 1]] = heads[[0, 2]].clone()
    compute_in_float64(monkeypatch)
    wanted = logits(model)
    merging = hw.merge(hw.find_heads(model), 2, batches=[tokens(0)])
    assert merging.groups["model.layers.1.self_attn"] == ((0, 3), (1, 2))
    assert apart([wanted], [logits(model)]) < 1e-10
    # one head for all keeps another function
    hw.merge(hw.find_heads(model), 1, batches=[tokens(0)])
    assert apart([wanted], [logits(model)]) > 1e-2
    assert hw.find_heads(model).sites[0].key_value_heads == 1


def test_padding_does_not_count():
    short, long = tokens(0, length=15), tokens(0, length=24)
    keep = torch.ones_like(long)
    keep[:, 15:] = 0
    long[:, :15] = short
    found = []
    for batch in ({"input_ids": short}, {"input_ids": long, "attention_mask": keep}):
        model = build("Llama", HEADS)
        hw.merge(hw.find_heads(model), 2, batches=[batch])
        found.append(logits(model))
    assert apart(found[:1], found[1:]) < 1e-4
    model = build("Llama", HEADS)
    hw.merge(hw.find_heads(model), 2, batches=[{"input_ids": long}])
    assert apart(found[:1], [logits(model)]) > 1e-2


def test_each_step_is_told_and_the_refit_after_plain_averaging_is_one_of_them():
    model = plant(build("Llama"), "Llama", key=FREE["Llama"], value=KeyFreedom(0), shuffled=True)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.add_(draw(*parameter.shape), alpha=0.02)
    batch = tokens(0, batch=8)

    def score() -> float:
        with torch.no_grad():
            return -float(model(batch, labels=batch).loss)

    before = score()
    merging = hw.merge(hw.find_heads(model), 2, batches=[batch], score=score)
    assert [step.way for step in merging.steps] == [
        "whole model",
        "averaged as they are, neighbors",
        "averaged as they are, neighbors, W_O refitted",
        "aligned and averaged, neighbors",
        "closed form, neighbors",
        "closed form, groups of similar heads",
        "closed form, groups of similar heads, W_O refitted",
    ]
    errors = [float(step.error or 0) for step in merging.steps]
    assert errors[0] == 0
    assert errors[6] < errors[5] < 0.5 * errors[4]
    assert errors[4] < errors[1]
    assert errors[6] < 0.5 * errors[2] < 0.5 * errors[1]
    assert merging.steps[0].score == before
    assert merging.steps[-1].score == pytest.approx(score(), abs=1e-6)
    printed = str(merging)
    assert "averaged as they are, neighbors, W_O refitted" in printed
    assert "256 of 1,024 bytes of cache per token" in printed
    assert f"{before:.4f}" in printed


def test_the_cache_holds_as_many_bytes_as_there_are_heads():
    model = build("Qwen3", HEADS)

    def count() -> int:
        with torch.no_grad():
            _, cache = model(tokens(0), use_cache=True, return_dict=False)
        return sum(one.nbytes for layer in cache.layers for one in (layer.keys, layer.values))

    before = count()
    merging = hw.merge(hw.find_heads(model), 2, batches=[tokens(0)])
    after = count()
    assert (before, after) == tuple(4 * 24 * size for size in merging.cache)
    assert after * HEADS == before * 2


def test_training_goes_on_and_the_state_of_rewritten_weights_begins_anew():
    model = build("Llama", HEADS).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(tokens(0), labels=tokens(0)).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    step()
    hw.merge(hw.find_heads(model), 2, batches=[tokens(0)], optimizer=optimizer)
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight not in optimizer.state
    assert attention.o_proj.weight.grad is None
    assert optimizer.state[model.model.layers[0].mlp.up_proj.weight]["step"] == 1
    assert step() > step()
    assert optimizer.state[attention.k_proj.weight]["exp_avg"].shape == (2 * SIZE, 32)
    assert model.training


def test_a_model_that_cannot_be_merged_is_as_it_was():
    model = build("Llama", HEADS)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    # counts on the features it was built with
    model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda _m, _i, output: output.view(4, 24, 64))
    with pytest.raises(
        hw.errors.LayoutError, match=r"cannot run with these heads merged .* The model is as it was; leave"
    ):
        hw.merge(hw.find_heads(model), 2, batches=[tokens(0)])
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert model.config.num_key_value_heads == HEADS
    assert model.model.layers[0].self_attn.num_key_value_groups == 1
    model.model.layers[1].self_attn.k_proj._forward_hooks.clear()

    def fail() -> float:
        if not torch.equal(
            model.model.layers[0].self_attn.k_proj.weight, state["model.layers.0.self_attn.k_proj.weight"]
        ):
            raise RuntimeError("no score")
        return 0.0

    with pytest.raises(RuntimeError, match="no score"):
        hw.merge(hw.find_heads(model), 2, batches=[tokens(0)], score=fail)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@cases("tied", ["weight", "module", "numbers"])
@cases("name", ["q_proj", "v_proj", "o_proj"])
def test_weights_that_an_attention_left_out_has_too_are_refused_and_left_as_they_are(name: str, tied: str):
    model = build("Llama", HEADS)
    first, second = (getattr(layer.self_attn, name) for layer in model.model.layers)
    if tied == "module":
        setattr(model.model.layers[1].self_attn, name, first)
    else:
        second.weight = first.weight if tied == "weight" else nn.Parameter(first.weight.data)
    before = logits(model)
    rest = hw.find_heads(model, exclude=("model.layers.0.self_attn",))
    shown = rf"layers\.1\.self_attn\.{name}\.weight is model\.layers\.0\.self_attn\.{name}\.weight too"
    with pytest.raises(hw.errors.LayoutError, match=shown):
        hw.merge(rest, 2, batches=[tokens(0)])
    assert torch.equal(logits(model), before)


def test_what_cross_attention_gives_is_read_without_the_padding_of_its_queries_and_not_that_of_its_keys():
    config = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in SIZES.items()}
    model = BartModel(BartConfig(vocab_size=20, d_model=12, **config)).eval()
    source, target = torch.ones(2, 2, 5, dtype=torch.long)
    source[0, 3:], target[1, 4:] = 0, 0
    ids = torch.randint(4, 20, (2, 5))
    batch = {"input_ids": ids, "attention_mask": source, "decoder_input_ids": ids, "decoder_attention_mask": target}
    heads = hw.find_heads(model)
    with Resumable(model) as forwards:
        wanted = dict(Steps(heads, [batch], forwards))
    assert [site.kind for site in wanted] == ["self", "decoder", "cross"]
    assert [*wanted] == [*Passes(heads, [batch]).wanted]
    counts = {site.kind: [len(rows) for rows in own.calls] for site, own in wanted.items()}
    assert counts == {"self": [8], "decoder": [9], "cross": [9]}
