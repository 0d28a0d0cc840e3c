"""What is attached to a model acts on that model alone, whatever was attached before, and says so where it cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.attentions import SeparateAttention
from heads.families import BY_NAME, bed
from heads.forwards import copies, results, slanted
from headwise.nn.hooks import Handle

ATTACH: dict[str, Callable[[hw.Heads], Handle]] = {
    "taps": lambda heads: hw.Taps(heads, outputs=True),
    "penalty": lambda heads: hw.Disagreement(heads, hw.similarity.Output()),
    # a function that cannot be pickled
    "bias": lambda heads: hw.bias_heads(heads, lambda _site, call: torch.arange(1.0 * call.keys).view(1, 1, 1, -1)),
    "ablation": lambda heads: hw.ablate(heads, 1),
}
NOT_ATTACHED = "attached to no model: .* they are a copy or were unpickled"


class ByName(SeparateAttention):
    """An attention that names the argument of its output projection."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(input=self.join(nn.functional.scaled_dot_product_attention(q, k, v)))


class Penalized(nn.Module):
    """A module that holds a penalty on a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = BY_NAME["BERT"].build()
        self.penalty = hw.Disagreement(hw.find_heads(self.inner), hw.similarity.Output() + hw.similarity.Position())

    def forward(self) -> Tensor:
        self.inner(**BY_NAME["BERT"].inputs())
        return self.penalty()


def replica(module: nn.Module) -> nn.Module:
    """What nn.DataParallel makes of a module for a device, with the original's parameters."""
    made = {inner: inner._replicate_for_data_parallel() for inner in module.modules()}
    for inner, other in made.items():
        other._modules = {name: made.get(child) for name, child in inner._modules.items()}
        other._parameters = dict(inner._parameters)
    return made[module]


def test_a_projection_called_by_name_is_read_and_ablated_whichever_was_attached_first():
    model, x = ByName(), torch.randn(2, 6, 12)
    heads = hw.find_heads(model)
    tapped = [hw.Taps(heads, outputs=True)]
    with hw.ablate(heads, 1), hw.ablate(heads, 3):
        tapped.append(hw.Taps(heads, outputs=True))
        without = model(x)
        found = [taps.read()[0].outputs for taps in tapped]
    assert torch.equal(*found)
    assert [bool((found[0][:, :, head] == 0).all()) for head in range(4)] == [False, True, False, True]
    with torch.no_grad():
        model.o_proj.weight.view(12, 4, 5)[:, [1, 3]] = 0.0
    torch.testing.assert_close(without, model(x))


def test_a_projection_called_with_no_tensor_is_refused():
    model = SeparateAttention()
    model.o_proj.forward = lambda heads: heads[0]
    model.o_proj.register_forward_pre_hook(lambda _module, args: ([args[0]],))
    with hw.Taps(hw.find_heads(model), outputs=True), pytest.raises(hw.errors.ShapeError, match="called with a list"):
        model(torch.randn(2, 6, 12))


@cases("name", ["BERT", "T5", "torch.nn.Transformer"])
def test_taps_read_the_biased_weights_whichever_was_attached_first(name: str):
    model, inputs, heads = bed(BY_NAME[name], padded=True)

    with hw.Taps(heads, outputs=True, weights=True) as early:
        results(model, inputs)
        plain = early.read()
        with hw.bias_heads(heads, slanted), hw.Taps(heads, outputs=True, weights=True) as late:
            results(model, inputs)
            captures = zip(plain, early.read(), late.read(), strict=True)
    for before, first, second in captures:
        assert torch.equal(first.weights, second.weights)
        assert torch.equal(first.outputs, second.outputs)
        assert not torch.allclose(before.weights, first.weights, atol=1e-2)


@cases("setting", [hw.routing.Trunk(), hw.routing.Residual(hw.routing.Trunk())])
def test_what_was_attached_before_an_aggregator_is_told_and_what_comes_after_it_acts(setting):
    model, inputs, heads = bed(BY_NAME["BERT"])
    taps, ablation, bias = (ATTACH[name](heads) for name in ("taps", "ablation", "bias"))
    aggregation = hw.aggregate(heads, setting)
    with pytest.raises(hw.errors.NotFired, match=r"output projection is now a \w+Aggregator, set after hw\.ablate"):
        model(**inputs)
    ablation.remove()
    model(**inputs)
    with pytest.raises(hw.errors.NotFired, match=r"outputs were not computed in the call.* Attach after aggregate"):
        taps.read()
    assert set(bias.calls.values()) == {1}
    taps.remove()
    with hw.Taps(heads, outputs=True) as taps, hw.ablate(heads, 1):
        model(**inputs)
        assert all(bool((capture.outputs[:, :, 1] == 0).all()) for capture in taps.read())
        aggregation.remove()
        with pytest.raises(hw.errors.NotFired, match="output projection is now a Linear"):
            model(**inputs)


