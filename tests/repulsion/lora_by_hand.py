"""Repulsion under LoRA written by hand, in double precision: train theta = W + s B A, and carry its force to A and B.

The model is copied with every LoRA layer replaced by W x + T dropout(x), T = sum_a s_a B_a A_a a leaf of its own.
Autograd then gives G = dL/dT itself, `particles.update` the force on the heads of theta = W + T, and autograd through
T(A, B) what A and B get.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.repulsion.rules import Rule, update


class Explicit(nn.Module):
    """W x + T dropout(x), and the biases of LoRA."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base = layer.base_layer
        self.dropout = next(iter(layer.lora_dropout.values()))
        self.product = nn.Parameter(product_of(layer).detach().clone())
        biases = [(layer.scaling[name], own.bias) for name, own in layer.lora_B.items() if own.bias is not None]
        self.bias = sum(scaling * bias.detach() for scaling, bias in biases)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(self.dropout(x), self.product) + self.bias


def product_of(layer: nn.Module) -> Tensor:
    """T(A, B) of the active adapters, [d_out, d_in], differentiable in them."""
    names = getattr(layer, "active_adapters", list(layer.lora_A))
    parts = [layer.scaling[name] * layer.lora_B[name].weight @ layer.lora_A[name].weight for name in names]
    return torch.stack(parts).sum(0)


def lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The LoRA layers of a model by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def base_weight(layer: nn.Module) -> Tensor:
    """W, [d_out, d_in], of a Linear or a Conv1D."""
    weight = layer.base_layer.weight.detach()
    return weight.T if hasattr(layer.base_layer, "nf") else weight


def expected_gradients(
    model: nn.Module,
    heads: hw.Heads,
    loss: Callable[[nn.Module], Tensor],
    rule: Rule,
    *,
    joint: bool = False,
    strength: float = 1.0,
    losses: int = 1,
) -> dict[str, Tensor]:
    """The gradient of every trained factor of LoRA after the rule; `loss` is called `losses` times and summed."""
    layers = lora_layers(model)
    twin = copy.deepcopy(model)
    explicit = {name: Explicit(layer) for name, layer in lora_layers(twin).items()}
    for name, replacement in explicit.items():
        twin.set_submodule(name, replacement)
    for _ in range(losses):
        loss(twin).backward()
    forces = {name: module.product.grad.clone() for name, module in explicit.items()}
    names = {id(layer): name for name, layer in layers.items()}
    for site in heads:
        slices = [s for s in site.slices if s.projection in heads.projections]
        for group in [slices] if joint else [[own] for own in slices]:
            write_force(rule, group, layers, names, forces, strength)
    expected = {}
    for name, layer in layers.items():
        matrices = {key: p for key, p in layer.named_parameters() if "lora_" in key and key.endswith("weight")}
        factors = {f"{name}.{key}": matrix for key, matrix in matrices.items() if matrix.requires_grad}
        found = torch.autograd.grad(product_of(layer), list(factors.values()), forces[name])
        expected |= dict(zip(factors, found, strict=True))
    return expected


def rows_of(head_slice: hw.heads.HeadView) -> list[list[int]]:
    """The rows of each head in [d_out, d_in]."""
    starts = [part.start + head * part.stride for part in head_slice.parts for head in range(part.heads)]
    return [list(range(start, start + head_slice.head_size)) for start in starts]


def write_force(rule, group, layers, names, forces, strength) -> None:
    """Replace the rows of a group's heads in the gradients of the products by the rule's force."""
    places = [(names[id(head_slice.lora)], rows_of(head_slice)) for head_slice in group]

    def gather(of: Callable[[str], Tensor]) -> Tensor:
        return torch.cat([torch.stack([of(name)[own].flatten() for own in rows]) for name, rows in places], dim=1)

    theta = gather(lambda name: base_weight(layers[name]) + product_of(layers[name]).detach())
    found = update(rule, theta, gather(lambda name: forces[name]))
    start = 0
    for name, rows in places:
        width = len(rows[0]) * forces[name].shape[1]
        force = (found.driving - strength * found.repulsion)[:, start : start + width]
        for own, one in zip(rows, force, strict=True):
            forces[name][own] = one.view(len(own), -1)
        start += width
