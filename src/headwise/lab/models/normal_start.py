"""How the models of Hugging Face begin: weights from one normal distribution, biases and padding zero."""

from __future__ import annotations

import torch
from torch import nn

# BERT's, and the default of most of transformers.
DEVIATION = 0.02


@torch.no_grad()
def draw_normal(module: nn.Linear | nn.Embedding, deviation: float = DEVIATION) -> None:
    """Draw a module's weights from a normal distribution of that standard deviation; clear its bias or padding.

    >>> table = nn.Embedding(3, 4, padding_idx=0)
    >>> draw_normal(table, 0.5)
    >>> bool(table.weight[0].any()), bool(table.weight[1].any())
    (False, True)
    """
    nn.init.normal_(module.weight, std=deviation)
    if isinstance(module, nn.Linear):
        clear_bias(module)
    elif module.padding_idx is not None:
        module.weight[module.padding_idx] = 0.0


@torch.no_grad()
def clear_bias(module: nn.Linear) -> None:
    """Set a module's bias to zero, where it has one."""
    if module.bias is not None:
        nn.init.zeros_(module.bias)
