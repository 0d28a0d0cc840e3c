"""Differential attention in the decoders of transformers, whose heads are paired where they attend."""

import math

from torch import nn

from headwise.errors import LayoutError
from headwise.heads.adapters import has_peft
from headwise.heads.heads import Site
from headwise.nn.compiled import guard_hooks
from headwise.nn.difference import CHILD as DIFFERENCE
from headwise.nn.difference import HeadDifference, find_difference
from headwise.nn.mixing import find_mixer

# Attributes of attentions that compute scores or weights in more than one step: sinks, caps, learned biases.
UNPAIRED = ("sinks", "attn_logit_softcapping", "softcap", "position_bias")


def pair_decoder_heads(site: Site, layer: int = 1, *, second: bool = True) -> None:
    """Turn a decoder's attention with H query and G key/value heads into differential attention with H / 2 and G / 2.

    Query heads 2g and 2g + 1 are the first and second map of head g, and so are key heads; its values are those of
    both. Under grouped queries, head g has the keys and values of the pair g // (H / G), as in the released code for
    fused kernels (Ye et al. 2024). Positions are rotated, and queries and keys normalized (Qwen3), within each map as
    before. The projections stay as they are, with 4 e + 2 e new parameters in `HeadDifference`; a cache holds what it
    held. For a model that is yet to be trained: what the attention computes changes. Find heads, and build the
    optimizer, afterwards. Copies of the model attend likewise; `from_pretrained` passes over the new parameters.

    Args:
        site: A self-attention of a causal model of transformers with projections of their own (Llama, Qwen3, Mistral).
        layer: Number of its layer, from 1.
        second: As in `HeadDifference`.

    Raises:
        LayoutError: It is something else, has an odd number of heads, is paired or mixed already, has adapters, or
            attends with sinks, a cap on its scores or a scale of its own.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from headwise.heads.find import find_heads
        >>> sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        >>> model = LlamaModel(LlamaConfig(vocab_size=9, num_attention_heads=4, num_key_value_heads=2, **sizes))
        >>> pair_decoder_heads(find_heads(model).sites[0])
        >>> [(site.num_heads, site.key_value_heads, site.head_size) for site in find_heads(model)]
        [(2, 1, 8)]
    """
    module = site.module
    given = f"{site.label} ({type(module).__name__})"
    if not reads_pairs(site):
        raise LayoutError(
            f"{given}: heads are paired in torch's multi-head attention and in causal self-attention of transformers "
            "with projections of their own, such as Llama's."
        )
    if find_difference(module) is not None or find_mixer(module) is not None:
        raise LayoutError(f"{given} has paired or talking heads already; pair the heads of a new model.")
    if has_peft(site.model):
        raise LayoutError(f"{given} has adapters of peft, and differential attention is for a model yet to be trained.")
    if site.num_heads % 2 or site.key_value_heads % 2:
        raise LayoutError(
            f"{given} has {site.num_heads} query and {site.key_value_heads} key/value heads; expected even numbers, to "
            "be paired."
        )
    own = [name for name in UNPAIRED if getattr(module, name, None) is not None]
    scaling, common = getattr(module, "scaling", None), site.head_size**-0.5
    if isinstance(scaling, float) and not math.isclose(scaling, common):
        own.append(f"scores times {scaling:.6g} instead of {common:.6g}")
    if own:
        raise LayoutError(
            f"{given} attends with {', '.join(own)}, which differential attention does not have; pair the heads of "
            "another model, such as a Llama."
        )
    from headwise.heads.huggingface import require_reached  # needs transformers, which found the site

    require_reached(module)
    guard_hooks()
    weight = next(module.parameters())
    difference = HeadDifference(2 * site.head_size, layer, second=second)
    module.add_module(DIFFERENCE, difference.to(device=weight.device, dtype=weight.dtype))
    module.register_forward_pre_hook(_keep_paired)


def reads_pairs(site: Site) -> bool:
    """Return whether a site is causal self-attention of transformers whose heads can be paired."""
    if (
        site.layout != "separate"
        or site.kind not in ("self", "decoder")
        or not getattr(site.module, "is_causal", False)
    ):
        return False
    return any(base.__module__.startswith("transformers.") for base in type(site.module).__mro__) and (
        {head_slice.head_size for head_slice in site.slices} == {site.head_size}
    )


def _keep_paired(module: nn.Module, _arguments: tuple) -> None:
    from headwise.heads.huggingface import require_reached

    require_reached(module)
