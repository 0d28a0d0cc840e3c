"""The blocks of heads under optimizers of matrices: equal to what each would do alone."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import headwise as hw
from cases import cases
from heads.families import BY_NAME, FAMILIES, sweep
from heads.family import Family
from headwise.errors import LayoutError, SettingError


def make(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)


BUILDS = (make, BY_NAME["GPT-2"].build, BY_NAME["Llama"].build)


def run(model: torch.nn.Module, step: int) -> torch.Tensor:
    torch.manual_seed(step)
    if isinstance(model, torch.nn.TransformerEncoderLayer):
        return model(torch.randn(2, 5, 12)).square().mean()
    return model(torch.randint(0, 20, (2, 6))).logits[..., :3].square().mean()


@sweep(FAMILIES)
def test_blocks_of_every_family_are_stepped_as_the_weights_they_are_parts_of(family: Family):
    torch.manual_seed(0)
    model = family.build()
    blocks = hw.heads.head_blocks(hw.find_heads(model))
    whole = {id(parameter) for parameter in blocks.wholes}
    wanted = {}
    for name, parameter in model.named_parameters():
        parameter.grad = torch.randn_like(parameter)
        wanted[name] = (parameter - 0.5 * parameter.grad * (id(parameter) in whole)).detach()
    optimizer = torch.optim.SGD(list(blocks), lr=0.5)
    blocks.attach(optimizer)
    optimizer.step()
    # two dimensions each, the head's own and the width
    assert all(block.dim() == 2 for block in blocks)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, wanted[name], msg=name)


@cases("build", BUILDS)
def test_muon_takes_each_head_as_a_matrix_of_its_own(build):
    model = build()
    heads = hw.find_heads(model)
    blocks = hw.heads.head_blocks(heads)
    muon = torch.optim.Muon(list(blocks), lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    blocks.attach(muon)
    alone = [block.detach().clone().requires_grad_() for block in blocks]
    expected = torch.optim.Muon(alone, lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(2):
        muon.zero_grad()
        run(model, step).backward()
        for single, block in zip(alone, _gradients(heads), strict=True):
            single.grad = block.clone()
        muon.step()
        expected.step()
    torch.testing.assert_close(list(blocks), alone)
    held = {id(part.parameter) for site in heads for part in (*site.slices, site.output)}
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, was) == (id(parameter) not in held)


@cases("build", BUILDS)
def test_whole_projections_are_the_control_also_where_they_share_a_parameter(build):
    model = build()
    other = copy.deepcopy(model)
    blocks = hw.heads.head_blocks(hw.find_heads(model), per_head=False)
    slices = [part for site in hw.find_heads(other) for part in (*site.slices, site.output)]
    alone = [torch.nn.Parameter(part.turn(part.of(part.parameter.detach())).mT.flatten(0, 1)) for part in slices]
    assert [tuple(block.shape) for block in blocks] == [tuple(one.shape) for one in alone]
    assert all(
        whole.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
        for whole, block in zip(blocks.wholes, blocks, strict=True)
    )
    settings = {"lr": 0.1, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    muon, expected = torch.optim.Muon(list(blocks), **settings), torch.optim.Muon(alone, **settings)
    blocks.attach(muon)
    for step in range(2):
        muon.zero_grad()
        run(model, step).backward()
        with torch.no_grad():
            for one, (part, block) in zip(alone, zip(slices, blocks, strict=True), strict=True):
                one.copy_(block)
                gradient = dict(model.named_parameters())[part.name].grad
                one.grad = part.turn(part.of(gradient)).mT.flatten(0, 1).clone()
        muon.step()
        expected.step()
        torch.testing.assert_close(list(blocks), alone)


def test_projections_that_do_not_lie_side_by_side_are_refused():
    heads = hw.find_heads(BY_NAME["GPT-NeoX"].build())
    assert len(hw.heads.head_blocks(heads)) == 2 * 16
    with pytest.raises(LayoutError, match=r"its query do not lie side by side.*per_head=True"):
        hw.heads.head_blocks(heads, per_head=False)


def _gradients(heads: hw.Heads) -> list[torch.Tensor]:
    """The gradient of every block, read from the slices."""
    return [
        block
        for site in heads
        for part in (*site.slices, site.output)
        for block in part.of(part.parameter.grad).unbind(0)
    ]


def test_zero_grad_clears_the_whole_weights_until_removed():
    model = make()
    blocks = hw.heads.head_blocks(hw.find_heads(model))
    optimizer = torch.optim.SGD(list(blocks), lr=0.1)
    blocks.attach(optimizer)
    run(model, 0).backward()
    optimizer.zero_grad()
    assert model.self_attn.in_proj_weight.grad is None
    run(model, 0).backward()
    optimizer.zero_grad(set_to_none=False)
    assert not model.self_attn.in_proj_weight.grad.any()
    with pytest.raises(SettingError, match="attached already"):
        blocks.attach(optimizer)
    blocks.remove()
    run(model, 0).backward()
    optimizer.zero_grad()
    assert model.self_attn.in_proj_weight.grad.any()


def by_closure(model: torch.nn.Module, optimizer: torch.optim.Optimizer, _held: list, named: bool) -> list:
    def closure(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        # gradients that no backward pass accumulates
        weights, loss = list(model.parameters()), run(model, step)
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient
        return loss

    given = [partial(closure, step) for step in range(3)]
    return [optimizer.step(closure=one) if named else optimizer.step(one) for one in given]


def clipped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, held: list) -> list:
    norms = []
    for step in range(3):
        run(model, step).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(held, 0.01))
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) > 0.01
    return norms


def scaled(model: torch.nn.Module, optimizer: torch.optim.Optimizer, _held: list) -> list:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        scaler.scale(run(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        # not by the optimizer, which would clear the gradients of the blocks
        model.zero_grad()
    return []


@cases("loop", [partial(by_closure, named=False), partial(by_closure, named=True), clipped, scaled])
def test_blocks_are_trained_as_the_weights_are(loop):
    model, other = make(), make()
    blocks = hw.heads.head_blocks(hw.find_heads(model))
    held = [*blocks, *blocks.rest]
    optimizer = torch.optim.SGD(held, lr=0.5, momentum=0.9)
    blocks.attach(optimizer)
    plain = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    torch.testing.assert_close(loop(model, optimizer, held), loop(other, plain, list(other.parameters())))
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, msg=name)


def test_blocks_under_lora_are_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        BY_NAME["Llama"].build(), peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "k_proj"])
    )
    with pytest.raises(LayoutError, match=r"q_proj\.base_layer\.weight is the base of a LoRA layer.*merge_and_unload"):
        hw.heads.head_blocks(hw.find_heads(model).projection("query", "key"))


def test_printed_blocks_tell_whether_an_optimizer_is_attached():
    blocks = hw.heads.head_blocks(hw.find_heads(make()))
    assert repr(blocks) == "HeadBlocks(12 heads of 2 parameters; attached to no optimizer)"
    blocks.attach(torch.optim.SGD(list(blocks), lr=0.1))
    assert repr(blocks) == "HeadBlocks(12 heads of 2 parameters)"


def test_rest_and_blocks_are_all_of_the_model():
    model = make()
    blocks = hw.heads.head_blocks(hw.find_heads(model))
    assert sum(p.numel() for p in (*blocks, *blocks.rest)) == sum(p.numel() for p in model.parameters())
    assert len(blocks) == len(blocks.names) == 12
    assert blocks.names[4] == "self_attn.in_proj_weight key 1"


def test_what_would_not_train_is_refused():
    model = make()
    with pytest.raises(LayoutError, match=r"12 of its 36 rows belong to selected heads"):
        hw.heads.head_blocks(hw.find_heads(model).projection("query"))
    blocks = hw.heads.head_blocks(hw.find_heads(model))
    with pytest.raises(SettingError, match="holds none of the 12 blocks"):
        blocks.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SettingError, match="holds 11 of the 12 blocks"):
        blocks.attach(torch.optim.SGD(list(blocks)[:-1], lr=0.1))
    blocks.attach(torch.optim.SGD(list(blocks), lr=0.1))
    model.double()
    with pytest.raises(LayoutError, match=r"another place of memory|was replaced"):
        run(model.float(), 0).backward()
    model.self_attn.in_proj_weight.requires_grad_(False)
    with pytest.raises(LayoutError, match="does not require a gradient"):
        hw.heads.head_blocks(hw.find_heads(model))
