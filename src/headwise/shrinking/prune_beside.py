"""What an attention holds of each head beside its projections: position tables, norms, sinks, scales."""

import re
from collections.abc import Iterable

from torch import nn

from headwise.errors import LayoutError
from headwise.heads.heads import Site
from headwise.heads.projection import read_projection

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
    for name, parameter, found in _list_parameters(site):
        if found is not None:
            yield name, parameter, *found
        elif not proved and _may_hold_heads(site, name, parameter):
            raise LayoutError(
                f"{site.label}.{name} of shape {tuple(parameter.shape)} may hold something of each of "
                f"{site.num_heads} heads, and it is of no kind that is known; pass inputs=..., so that the result is "
                "compared with hw.ablate."
            )


def list_guessed(site: Site) -> list[tuple[str, nn.Parameter, int, str]]:
    """Return the parameters of a site of no known kind that may hold something of each query head, as `list_beside`.

    A gate of each head, or of each of its features, is one. Only a comparison shows it.
    """
    lengths = {site.num_heads * size for size in (1, *_list_sizes(site))}
    guessed = []
    for name, parameter, found in _list_parameters(site):
        owner, _, attribute = name.rpartition(".")
        projection = read_projection(site.module.get_submodule(owner)) if attribute == "weight" else None
        axes = range(parameter.dim()) if projection is None else (projection.axis,)
        axis = next((axis for axis in axes if parameter.shape[axis] in lengths), None)
        if found is None and axis is not None and _may_hold_heads(site, name, parameter):
            guessed.append((name, parameter, axis, "query"))
    return guessed


def _list_parameters(site: Site) -> Iterable[tuple[str, nn.Parameter, tuple[int, str] | None]]:
    """Yield the parameters of a site beside its projections, with axis and kind of what they hold of each head."""
    read = {id(part.owner._parameters.get(part.attribute)) for part in site.parts}
    read |= {id(part.bias_parameter) for part in site.parts}
    if site.output is not None:
        # W_O may be a parameter among others of the attention itself
        own = site.output.owner is not site.module
        read |= {id(parameter) for parameter in (site.output.owner.parameters() if own else [site.output.parameter])}
    sizes = _list_sizes(site)
    for name, parameter in site.module.named_parameters():
        if id(parameter) not in read:
            yield name, parameter, _find_norm(site, name, parameter, sizes) or _find_table(site, name, parameter, sizes)


def _list_sizes(site: Site) -> set[int]:
    return {site.head_size, *(head_slice.head_size for head_slice in site.slices)}


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


def _may_hold_heads(site: Site, name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter of an unknown kind has an axis as long as something of the heads."""
    if any(pattern.search(name) for pattern in (_NORM, _OTHER_NORM)):
        return False
    if any(f"{part}." in f"{name}." for part in _WITHOUT_HEADS):
        return False
    counts, sizes = {site.num_heads, site.key_value_heads}, _list_sizes(site)
    return bool({*counts, *(count * size for count in counts for size in sizes)} & {*parameter.shape})
