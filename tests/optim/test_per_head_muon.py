"""Muon on each head: equal to a loop over its equations, and an optimizer as any other in loops of training."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.families import BY_NAME
from heads.refused import REFUSED
from headwise.errors import LayoutError, SettingError
from headwise.heads.find import find_regular_heads
from integrations.loops import arguments, build_bert, collate, make_rows

TEN = (
    *("BERT", "ALBERT", "GPT-2", "GPT-NeoX", "Llama", "DeepSeek-V3", "GPT-OSS", "T5", "ViT", "torch.nn.Transformer"),
    "Qwen3-Next",
)
HYBRID = next(one for one in REFUSED if one.families.startswith("Qwen3-Next"))
EXACT = {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.8, "dtype": torch.float64}


def build(name: str) -> nn.Module:
    return HYBRID.build() if name == "Qwen3-Next" else BY_NAME[name].build()


def newton_schulz(gradient: Tensor) -> Tensor:
    """U V^T, about, by the quintic polynomial of Jordan et al., in the precision given."""
    if gradient.shape[0] > gradient.shape[1]:
        return newton_schulz(gradient.T).T
    x = gradient / max(float((gradient * gradient).sum()) ** 0.5, 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
    return x


def muon_by_hand(start: Tensor, gradients: list[Tensor], scale: str = "match_rms_adamw") -> Tensor:
    """One matrix after steps at the settings of `EXACT`."""
    weight, average = start.clone(), torch.zeros_like(start)
    rows, columns = weight.shape
    ratio = 0.2 * max(rows, columns) ** 0.5 if scale == "match_rms_adamw" else max(1.0, rows / columns) ** 0.5
    for gradient in gradients:
        average = 0.8 * average + 0.2 * gradient
        ahead = 0.2 * gradient + 0.8 * average
        weight = (1 - 0.05 * 0.2) * weight - 0.05 * ratio * newton_schulz(ahead)
    return weight


def draw_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def by_hand(model: nn.Module, gradients: list[dict[str, Tensor]], names: set[str], scale: str) -> dict[str, Tensor]:
    """These parameters, head by head where they have heads; runs of other rows, and other parameters, as matrices."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    expected: dict[str, Tensor] = {}
    heads, _ = find_regular_heads(model)
    for site in heads:
        for part in (one for view in (*site.slices, site.output) for one in view.parts):
            after = expected.setdefault(part.name, torch.full_like(named[part.name], torch.nan))
            read = [part.of(one[part.name]) for one in gradients]
            for head, block in enumerate(part.of(named[part.name])):
                part.of(after)[head] = muon_by_hand(block, [one[head] for one in read], scale)
    for name, after in expected.items():
        empty = after.isnan().flatten(1).any(1).tolist() if after.dim() == 2 else []
        edges = [row for row in range(len(empty) + 1) if [False, *empty][row] != [*empty, False][row]]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            own = [one[name][start:end] for one in gradients]
            after[start:end] = muon_by_hand(named[name][start:end], own, scale)
    for name in names - {*expected}:
        stack = named[name].dim() == 3
        each = range(len(named[name])) if stack else [...]
        after = [muon_by_hand(named[name][one], [given[name][one] for given in gradients], scale) for one in each]
        expected[name] = torch.stack(after) if stack else after[0]
    return expected


@cases("name", TEN)
def test_each_head_is_stepped_as_a_matrix_of_its_own_by_the_equations(name: str):
    model = build(name).double()
    scale = "original" if name == "Llama" else "match_rms_adamw"
    gradients = []
    optimizer = hw.optim.per_head_muon(model, scale=scale, **EXACT)
    before = copy.deepcopy(model)
    for step in range(2):
        draw_gradients(model, step)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        optimizer.step()
    methods = {id(p): group["method"] for group in optimizer.param_groups for p in group["params"]}
    names = {name: methods[id(p)] for name, p in model.named_parameters()}
    muon = {name for name, method in names.items() if method != "AdamW"}
    expected = by_hand(before, gradients, muon, scale)
    assert {*expected} == muon
    plain = torch.optim.AdamW(groups_of(optimizer, model, before), lr=0.05)
    for gradient in gradients:
        for key, parameter in before.named_parameters():
            parameter.grad = gradient[key]
        plain.step()
    for (key, parameter), other in zip(model.named_parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), expected.get(key, other.detach()), msg=key)


