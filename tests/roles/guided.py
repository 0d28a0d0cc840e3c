"""Models, heads and masks of the tests of guidance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import headwise as hw
from heads.forwards import results


def square(heads: hw.Heads) -> hw.Heads:
    """The self-attention of an encoder, or of a decoder where there is no encoder; of text where there is text."""
    kind = "self" if any(site.kind == "self" for site in heads) else "decoder"
    stack = next(site.stack for site in heads if site.kind == kind)
    return heads.kind(kind).where(f"{stack}*")


def weights_of(model: nn.Module, heads: hw.Heads, inputs: dict) -> tuple[list[hw.heads.Capture], list[Tensor]]:
    with hw.Taps(heads, weights=True) as taps:
        found = results(model, inputs)
        return taps.read(), found


def random_mask(batch: int, heads: int, tokens: int, keep: Tensor | None = None, **settings) -> hw.roles.HeadMask:
    """Roles in heads 1 and 0, with rows that are empty throughout or before their own place."""
    roles = torch.rand(batch, 2, tokens, tokens, generator=torch.Generator().manual_seed(5)) < 0.4
    roles[:, 0, 1] = False
    roles[:, 1, 2, :3] = False
    return hw.roles.HeadMask(roles, keep, heads, (1, 0), **settings)


def encoder(layers: int = 2, **settings) -> nn.TransformerEncoder:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
