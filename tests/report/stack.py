"""Layers of attention whose model does something beside them, and inputs for small models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SMALL = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 20, "vocab_size": 30}


class Stack(nn.Module):
    """Layers of attention with a choice of what each does beside that."""

    def __init__(self, kind: str, layers: int = 3) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 3, 16, batch_first=True, dropout=0.2) for _ in range(layers)
        )
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        first, self.seen = x, []
        for layer in self.layers:
            x = layer(x)
            if self.kind == "in place":
                x *= 1.5
            if self.kind == "skip":
                x = x + first
        return x


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 5, 12, generator=generator), torch.randn(2, 6, 12, generator=generator)]


def ids() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    keep = torch.ones(3, 7, dtype=torch.int64)
    keep[1, 4:] = 0
    return [
        {"input_ids": torch.randint(1, 30, (3, 7), generator=generator), "attention_mask": keep},
        {"input_ids": torch.randint(1, 30, (2, 5), generator=generator)},
    ]


def spread(output: object, _batch: object) -> Tensor:
    states = output if isinstance(output, Tensor) else output.last_hidden_state
    return states[:, 0, :3].square().sum(-1)