def groups_of(optimizer: torch.optim.Optimizer, model: nn.Module, other: nn.Module) -> list[dict]:
    """The groups of AdamW, of the parameters of another model."""
    same = {id(p): q for p, q in zip(model.parameters(), other.parameters(), strict=True)}
    return [
        {"params": [same[id(p)] for p in group["params"]], "weight_decay": group["weight_decay"]}
        for group in optimizer.param_groups
        if group["method"] == "AdamW"
    ]


def test_bit_for_bit_torch_muon_steps_each_block_in_its_own_precision():
    model = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
    (site,) = hw.find_heads(model)
    parts = (*site.slices, site.output)
    alone = [nn.Parameter(block.detach().clone()) for part in parts for block in part.of(part.parameter)]
    wholes = [nn.Parameter(p.detach().clone()) for p in (model.linear1.weight, model.linear2.weight)]
    settings = {"lr": 0.05, "weight_decay": 0.1}
    optimizer = hw.optim.per_head_muon(model, **settings)
    plain = torch.optim.Muon([*alone, *wholes], **settings, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        draw_gradients(model, step)
        read = [block for part in parts for block in part.of(part.parameter.grad)]
        read += [model.linear1.weight.grad, model.linear2.weight.grad]
        for one, gradient in zip([*alone, *wholes], read, strict=True):
            one.grad = gradient.clone()
        optimizer.step()
        plain.step()
    assert all(map(torch.equal, [block for part in parts for block in part.of(part.parameter)], alone))
    assert all(map(torch.equal, (model.linear1.weight, model.linear2.weight), wholes))


def test_rules_are_printed_and_can_be_changed():
    model = HYBRID.build()
    shown = str(hw.optim.per_head_muon(model, adamw="*.shared_expert.*", adamw_lr=0.5))
    assert "layers.0.linear_attn, a Qwen3NextGatedDeltaNet is linear attention" in shown
    assert len(shown.splitlines()) < 9
    deepseek = BY_NAME["DeepSeek-V3"].build()
    by_head = {
        latent: hw.optim.per_head_muon(deepseek, latent=latent).param_groups[0]["params"]
        for latent in ("heads", "whole")
    }
    names = {id(p): name.rpartition("self_attn.")[2] for name, p in deepseek.named_parameters()}
    shown = {latent: {names[id(p)] for p in held} for latent, held in by_head.items()}
    assert shown["whole"] == {"o_proj.weight"}
    assert shown["heads"] > {"o_proj.weight", "kv_b_proj.weight"}
    groups = hw.optim.per_head_muon(make(), weight_decay=0.3).param_groups
    assert {(p.dim(), group["weight_decay"]) for group in groups for p in group["params"]} == {(1, 0.0), (2, 0.3)}


def train(model: nn.Module, steps: range, optimizer: torch.optim.Optimizer, schedule) -> None:
    for step in steps:
        torch.manual_seed(step)
        for _ in range(2):
            model(torch.randn(2, 5, 12)).square()[..., :5].mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)


def scheduled(model: nn.Module):
    optimizer = hw.optim.per_head_muon(model, lr=0.05)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8)


def test_a_restored_state_goes_on_to_the_same_bits(tmp_path: Path):
    whole, first, second = make(), make(), make()
    train(whole, range(4), *scheduled(whole))
    optimizer, schedule = scheduled(first)
    train(first, range(2), optimizer, schedule)
    torch.save([first.state_dict(), optimizer.state_dict(), schedule.state_dict()], tmp_path / "state.pt")
    states = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed, again = scheduled(second)
    for one, state in zip((second, resumed, again), states, strict=True):
        one.load_state_dict(state)
    train(second, range(2, 4), resumed, again)
    assert all(map(torch.equal, whole.parameters(), second.parameters()))
    assert not torch.equal(first.linear1.weight, second.linear1.weight)


