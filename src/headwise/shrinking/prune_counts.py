"""Where an attention counts its heads: integer attributes of its modules, which follow when heads are removed."""

from collections.abc import Iterator

from torch import nn

from headwise.heads.heads import Site
from headwise.heads.irregular import list_functions
from headwise.heads.layout_steps import HEAD_SIZE, KEY_COUNTS, NUM_HEADS, RATIOS
from headwise.nn.resized import GROUPS

QUERY_COUNTS = (*NUM_HEADS, "num_query_heads", "encoder_attention_heads", "decoder_attention_heads", "attention_heads")
# The width of all heads together.
WIDTHS = ("all_head_size", "inner_dim", "split_size", "attn_dim")
HEAD_SIZES = (*HEAD_SIZE, "d_kv")


def list_counts(site: Site, heads: int, groups: int) -> Iterator[tuple[nn.Module, dict[str, int]]]:
    """Yield the modules of a site that count heads, and their attributes when `heads` in `groups` are left."""
    now, new = _count_names(site, site.num_heads, site.key_value_heads), _count_names(site, heads, groups)
    joins = _reads(site.module, "embed_dim") and not isinstance(site.module, nn.MultiheadAttention)
    for module in site.module.modules():
        changed = {}
        for name, value in vars(module).items():
            if isinstance(value, bool) or not isinstance(value, int):
                continue
            kind = "width" if name == "embed_dim" and joins and module is site.module else _KINDS.get(name)
            if kind is not None and value in now[kind]:
                changed[name] = new[kind][now[kind].index(value)]
        changed = {name: value for name, value in changed.items() if value != getattr(module, name)}
        if changed:
            yield module, changed
    if groups < heads and not counts_groups(site):
        # the attention functions of transformers ask every module for it
        yield site.module, {GROUPS: heads // groups}


def counts_groups(site: Site) -> bool:
    """Return whether a module of a site counts key/value heads apart from query heads."""
    return any(
        type(vars(module).get(name)) is int for module in site.module.modules() for name in (*RATIOS, *KEY_COUNTS)
    )


def find_configured_count(site: Site) -> str | None:
    """Return the number of heads that the forward of a site reads from its configuration at each call, if it does."""
    config = getattr(site.module, "config", None)
    names = {name for function in list_functions(site.module) for name in function.__code__.co_names}
    own = {*vars(site.module)}
    counts = [name for name in (*QUERY_COUNTS, *KEY_COUNTS) if name in names and name not in own]
    return next((name for name in counts if "config" in names and hasattr(config, name)), None)


def _count_names(site: Site, heads: int, groups: int) -> dict[str, list[int]]:
    sizes = sorted({head_slice.head_size for head_slice in site.slices})
    return {
        "query": [heads],
        "key": [groups],
        "ratio": [heads // groups],
        "width": [heads * size for size in sizes],
    }


_KINDS = {
    **dict.fromkeys(QUERY_COUNTS, "query"),
    **dict.fromkeys(KEY_COUNTS, "key"),
    **dict.fromkeys(RATIOS, "ratio"),
    **dict.fromkeys(WIDTHS, "width"),
}


def _reads(module: nn.Module, name: str) -> bool:
    return any(name in function.__code__.co_names for function in list_functions(module))
