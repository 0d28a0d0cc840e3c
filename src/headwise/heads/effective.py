"""The effective number of heads of an attention, from what it computed in a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import SettingError
from headwise.heads.capture import Capture
from headwise.heads.heads import Heads
from headwise.similarity.alignment import FEWEST_TOKENS, form_metric, multiply_features
from headwise.similarity.effective import effective_number
from headwise.similarity.tokens import select_tokens
from headwise.strength import Target


@torch.no_grad()
def count_effective_heads(captures: Sequence[Capture], keep: Tensor | None = None) -> Tensor:
    """Return the effective number of heads of one attention over the tokens of some calls, a float64 scalar.

    It is that of the debiased alignment of what heads add to the output, O_h W_O,h, or of O_h where no linear output
    projection follows: see `similarity.effective.effective_number`. NaN with fewer than four valid tokens.

    Args:
        captures: Calls of one attention, with outputs.
        keep: True where a token is real, [B, L]; overrides the padding that each call received.
    """
    tokens = []
    for capture in captures:
        assert capture.outputs is not None  # captured for this
        tokens.append(select_tokens(capture.outputs, capture.query_keep if keep is None else keep))
    outputs = torch.cat(tokens)
    if len(outputs) < FEWEST_TOKENS:
        return torch.full((), math.nan, dtype=torch.float64, device=outputs.device)
    weights = captures[0].site.find_output_weights()
    metric = None if weights is None else form_metric(weights.to(outputs.device))
    return effective_number(multiply_features(outputs, metric=metric).debiased_cka())


def require_reachable(target: Target, heads: Heads) -> None:
    """Raise `SettingError` where an attention has fewer heads than a target asks for; those of one head are left out.

    Raises:
        SettingError: It names the attention.
    """
    for site in heads:
        if 1 < site.num_heads < target.effective_heads:
            raise SettingError(
                f"{target} asks for {target.effective_heads:g} effective heads, and {site.label} has "
                f"{site.num_heads}; give at most that, or select other attentions."
            )
