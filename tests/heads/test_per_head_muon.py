"""Muon on each head: equal to a loop over its equations, and an optimizer as any other in loops of training."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from cases import cases
from heads.families import BY_NAME
from heads.family import Family
from heads.refused import REFUSED
from headwise.errors import LayoutError, SettingError
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


def by_hand(model: nn.Module, gradients: list[dict[str, Tensor]], scale: str) -> dict[str, Tensor]:
    """Every parameter of a head, block by block; of the rest those that are whole matrices."""
    named = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = {}
    heads, _ = hw.heads.find.find_regular_heads(model)
    for site in heads:
        for part in (one for view in (*site.slices, site.output) for one in view.parts):
            start = named[part.name]
            after = expected.setdefault(part.name, torch.full_like(start, torch.nan))
            read = [part.of(one[part.name]) for one in gradients]
            for head, block in enumerate(part.of(start)):
                part.of(after)[head] = muon_by_hand(block, [one[head] for one in read], scale)
    linear = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name in linear:
        if name not in expected and min(named[name].shape) > 1 and ("layer" in name or "block" in name):
            expected[name] = muon_by_hand(named[name], [one[name] for one in gradients], scale)
    return expected


@cases("name", TEN)
def test_each_head_is_stepped_as_a_matrix_of_its_own_by_the_equations(name: str):
    model = build(name).double()
    scale = "original" if name == "Llama" else "match_rms_adamw"
    gradients = []
    optimizer = hw.optim.per_head_muon(model, scale=scale, **EXACT)
    before = copy.deepcopy(model)
    plain = torch.optim.AdamW(before.parameters(), lr=0.05, weight_decay=0.0)
    vectors = {id(p) for p in optimizer.param_groups[-1]["params"]}
    for step in range(3):
        draw_gradients(model, step)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        optimizer.step()
    expected = by_hand(before, gradients, scale)
    for gradient in gradients:
        for key, parameter in before.named_parameters():
            parameter.grad = gradient[key]
        plain.step()
    compared = 0
    for (key, parameter), other in zip(model.named_parameters(), before.parameters(), strict=True):
        if key in expected:
            torch.testing.assert_close(parameter.detach(), expected[key], msg=key)
        elif id(parameter) in vectors:
            torch.testing.assert_close(parameter, other, msg=key)
        compared += key in expected
    in_muon = sum(len(group["params"]) for group in optimizer.param_groups if group["method"].startswith("Muon"))
    assert compared == in_muon - (4 if name == "GPT-OSS" else 0) - (len(gpt2_linears(model)) if name == "GPT-2" else 0)


def gpt2_linears(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if name.endswith(("c_fc.weight", "mlp.c_proj.weight"))]