@cases("name", ATTACH)
def test_a_copy_of_a_handle_is_attached_to_nothing_and_leaves_the_original_attached(name: str):
    family = BY_NAME["BERT"]
    model, inputs = family.build(), family.inputs()
    plain = results(model, inputs)
    handle = ATTACH[name](hw.find_heads(model))
    changed = results(model, inputs)
    for twin in copies(handle):
        assert handle.attached
        assert not twin.attached
        twin.remove()
        own = twin.heads.model
        assert own is not model
        torch.testing.assert_close(plain, results(own, inputs))
        if name in ("bias", "ablation"):
            with pytest.raises(hw.errors.NotFired, match=r"none of the calls of 2|no forward pass went through"):
                twin.check()
        else:
            with pytest.raises(hw.errors.NotFired, match=NOT_ATTACHED):
                twin() if name == "penalty" else twin.read()
    torch.testing.assert_close(changed, results(model, inputs))
    handle.remove()
    assert not handle.attached


def test_a_module_that_holds_a_penalty_is_copied_with_one_that_says_it_is_none():
    model = Penalized().train()
    value = model()
    model.inner(**BY_NAME["BERT"].inputs())  # captures are waiting while it is copied
    for twin in copies(model):
        with pytest.raises(hw.errors.NotFired, match=NOT_ATTACHED):
            twin()
        assert not twin.penalty.taps._records
        twin.penalty = hw.Disagreement(hw.find_heads(twin.inner), hw.similarity.Output() + hw.similarity.Position())
        assert bool(twin().isfinite())
    model.penalty()
    assert model().shape == value.shape


def test_a_capture_is_copied_without_its_graph_and_without_the_model():
    model, inputs = BY_NAME["BERT"].build().train(), BY_NAME["BERT"].inputs(padded=True)
    with hw.Taps(hw.find_heads(model), outputs=True, values=True, weights=True) as taps:
        results(model, inputs)
        captures = taps.read()
    for twin, capture in zip(copy.deepcopy(captures), captures, strict=True):
        assert twin.site is capture.site
        for name in ("outputs", "values", "weights", "key_keep", "query_keep"):
            left, right = getattr(twin, name), getattr(capture, name)
            assert torch.equal(left, right)
            assert left.data_ptr() != right.data_ptr()
            assert not left.requires_grad


@cases("name", ATTACH)
def test_replicas_of_data_parallel_are_refused(name: str):
    family = BY_NAME["BERT"]
    model, inputs = family.build(), family.inputs()
    handle = ATTACH[name](hw.find_heads(model))
    with pytest.raises(hw.errors.NotFired, match=r"replica that nn\.DataParallel made.* DistributedDataParallel"):
        replica(model)(**inputs)
    handle.remove()
    replica(model)(**inputs)


def pruned(model: nn.Module) -> None:
    """The first head of every layer of a BERT taken out for good, by smaller matrices."""
    from transformers.pytorch_utils import prune_linear_layer

    for layer in model.encoder.layer:
        attention, output = layer.attention.self, layer.attention.output
        kept = torch.arange(attention.attention_head_size, attention.all_head_size)
        for name in ("query", "key", "value"):
            setattr(attention, name, prune_linear_layer(getattr(attention, name), kept))
        output.dense = prune_linear_layer(output.dense, kept, dim=1)
        attention.num_attention_heads, attention.all_head_size = attention.num_attention_heads - 1, len(kept)


@cases("when", ["found", "attached"])
def test_heads_pruned_after_they_were_found_are_refused_until_they_are_found_again(when: str):
    family = BY_NAME["BERT"]
    for attach in (
        lambda heads: hw.Taps(heads, outputs=True),
        lambda heads: hw.Taps(heads, values=True),
        lambda heads: hw.ablate(heads, 1),
        lambda heads: hw.bias_heads(heads, torch.zeros(1, 4, 1, 7)),
    ):
        model, inputs = family.build(), family.inputs()
        heads = hw.find_heads(model)
        if when == "found":
            pruned(model)
            with pytest.raises(hw.errors.LayoutError, match="is not where the model calls it anymore"):
                attach(heads)
            continue
        handle = attach(heads)
        pruned(model)
        told = r"find_heads, call|set after (hw\.ablate|this was)|expected \(2 or 1, 3 or 1|been replaced after"
        with pytest.raises(hw.errors.HeadwiseError, match=told):
            _ = model(**inputs), getattr(handle, "read", list)()
        handle.remove()
    again = hw.find_heads(model)
    with hw.Taps(again, outputs=True, values=True, weights=True) as taps:
        model(**inputs)
        assert all(capture.outputs.shape[2:] == (3, 8) for capture in taps.read())
