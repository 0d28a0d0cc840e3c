"""Layers around a Linear with the structure of other libraries: peft's LoRA, bitsandbytes' 8-bit weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LoraLinear(nn.Module):
    """peft's `lora.Linear`: the frozen layer under `base_layer`, adapters in module dictionaries, answers for both."""

    def __init__(self, base_layer: nn.Module, rank: int = 2, adapter: str = "default") -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        outputs, inputs = (base_layer.nf, base_layer.nx) if hasattr(base_layer, "nf") else base_layer.weight.shape
        self.in_features, self.out_features = inputs, outputs
        self.lora_dropout = nn.ModuleDict({adapter: nn.Identity()})
        self.lora_A = nn.ModuleDict({adapter: nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({adapter: nn.Linear(rank, outputs, bias=False)})
        self.scaling = {adapter: 0.7}

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for name, first in self.lora_A.items():
            result = result + self.lora_B[name](first(self.lora_dropout[name](x))) * self.scaling[name]
        return result


class Linear8bit(nn.Linear):
    """bitsandbytes' `Linear8bitLt`: an int8 parameter and the scale of each row."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        scale = base.weight.detach().abs().amax(1, keepdim=True) / 127.0
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter((base.weight.detach() / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def wrap(module: nn.Module, *names: str, wrapper=LoraLinear) -> nn.Module:
    """Replace child layers by wrapped ones, and return the module."""
    for name in names:
        setattr(module, name, wrapper(getattr(module, name)))
    return module