def test_gradients_are_scaled_steps_skipped_closures_called_and_models_compiled_or_cast():
    model, other, third = make(), make(), torch.compile(make(), backend="eager")
    one, two, three = (hw.optim.per_head_muon(each, lr=0.05) for each in (model, other, third))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(2, 5, 12)

    def closure() -> Tensor:
        loss = other(x).square()[..., :5].mean()
        loss.backward()
        return loss

    scaler.scale(model(x).square()[..., :5].mean()).backward()
    scaler.step(one)
    scaler.update()
    loss = two.step(closure)
    for p, q in zip(third.parameters(), other.parameters(), strict=True):
        p.grad = q.grad
    three.step()
    assert float(loss.detach()) > 0
    for p, q, r in zip(model.parameters(), other.parameters(), third.parameters(), strict=True):
        # the gradient of key biases is rounding alone, which Adam enlarges
        if p.dim() > 1:
            torch.testing.assert_close(p, q)
        assert torch.equal(r, q)
    before = model.linear1.weight.clone()
    model.linear1.weight.grad.fill_(torch.inf)
    scaler.step(one)
    assert torch.equal(model.linear1.weight, before)


def test_trainer_takes_it_in_one_line(tmp_path: Path):
    from transformers import Trainer

    model = build_bert(0.0)
    before = copy.deepcopy(model)
    optimizer = hw.optim.per_head_muon(model, lr=0.02)
    trainer = Trainer(
        model, arguments(tmp_path), train_dataset=make_rows(), data_collator=collate, optimizers=(optimizer, None)
    )
    trainer.train()
    assert all(group["lr"] == 0.02 for group in optimizer.param_groups)
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True)]
    assert all(moved)


def frozen() -> nn.Module:
    return make().requires_grad_(False)


def parametrized() -> nn.Module:
    model = BY_NAME["Llama"].build()
    nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.q_proj)
    return model


def sharded() -> nn.Module:
    model = make()
    model.linear1.weight.device_mesh = object()
    return model


def heads_sharded() -> nn.Module:
    model = make()
    model.self_attn.in_proj_weight.device_mesh = object()
    return model


def under_zero3() -> nn.Module:
    model = make()
    model.self_attn.in_proj_weight.ds_id = 0
    return model


def read_in_two_ways() -> nn.Module:
    one, two = (nn.MultiheadAttention(8, heads, batch_first=True) for heads in (2, 4))
    two.in_proj_weight = one.in_proj_weight
    return nn.ModuleList([one, two])


REFUSALS = (
    (LayoutError, "no projection of the selected heads is trained", frozen, {}),
    (LayoutError, "by a parametrization", parametrized, {}),
    (LayoutError, r"linear1\.weight is sharded over processes \(FSDP2", sharded, {}),
    (LayoutError, r"in_proj_weight is sharded over processes", heads_sharded, {}),
    (LayoutError, "in_proj_weight is .*ZeRO", under_zero3, {}),
    (LayoutError, "is read as different heads by several attentions", read_in_two_ways, {}),
    (LayoutError, "no attention heads found", lambda: nn.Linear(2, 2), {}),
    (SettingError, "heads are those of another model", make, {"heads": hw.find_heads(make())}),
    (SettingError, "heads is a list", make, {"heads": [1]}),
    (SettingError, "matches the name of no parameter", make, {"adamw": "router"}),
    (SettingError, "latent is 'split'; expected one of heads, whole", make, {"latent": "split"}),
    (SettingError, "scale is 'none'", make, {"scale": "none"}),
    (SettingError, "lr is -1", make, {"lr": -1.0}),
    (SettingError, "momentum is 1", make, {"momentum": 1.0}),
    (SettingError, "steps is 0", make, {"steps": 0}),
)


@cases(("kind", "said", "made", "settings"), REFUSALS)
def test_what_cannot_be_done_is_refused_in_a_sentence(kind, said, made, settings):
    with pytest.raises(kind, match=said):
        hw.optim.per_head_muon(made(), **settings)
