"""Routing, role masks and ablation where several processes train a model together equal one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import headwise as hw
from distributed.engines import (
    ENGINES,
    TOKENS,
    WIDTH,
    as_it_is,
    batch,
    examples,
    fsdp,
    gathered,
    made,
    tensor_parallel,
)
from distributed.processes import Processes

pytestmark = pytest.mark.full

RATE, STEPS, HEADS = 0.05, 2, 4

Engine = Callable[[nn.Module], nn.Module]


def assert_equal(together: dict[str, Tensor], alone: dict[str, Tensor]) -> None:
    for name, parameter in alone.items():
        torch.testing.assert_close(together[name], parameter, rtol=0.0, atol=1e-9, msg=lambda t, n=name: f"{n}: {t}")


SETTINGS = {
    "EM": hw.routing.EMRouting(capsules=4, iterations=2),
    "residual": hw.routing.Residual(hw.routing.SimpleRouting(capsules=3, iterations=2)),
    "gate": hw.routing.Gate(),
}


def aggregated(engine: str, divide: Engine, setting: Any) -> dict[str, Tensor]:
    model = made()
    if engine == "tensor parallel":
        model = tensor_parallel(model, output=False)
    torch.manual_seed(8)
    hw.aggregate(hw.find_heads(model), setting)
    for name, parameter in model.named_parameters():
        if name.endswith((".gamma", ".gate")):
            nn.init.constant_(parameter, 0.3)
            parameter.data.view(-1)[0] = -0.2
    if engine != "tensor parallel":
        model = divide(model)
    # a penalty reads the heads in front of the aggregators
    penalty = hw.Disagreement(hw.find_heads(model), hw.similarity.Output())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        ((model(batch(engine, step)) - 1.0).square().mean() + 0.3 * penalty()).backward()
        optimizer.step()
    return gathered(model)


@pytest.mark.parametrize("engine", ENGINES)
def test_aggregators_learn_what_they_learn_in_one_process(two: Processes, engine: str):
    for setting in SETTINGS:
        two.run(assert_aggregated, engine, setting)


def assert_aggregated(engine: str, setting: str) -> None:
    alone = aggregated("alone", as_it_is, SETTINGS[setting])
    assert_equal(aggregated(engine, ENGINES[engine], SETTINGS[setting]), alone)


def test_aggregators_that_nobody_would_train_together_are_refused(two: Processes):
    two.run(assert_refused)


def assert_refused() -> None:
    for engine, name in (("DDP", "DistributedDataParallel"), ("FSDP2 rows", "FSDP")):
        model = ENGINES[engine](made())
        with pytest.raises(hw.errors.LayoutError, match=f"wrapped by {name}.*call hw.aggregate first"):
            hw.aggregate(hw.find_heads(model), hw.routing.EMRouting(capsules=4))
    with pytest.raises(hw.errors.LayoutError, match=r"divided by tensor parallel.*leave it out of the plan"):
        hw.aggregate(hw.find_heads(tensor_parallel(made())), SETTINGS["residual"])


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(6)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 8}
    config = BertConfig(vocab_size=20, max_position_embeddings=16, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return BertModel(config, add_pooling_layer=False).double()


def bert_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"self.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    for layer in model.encoder.layer:
        parallelize_module(layer.attention, mesh, plan | {"output.dense": RowwiseParallel()})
    return model


def bert_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.encoder.layer:
        fully_shard(layer)
    return fully_shard(model)


BERTS: dict[str, Engine] = {
    "alone": as_it_is,
    "DDP": ENGINES["DDP"],
    "FSDP2 rows": bert_sharded,
    "tensor parallel": bert_parallel,
}


def guided(engine: str) -> dict[str, Tensor]:
    """Parameters after training with role masks, and a penalty on the weights that they leave."""
    model = BERTS[engine](bert().train())
    heads = hw.find_heads(model)
    guidance = hw.guide(heads)
    penalty = hw.Disagreement(heads, hw.similarity.Position() + 0.5 * hw.similarity.Output())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    roles = hw.roles.Roles(hw.roles.Window(3), hw.roles.Separator())
    words = [["one", "two", ".", "three", "four"], ["five", "six", "seven", ",", "eight"]] * 3
    tables = [hw.roles.WordTable(tuple(row)) for row in [*words, *words]]
    for step in range(STEPS):
        ids = torch.randint(20, (len(tables), TOKENS), generator=torch.Generator().manual_seed(step))
        mine = slice(None)
        if engine in ("DDP", "FSDP2 rows"):
            half = len(tables) // 2
            mine = slice(dist.get_rank() * half, (dist.get_rank() + 1) * half)
        optimizer.zero_grad()
        output = model(input_ids=ids[mine], role_mask=roles(tables[mine], num_heads=HEADS))
        loss = (output.last_hidden_state - 1.0).square().mean() + 0.7 * penalty()
        loss.backward()
        optimizer.step()
    guidance.check()
    return gathered(model)


def test_role_masks_and_a_penalty_on_weights_equal_those_of_one_process(two: Processes):
    two.run(assert_guided)


def assert_guided() -> None:
    alone = guided("alone")
    for engine in [*BERTS][1:]:
        assert_equal(guided(engine), alone)


def test_a_removed_head_is_the_one_removed_in_one_process(two: Processes):
    for engine in ("FSDP2 rows", "tensor parallel"):
        for first in (True, False):
            two.run(assert_ablated, engine, first)


def assert_ablated(engine: str, first: bool) -> None:
    model, x = made(), examples(0)
    with torch.no_grad(), hw.ablate(hw.find_heads(model).layer(1), 1, 3):
        expected = model(x)
    assert not torch.allclose(expected, model(x))
    ablation = hw.ablate(hw.find_heads(model).layer(1), 1, 3) if first else None
    model = ENGINES[engine](model)
    with torch.no_grad(), ablation or hw.ablate(hw.find_heads(model).layer(1), 1, 3):
        torch.testing.assert_close(model(x), expected)


def test_torchs_attention_is_listened_to_when_its_parameters_are_sharded(two: Processes):
    two.run(assert_torch_attention)


def assert_torch_attention() -> None:
    def train(engine: str) -> dict[str, Tensor]:
        torch.manual_seed(7)
        layer = nn.TransformerEncoderLayer(WIDTH, 3, 8, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
        if engine != "alone":
            model = fsdp(model)
        heads = hw.find_heads(model)
        penalty = hw.Disagreement(heads, hw.similarity.Position() + hw.similarity.Subspace())
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        repulsion = hw.repel(heads, hw.SVGD(alpha=0.4, step_size=0.7), optimizer)
        bias = torch.linspace(-1.0, 1.0, 3).view(1, 3, 1, 1) * torch.arange(TOKENS)
        with hw.bias_heads(heads, bias):
            for step in range(STEPS):
                optimizer.zero_grad()
                ((model(batch(engine, step)) - 1.0).square().mean() + 0.5 * penalty()).backward()
                optimizer.step()
        repulsion.check()
        return gathered(model)

    assert_equal(train("FSDP2 rows"), train("alone"))
