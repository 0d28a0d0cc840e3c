"""Heads are found through the wrappers of torch.compile, and what is attached to them acts as on the model itself."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.models.bert.modeling_bert import BertLayer, BertSelfAttention

import headwise as hw
from cases import cases
from heads.test_compiled import HEADS, MODELS, TRACING, bert, encoder, inputs_of, mask_of, output_of, require_same

pytestmark = [pytest.mark.full, *TRACING]


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def inside(*classes: type) -> Callable[[nn.Module], nn.Module]:
    """Compile the modules of some classes in a model, each for itself."""

    def wrap(model: nn.Module) -> nn.Module:
        for owner in list(model.modules()):
            for name, child in list(owner._modules.items()):
                if isinstance(child, classes):
                    owner._modules[name] = compiled(child)
        return model

    return wrap


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def layers_in_place(model: Any) -> nn.Module:
    for layer in model.layers if isinstance(model, nn.TransformerEncoder) else model.encoder.layer:
        layer.compile(backend="eager")
    return model


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "the model": compiled,
    "the model in place": in_place,
    "layers in place": layers_in_place,
    "layers": inside(BertLayer, nn.TransformerEncoderLayer),
    "attention": inside(BertSelfAttention, nn.MultiheadAttention),
    "projections": inside(nn.Linear),
}


@pytest.fixture(autouse=True)
def forgetful() -> None:
    """As in a process where nothing was compiled or attached before."""
    torch._dynamo.reset()
    torch._dynamo.config.skip_nnmodule_hook_guards = True


def pairs(*first: tuple[str, str]) -> list:
    """Models and ways, of which all but the first take minutes."""
    others = [("torch", "the model"), *(("transformers", way) for way in WAYS)]
    slow = [pytest.param(*pair, marks=pytest.mark.slow) for pair in others if pair not in first]
    return [*first, *slow]


class Everything:
    """Every method at once on a model, and three steps of training with them."""

    def __init__(self, model: Any, heads: hw.Heads) -> None:
        self.model, self.heads = model, heads
        torch.manual_seed(3)
        hw.aggregate(heads.layer(0), hw.routing.Gate())
        hw.aggregate(heads.layer(1), hw.routing.Residual(hw.routing.EMRouting(capsules=4)))
        self.penalty = hw.Disagreement(
            heads, hw.similarity.Output() + hw.similarity.Subspace() + 0.3 * hw.similarity.Position()
        )
        self.taps = hw.Taps(heads.layer(1), outputs=True, values=True, weights=True)
        hw.bias_heads(heads.layer(0), torch.linspace(-1, 2, 7).view(1, 1, 1, 7))
        hw.guide(heads)
        self.optimizer = torch.optim.SGD(heads.model.parameters(), lr=0.1)
        self.repulsion = hw.repel(heads, hw.SPOS(alpha=0.3, inverse_temperature=1e4), self.optimizer)

    def step(self, inputs: dict, seed: int) -> list[Tensor]:
        """Train on a batch, and return what was computed and the parameters after the step."""
        output = output_of(self.model(**inputs, role_mask=mask_of(seed=seed)))
        loss = output.square().mean() + self.penalty()
        (capture,) = self.taps.read()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return [output, loss, capture.outputs, capture.values, capture.weights, *self.heads.model.parameters()]


@pytest.mark.parametrize(("name", "way"), pairs(("transformers", "the model in place"), ("torch", "attention")))
def test_every_method_acts_on_a_compiled_model_that_ran_before_as_on_the_model_itself(name: str, way: str):
    plain, inner = MODELS[name](), MODELS[name]()
    model = WAYS[way](inner)
    output_of(model(**inputs_of(plain))).sum().backward()
    heads = hw.find_heads(model)
    assert heads.model is inner
    assert str(heads) == str(hw.find_heads(plain))
    assert [part.name for part in heads.slices()] == [part.name for part in hw.find_heads(plain).slices()]
    expected, found = Everything(plain, hw.find_heads(plain)), Everything(model, heads)
    for seed in range(3):
        inputs = inputs_of(plain, seed=seed)
        require_same(found.step(inputs, seed), expected.step(inputs, seed))
    found.repulsion.check()


@pytest.mark.parametrize(("name", "way"), pairs(("transformers", "layers"), ("torch", "layers")))
def test_what_is_attached_to_one_layer_and_removed_again_acts_and_ends(name: str, way: str):
    plain, inner = MODELS[name](), MODELS[name]()
    inputs = inputs_of(plain)
    whole = output_of(plain(**inputs))
    heads = hw.find_heads(inner)
    model = WAYS[way](inner)
    torch.testing.assert_close(output_of(model(**inputs)), whole)
    for removed in ([0], [1, 3]):
        with hw.ablate(hw.find_heads(plain).layer(1), removed):
            expected = output_of(plain(**inputs))
        with hw.ablate(heads.layer(1), removed), hw.Taps(heads.layer(0), outputs=True) as taps:
            for _ in range(2):
                torch.testing.assert_close(output_of(model(**inputs)), expected)
                assert taps.read()[0].outputs.shape == (2, 7, HEADS, 8)
        torch.testing.assert_close(output_of(model(**inputs)), whole)


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one process."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29517")
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@cases("way", ["compiled, then wrapped", "wrapped, then compiled"])
def test_a_compiled_model_in_distributed_data_parallel_is_unwrapped_too(way: str):
    plain, inner = bert(), bert()
    replicated = DistributedDataParallel(compiled(inner) if way.startswith("compiled") else inner)
    model = replicated if way.startswith("compiled") else compiled(replicated)
    heads = hw.find_heads(model)
    assert heads.model is inner
    with pytest.raises(hw.errors.LayoutError, match="is wrapped by DistributedDataParallel"):
        hw.aggregate(heads, hw.routing.Gate())
    inputs, values = inputs_of(plain), []
    for part, own in ((plain, hw.find_heads(plain)), (model, heads)):
        penalty = hw.Disagreement(own, hw.similarity.Output() + hw.similarity.Position())
        own.model.zero_grad()
        loss = output_of(part(**inputs)).square().mean() + penalty()
        loss.backward()
        values.append([loss, *(parameter.grad for parameter in own.model.parameters())])
    require_same(*values)


@cases("way", ["the model", "layers", "projections"])
def test_a_compiled_model_is_saved_and_loaded_under_its_own_names(way: str, tmp_path: Path):
    model = WAYS[way](encoder().eval())
    heads = hw.find_heads(model)
    hw.aggregate(heads, hw.routing.EMRouting(capsules=4))
    inputs = inputs_of(heads.model)
    with torch.no_grad():
        expected = model(**inputs)
        hw.save(model, tmp_path)
        for into in (encoder(), WAYS[way](encoder())):
            again = hw.load(tmp_path, into)
            assert again is into
            torch.testing.assert_close(again(**inputs), expected)


@cases("way", ["the model", "the model in place", "layers", "attention"])
def test_a_compiled_model_is_proved_and_measured_like_the_model_itself(way: str):
    plain = bert().eval()
    model = WAYS[way](bert().eval())
    inputs = inputs_of(plain)
    model(**inputs)
    heads = hw.find_heads(model)
    assert hw.verify(heads, inputs).sites == tuple(site.name for site in heads)

    def score(output: Any, _batch: dict) -> Tensor:
        return output_of(output).std((1, 2))

    expected = hw.measure(hw.find_heads(plain), [inputs], score=score)
    found = hw.measure(heads, [inputs], score=score)
    assert found.replayed
    assert [layer.drops for layer in found.layers] == [layer.drops for layer in expected.layers]
    one = hw.importance(hw.find_heads(plain).layer(1), lambda: float(score(plain(**inputs), {}).mean()))
    other = hw.importance(heads.layer(1), lambda: float(score(model(**inputs), {}).mean()))
    for name, drops in one.drops.items():
        torch.testing.assert_close(other.drops[name], drops)


def test_a_copy_of_a_compiled_model_is_free_of_what_is_attached():
    model = inside(nn.TransformerEncoderLayer)(encoder())
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.Output())
    twin = copy.deepcopy(model)
    twin(**inputs_of(model))
    with pytest.raises(hw.errors.NotFired, match="2 of 2 tapped sites were not called"):
        penalty()
    assert len(hw.find_heads(twin)) == 2
