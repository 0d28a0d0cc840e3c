"""What an attention holds of each head beside its projections: position tables, norms, sinks, scales."""

import re
from collections.abc import Iterable

from torch import nn

from headwise.errors import LayoutError
from headwise.heads.heads import Site

# The end of a parameter's name in the attention module, and the axis along which it has heads: one entry or one head's
# width of entries for each.
TABLES: tuple[tuple[str, int], ...] = (
    # positions projected to heads: DeBERTa, Conformers, Gemma 3n
    *((f"{name}.{part}", 0) for name in ("pos_proj", "pos_q_proj") for part in ("weight", "bias")),
    *((f"{name}.{part}", 0) for name in ("pos_key_proj", "pos_query_proj") for part in ("weight", "bias")),
    ("linear_pos.weight", 0),
    ("relative_k_proj.weight", 0),
    ("pos_bias_u", 0),
    ("pos_bias_v", 0),
    # a bias for each distance and head: T5, Swin, BEiT
    ("relative_attention_bias.weight", 1),
    ("relative_position_bias_table", 1),
    ("continuous_position_bias_mlp.2.weight", 0),
    ("logit_scale", 0),
    # Funnel
    ("r_w_bias", 0),
    ("r_r_bias", 0),
    ("r_s_bias", 0),
    ("r_kernel", 1),
    ("seg_embed", 1),
    # sinks: GPT-OSS, MiMo
    ("sinks", 0),
    ("attention_sink_bias", 0),
    # torch.nn.MultiheadAttention
    ("bias_k", 2),
    ("bias_v", 2),
)
# Norms of queries and keys: of each head where they have two axes, of any head where they have its width.
_NORM = re.compile(r"(?:^|\.)(q|k|query|key)_(?:norm|layernorm|ln)\.(?:weight|bias)$")
_OTHER_NORM = re.compile(r"norm\d*\.(?:weight|bias)$", re.IGNORECASE)
# Projections that have no heads.
_WITHOUT_HEADS = ("q_a_proj", "kv_a_proj_with_mqa")


def list_beside(site: Site, *, proved: bool) -> Iterable[tuple[str, nn.Parameter, int, str]]:
    """Yield the parameters of a site that hold something of each head: name, parameter, axis, "query" or "key".

    Raises:
        LayoutError: One covers all heads together, or may hold heads and is of no known kind; the latter is left as it
            is where the result is `proved`.
    """
    read = {id(part.owner._parameters.get(part.attribute)) for part in site.parts}
    read |= {id(part.bias_parameter) for part in site.parts}
    if site.output is not None:
        read |= {id(parameter) for parameter in site.output.owner.parameters()}
    sizes = {head_slice.head_size for head_slice in site.slices}
    for name, parameter in site.module.named_parameters():
        if id(parameter) in read:
            continue
        found = _find_norm(site, name, parameter, sizes) or _find_table(site, name, parameter, sizes)
        if found is not None:
            yield name, parameter, *found
        elif not proved and _NORM.search(name) is None:
            _require_without_heads(site, name, parameter, sizes)


def _find_norm(site: Site, name: str, parameter: nn.Parameter, sizes: set[int]) -> tuple[int, str] | None:
    """Return axis and kind of the norms of each query or key head; None for what is no norm of queries or keys."""
    norm = _NORM.search(name)
    if norm is None:
        return None
    units, count = ("query", site.num_heads) if norm[1].startswith("q") else ("key", site.key_value_heads)
    if parameter.dim() == 2 and parameter.shape[0] == count:
        return 0, units
    if parameter.dim() == 1 and parameter.shape[0] in sizes:
        return None
    raise LayoutError(
        f"{site.label}.{name} normalizes all heads together, so the others change when one is removed; hw.ablate "
        "zeroes heads after it, and nothing can be cut."
    )


def _find_table(site: Site, name: str, parameter: nn.Parameter, sizes: set[int]) -> tuple[int, str] | None:
    axis = next((axis for end, axis in TABLES if f".{name}".endswith(f".{end}")), None)
    if axis is None or parameter.dim() <= axis or parameter.shape[axis] % site.num_heads:
        return None
    return (axis, "query") if parameter.shape[axis] // site.num_heads in {1, *sizes} else None


def _require_without_heads(site: Site, name: str, parameter: nn.Parameter, sizes: set[int]) -> None:
    """Raise `LayoutError` for a parameter of an unknown kind that has an axis as long as something of the heads."""
    if _OTHER_NORM.search(name) or any(f"{part}." in f"{name}." for part in _WITHOUT_HEADS):
        return
    counts = {site.num_heads, site.key_value_heads}
    if {*counts, *(count * size for count in counts for size in sizes)} & {*parameter.shape}:
        raise LayoutError(
            f"{site.label}.{name} of shape {tuple(parameter.shape)} may hold something of each of {site.num_heads} "
            "heads, and it is of no kind that is known; pass inputs=..., so that the result is compared with hw.ablate."
        )
