"""Whether role masks fit sites and a call of one, and the part of a mask that is the call's.

Owns what is said of one that does not. Must not know which forward a mask belongs to.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from headwise.errors import LayoutError, MaskError
from headwise.heads.heads import Heads, Site
from headwise.masks.head_mask import HeadMask
from headwise.nn.scores import ScoreCall


def require_fitting(site: Site, call: ScoreCall, mask: HeadMask, generating: bool, prompts: int | None) -> None:
    """Raise `MaskError` unless the mask is of the sentences and the tokens of this call.

    Args:
        site: The site, to be named.
        call: The call.
        mask: The mask.
        generating: Whether the call is generate()'s, which may have several beams a prompt.
        prompts: How many prompts generate() was given; None where that is not known.
    """
    if prompts is not None and prompts != mask.batch:
        raise MaskError(
            f"the mask has {mask.batch} sentences and generate() was given {prompts} prompts; make the mask of the "
            "prompts."
        )
    beams = generating and call.batch % mask.batch == 0
    if call.batch != mask.batch and not beams:
        raise MaskError(
            f"{name_of(site)}: the mask has {mask.batch} sentences and the batch {call.batch}; make the mask of the "
            "batch that the model is given."
        )
    # a cache may have room for more keys than there are yet
    keys = mask.tokens if not call.cached else max(mask.tokens, call.keys)
    if call.first != 0 or call.queries != mask.tokens or call.keys != keys:
        hint = "" if call.cached else " (generate() with use_cache=True keeps to the prompt's)"
        raise MaskError(
            f"{name_of(site)}: the mask has {mask.tokens} tokens and this call {call.queries} queries and {call.keys} "
            f"keys; make the mask of the tokens that the model is given, special tokens and padding included{hint}."
        )


def require_self_attention(heads: Heads) -> None:
    """Raise `LayoutError` where sites are no self-attention, or of an encoder and a decoder at once."""
    kinds = {site.kind for site in heads.sites}
    if "cross" in kinds or {"self", "decoder"} <= kinds:
        raise LayoutError(
            f"guide was given attention of the kinds {', '.join(sorted(kinds))}; role masks are square and of one "
            "text: choose with heads.kind('self') or heads.kind('decoder')."
        )


def own_keys(bias: Tensor, call: ScoreCall) -> Tensor:
    """Return the columns of this call's keys; the model masks those there is only room for."""
    columns = bias[..., call.first_key : call.first_key + call.keys]
    return F.pad(columns, (0, call.keys - columns.shape[-1]))


def name_of(site: Site) -> str:
    """Return what a site is called in a sentence."""
    return site.name or "the model"
