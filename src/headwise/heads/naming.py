"""Where an attention module stands in a model: its layer, its stack, its kind, and the module that plays W_O."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from headwise.heads.head_slice import HeadSlice, OutputProjection
from headwise.heads.projection import Projection, read_projection

# A module of this name may be W_O, or a block that holds it, a norm and a sum: only a projection is taken.
AMBIGUOUS = ("output", "..output")
CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|src_attn|context_attn", re.IGNORECASE)


def joined(name: str, attribute: str) -> str:
    """Return the dotted name of an attribute of the module called `name`, which is empty for the model itself."""
    return f"{name}.{attribute}" if name else attribute


def place(model: nn.Module, name: str) -> dict:
    """Return kind ("self" or "cross"), layer and stack of a site.

    The layer is the number of the site in the innermost list of modules of one class: a T5 block is a list too, of
    an attention and a feed-forward layer, and is no stack. Where there is no such list, the innermost number counts.
    """
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    stacks = [i for i in numbers if _is_stack(model.get_submodule(".".join(parts[:i])))]
    last = (stacks or numbers or [None])[-1]
    layer = 0 if last is None else int(parts[last])
    stack = "" if last is None else ".".join(parts[:last])
    own = parts if last is None else parts[max(last - 1, 0) :]
    module, parent = model.get_submodule(name), model.get_submodule(".".join(parts[:-1]))
    torch_cross = isinstance(parent, nn.TransformerDecoderLayer) and parts[-1] == "multihead_attn"
    told = getattr(module, "is_cross_attention", None) is True
    kind = "cross" if torch_cross or told or CROSS.search(".".join(own)) else "self"
    return {"kind": kind, "layer": layer, "stack": stack}


def find_output_projection(
    model: nn.Module, name: str, module: nn.Module, candidates: Sequence[str], width: int | None
) -> OutputProjection | None:
    """Return the place of W_O: the first candidate at which a module stands that can take the concatenated heads.

    A projection of another width cannot. A module that is no projection, such as an aggregator, can.

    Args:
        model: The model.
        name: Name of the attention module in it.
        module: The attention module.
        candidates: Attribute paths from the attention module; from its parent with a leading "..".
        width: H * e; None where it is not known, and any projection will do.
    """
    for candidate in candidates:
        owner, path = module, candidate
        if candidate.startswith(".."):
            if not name:
                continue
            owner, path = model.get_submodule(name.rpartition(".")[0]), candidate[2:]
        *middle, attribute = path.split(".")
        for part in middle:
            owner = owner._modules.get(part) if isinstance(owner, nn.Module) else None
        found = owner._modules.get(attribute) if isinstance(owner, nn.Module) else None
        if owner is None or found is None:
            continue
        projection = read_projection(found)
        fits = candidate not in AMBIGUOUS if projection is None else width in (None, projection.columns)
        if fits:
            return OutputProjection(owner, attribute)
    return None


def output_width(output_projection: OutputProjection | None) -> int | None:
    """Return the input features of the module that plays W_O, where it is a projection."""
    projection = None if output_projection is None else read_projection(output_projection.module)
    return None if projection is None else projection.columns


def output_slice(name: str, output_projection: OutputProjection, heads: int, size: int) -> HeadSlice | None:
    """Return the heads of W_O, whose module has this name, or None where that module is no projection of them."""
    projection = read_projection(output_projection.module)
    if projection is None or projection.columns != heads * size:
        return None
    return HeadSlice(
        "output",
        f"{name}.{projection.path}weight",
        projection.owner,
        "weight",
        heads,
        size,
        axis=1 - projection.axis,
        module=projection.module,
        along=projection.columns,
        across=projection.rows,
        obstacle=projection.obstacle,
    )


def projection_slice(
    kind: str, name: str, projection: Projection, heads: int, size: int, start: int = 0, stride: int = 0
) -> HeadSlice:
    """Return the heads of one of query, key and value in a projection."""
    return HeadSlice(
        kind,
        f"{name}.{projection.path}weight",
        projection.owner,
        "weight",
        heads,
        size,
        start=start,
        stride=stride,
        axis=projection.axis,
        bias=projection.bias,
        module=projection.module,
        along=projection.rows,
        across=projection.columns,
        obstacle=projection.obstacle,
    )


def _is_stack(container: nn.Module) -> bool:
    return len({type(child) for child in container.children()}) == 1
