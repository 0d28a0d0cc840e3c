"""Layers are calibrated in turn: with the numbers of whole forwards, and in as many forwards whatever the depth."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

import headwise as hw
from heads.families import FAMILIES, sweep
from heads.family import Family
from headwise.shrinking import proof
from headwise.shrinking.layerwise import OutOfStep, Progress, Resumable, Steps
from shrinking.cutting import named

# the package has a function of this name
MERGE = importlib.import_module("headwise.shrinking.merge")


def build(layers: int) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaModel(LlamaConfig(vocab_size=11, num_hidden_layers=layers, **sizes)).eval()


def refuse(*_: object) -> None:
    raise OutOfStep


@sweep(named(FAMILIES, "BERT with cross-attention", "BART", "Marian", "Qwen3", "GPT-OSS"), quick=("BART", "Qwen3"))
def test_steps_give_the_weights_that_whole_forwards_give(family: Family, monkeypatch: pytest.MonkeyPatch):
    batches = [family.inputs(), family.inputs(padded=True)]
    stepped, whole = family.build(), family.build()
    whole.load_state_dict(stepped.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(MERGE, "Passes", refuse)
        hw.merge(hw.find_heads(stepped), 1, batches=batches)
    with monkeypatch.context() as patch:
        patch.setattr(MERGE, "Steps", refuse)
        hw.merge(hw.find_heads(whole), 1, batches=batches)
    state = whole.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in stepped.state_dict().items())


def test_a_layer_is_computed_as_often_in_a_deep_model_and_no_more_states_are_kept():
    computed, kept = [], []
    for layers in (3, 7):
        model, calls = build(layers), []
        model.layers[1].mlp.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with Resumable(model) as forwards, torch.no_grad():
            course = Steps(hw.find_heads(model), [(torch.arange(10)[None],)] * 2, forwards)
            for site, _ in course:
                course.walk(site, lambda: None)
            held = [leaf for one in course.now[0].returned for leaf in one.leaves if isinstance(leaf, Tensor)]
        computed.append(len(calls))
        kept.append(sum(leaf.numel() for leaf in held))
        assert len(course.now[0].returned) > layers
    # once to see the order, and twice in each of two batches
    assert computed == [5, 5]
    assert kept[0] == kept[1]


def test_what_is_free_is_found_on_a_few_tokens_and_on_the_batch_where_these_are_too_few(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[int] = []
    find = MERGE.find_freedoms

    def note(sites: Any, batch: Any) -> Any:
        seen.append(next(iter(batch.values() if isinstance(batch, dict) else batch)).shape[-1])
        return find(sites, batch)

    monkeypatch.setattr(MERGE, "find_freedoms", note)
    given = (torch.arange(200)[None] % 11,)
    merged = hw.merge(hw.find_heads(build(2)), 2, batches=[given])
    assert seen == [5]
    # two tokens do not show positions
    monkeypatch.setattr(MERGE, "find_dummy", lambda _: {"input_ids": torch.tensor([[1, 2]])})
    assert hw.merge(hw.find_heads(build(2)), 2, batches=[given]).free == merged.free
    assert seen == [5, 2, 200]


def test_outputs_are_compared_part_by_part_and_what_is_not_a_number_differs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proof, "PART", 4)
    model, inputs = nn.Identity(), (torch.arange(10.0),)
    inputs[0][3] = float("inf")
    expected = proof.Expected([inputs[0].clone()], torch.float32, inputs)
    proof.require_equal(model, expected, proof.PRUNED)
    for place, value in ((0, 1.0), (9, 8.0), (5, float("nan")), (3, 3.0)):
        wrong = inputs[0].clone()
        wrong[place] = value
        with pytest.raises(hw.errors.LayoutError, match="outputs of up to 9 are"):
            proof.require_equal(model, proof.Expected(expected.outputs, torch.float32, (wrong,)), proof.PRUNED)


def test_what_went_into_a_module_and_is_read_by_something_else_too_is_noticed():
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.first, self.second = build(2), nn.Identity(), nn.Linear(16, 16)

        def forward(self, ids: Tensor) -> Tensor:
            start = self.first(self.inner.embed_tokens(ids) + 0.0)
            # read outside of modules, and by one
            state = start + self.second(start)
            del start
            return self.inner(inputs_embeds=state).last_hidden_state

    model = Skipping().eval()
    ids = (torch.arange(10)[None],)
    with Resumable(model) as forwards, torch.no_grad():
        course = Steps(hw.find_heads(model), [ids], forwards)
        with pytest.raises(OutOfStep):
            list(course)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = hw.merge(hw.find_heads(model), 2, batches=[ids])
    assert 0 < float(found.steps[-1].error or 0) < 1
    assert not torch.equal(
        model.inner.layers[0].self_attn.o_proj.weight, before["inner.layers.0.self_attn.o_proj.weight"]
    )


def test_a_model_that_writes_into_what_a_module_returned_goes_on_from_what_it_was():
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, given: Tensor) -> Tensor:
            state = self.first(given)
            state += 1.0
            return self.second(state)

    model, seen = Writing(), []
    model.second.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    progress = Progress((torch.ones(2, 3),))
    with Resumable(model) as forwards, torch.no_grad():
        for _ in range(3):
            forwards.advance(progress, model.second, model.second)
    assert len(seen) == 3
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    assert "forward" not in vars(model.first)
    with pytest.raises(OutOfStep), Resumable(model) as forwards:
        forwards.advance(progress, None, nn.Linear(1, 1))
