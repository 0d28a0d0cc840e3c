"""The attention weights of modules that write their softmax out, and the proof that they are the weights of the heads.

A softmax does not tell what its axes are. So the outputs of the heads, read where W_O gets them, must be its weights
times the values, read where they are projected: this is checked in the first forward that is listened to, and again
until every axis has shown that it is read rightly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from headwise.errors import LayoutError
from headwise.heads.capture import ValueParts, split_heads
from headwise.heads.heads import Site
from headwise.heads.record import keep, record
from headwise.nn.multihead import VERY_NEGATIVE
from headwise.nn.scores import normalize_scores

SOFTMAXES = (torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax)
# Functions between the softmax and the product with the values that keep the order of heads, queries and keys.
KEPT = (
    *(Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double),
    *(Tensor.contiguous, Tensor.clone, torch.clone, Tensor.nan_to_num, torch.nan_to_num),
    *(Tensor.masked_fill, torch.masked_fill),
)
DROPPED = (F.dropout, torch.dropout)
# In units of the eps of what was computed.
TOLERANCE = 16


def is_provable(site: Site) -> bool:
    """Return whether the values and the outputs of a site's heads pass through modules, where they can be read."""
    return bool(site.value_modules) and (site.output_projection is not None or site.output is None)


def arrange_heads(tensor: Tensor, site: Site) -> Tensor | None:
    """Return scores or weights as [B, H, Q, K] if they may belong to the site's heads, else None.

    They may be [B, H, Q, K], have the heads in the axis of the batch, [B * H, Q, K], or the query heads of each
    key/value head in an axis of their own, [B, G, H / G, Q, K], or [B, H / G, G, Q, K] where keys are tiled.
    """
    shape, heads = tensor.shape, site.num_heads
    if tensor.dim() == 4 and shape[1] == heads:
        return tensor
    if tensor.dim() == 3 and shape[0] and shape[0] % heads == 0:
        return tensor.unflatten(0, (-1, heads))
    if tensor.dim() == 5 and shape[2 if site.tiled else 1] == site.key_value_heads and shape[1] * shape[2] == heads:
        return tensor.flatten(1, 2)
    return None


def read_settings(args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor | None, int, torch.dtype | None]:
    """Return the scores, the axis counted from the last, and the dtype that a softmax of torch was called with.

    >>> read_settings((torch.zeros(2, 3),), {"dim": 1})[1:]
    (-1, None)
    """
    scores = args[0] if args else kwargs.get("input")
    axis = kwargs.get("dim", next((given for given in args[1:2] if isinstance(given, int)), None))
    dtype = kwargs.get("dtype", next((given for given in args[2:] if isinstance(given, torch.dtype)), None))
    if not isinstance(scores, Tensor) or axis is None:
        return None, 0, dtype
    return scores, axis if axis < 0 else axis - scores.dim(), dtype


def hides_later_keys(scores: Tensor) -> bool:
    """Return whether query i of scores [B, H, Q, K] sees keys 0 to i only, as many queries as keys.

    >>> hides_later_keys(torch.zeros(1, 1, 2, 2)), hides_later_keys(torch.tensor([[[[0.0, -torch.inf], [0.0, 0.0]]]]))
    (False, True)
    """
    queries, keys = scores.shape[-2:]
    if queries != keys or queries < 2:
        return False
    later = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1)
    return bool((scores.detach() <= VERY_NEGATIVE).logical_or(~later).all())


def normalize_biased(scores: Tensor, biases: tuple[Tensor, ...], dtype: torch.dtype | None) -> Tensor:
    """Return softmax(scores + biases), [B, H, Q, K]; what the module's own masks forbid stays forbidden.

    They are in the scores already, as numbers whose exponentials are 0. A query has weights 0 where a bias leaves it
    only such keys; where the module itself leaves it only such keys, it keeps their scores.
    """
    forbidden = scores <= VERY_NEGATIVE
    forbidden = forbidden & ~forbidden.all(-1, keepdim=True)
    scores = scores if dtype is None else scores.to(dtype)
    for bias in biases:
        scores = scores + bias.to(scores.dtype)
    return normalize_scores(scores.masked_fill(forbidden, -torch.inf))


class FollowedWeights:
    """The weights of a softmax as they are read, before dropout and a mixer, and as they are used.

    Dropout in place has `spoiled` them; the weight of a score of no token, such as a learned sink, was `cut` off.
    """

    def __init__(self, weights: Tensor, given: Tensor) -> None:
        """Follow what the module was `given`: the weights, or what a mixer made of them."""
        self.weights, self.used = weights, given
        self.apart = given is not weights
        self.spoiled = self.cut = False

    def follow(self, func: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Note what a function of torch made of the weights."""
        if not args or args[0] is not self.used or not isinstance(output, Tensor):
            return
        if any(func is other for other in DROPPED):
            drops = kwargs.get("training", args[2] if len(args) > 2 else True)
            self.spoiled = bool(drops and kwargs.get("inplace", len(args) > 3 and args[3])) and not self.apart
            self.used, self.apart = output, True
        elif any(func is other for other in KEPT):
            self.used = output
            self.weights = self.weights if self.apart else output
        elif func is Tensor.__getitem__ and output.shape == (*args[0].shape[:-1], args[0].shape[-1] - 1):
            self.weights = self.weights[args[1]] if self.apart else output
            self.used, self.cut = output, True


@dataclass
class Witness:
    """What a forward of a module computed beside the weights: values [..., G, e], outputs of the heads [..., H, e]."""

    values: Tensor | None = None
    outputs: Tensor | None = None

    def take_outputs(self, site: Site, returned: object) -> None:
        """Take the outputs of the heads from what the module returned, where its W_O is not in it."""
        width = site.num_heads * site.head_size
        if self.outputs is None and not _holds_output(site):
            leaves = (leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.is_floating_point())
            joined = next((leaf for leaf in leaves if leaf.dim() > 1 and leaf.shape[-1] == width), None)
            self.outputs = None if joined is None else split_heads(joined, site)


@contextmanager
def watch(site: Site) -> Iterator[Witness]:
    """Yield what the forward of a site's module that runs inside the block computes."""
    witness, parts, modules = Witness(), ValueParts(site), site.value_modules
    held = [site.output_projection.module] if _holds_output(site) and site.output_projection is not None else []
    # before an ablation changes what W_O gets
    with record(modules, outputs=keep) as projected, record(held, inputs=keep, prepend=True) as joined:
        yield witness
    for call in projected:
        if witness.values is None:
            witness.values = parts.take(modules.index(call.module), call.output)
    if joined:
        witness.outputs = split_heads(joined[0].given, site)


def _holds_output(site: Site) -> bool:
    projection = site.output_projection
    return projection is not None and any(projection.module is part for part in site.module.modules())


def prove_weights(site: Site, used: Tensor, witness: Witness) -> set[int]:
    """Return the axes 0 to 2 of weights [B, H, Q, K] that are shown to be sequences, heads and queries.

    Weights times values are the outputs of the heads, and differ with the weights of another sequence, head or query.

    Raises:
        LayoutError: The outputs of the heads are something else, or cannot be read.
    """
    given = f"{site.label} ({type(site.module).__name__})"
    if witness.values is None or witness.outputs is None:
        what = "values" if witness.values is None else "outputs"
        raise LayoutError(
            f"{given} writes a softmax out, and that its weights are those of the heads cannot be shown, as the {what} "
            "of the heads pass through no module in this forward; run a forward without a cache first, or have it call "
            "scaled_dot_product_attention."
        )
    arranged = arrange_heads(used, site)
    assert arranged is not None  # of the same axes as the scores
    batch, heads, queries, keys = arranged.shape
    weights, outputs, values = (tensor.detach().nan_to_num() for tensor in (arranged, witness.outputs, witness.values))
    precise = torch.promote_types(weights.dtype, torch.float32)
    eps = max(torch.finfo(dtype).eps for dtype in (used.dtype, outputs.dtype, values.dtype))
    if weights.device.type != "cpu":
        eps = max(eps, torch.finfo(torch.float16).eps)  # products of single precision may have its mantissa
    least = TOLERANCE * eps
    slack = least * float(values.abs().max())
    groups = range(values.shape[-2])
    own = [next(group for group in groups if head in site.list_members(group)) for head in range(heads)]
    values = values[..., own, :].to(precise)
    for shaped in _arrange_tokens(outputs.to(precise), batch, queries):
        for summed in _arrange_tokens(values, batch, keys):

            def differs(maps: Tensor, expected: Tensor = shaped, given: Tensor = summed) -> bool:
                return bool(((maps.to(precise) @ given) - expected).abs().max() > slack)

            if differs(weights):
                continue
            uneven = {
                axis for axis in range(3) if bool((weights - weights.roll(1, axis)).abs().max() > TOLERANCE * eps)
            }
            same = keys > 1 and bool((summed - summed[..., :1, :]).abs().max() <= slack)
            if same and uneven and (used.dim() != 4 or heads in (batch, queries) or keys == site.head_size):
                raise LayoutError(
                    f"{given} writes a softmax out over {tuple(used.shape)}, and which of its axes are heads is not "
                    "shown by these inputs, as the values of all their tokens are the same; give other inputs first."
                )
            return {axis for axis in uneven if differs(weights.roll(1, axis))}
    if len(values.flatten(0, -3)) == batch * (keys - 1):
        raise LayoutError(
            f"{given} writes a softmax out over {keys} scores of each query, and has values of {keys - 1} tokens: one "
            "score is of no token, such as a learned sink. Weights and biases of its heads cannot be reached; read "
            "their outputs: Taps(heads, outputs=True)."
        )
    raise LayoutError(
        f"{given} writes a softmax out over {tuple(used.shape)}, read as (sequences, heads, queries, keys), and the "
        f"outputs of its heads {tuple(witness.outputs.shape)} are not these weights times their values "
        f"{tuple(witness.values.shape)}: its axes are others, something else is normalized, weights, values or "
        "outputs are changed on the way, or a cache holds more keys. Weights and biases of its heads cannot be "
        "reached; run a forward without a cache first, or have it call scaled_dot_product_attention."
    )


def _arrange_tokens(tensor: Tensor, batch: int, tokens: int) -> list[Tensor]:
    """Return what heads have for tokens [..., H, e] as [B, H, L, e], with sequences first or tokens first."""
    flat = tensor.flatten(0, -3)
    if len(flat) == tokens:
        # the same for all sequences
        return [flat.transpose(0, 1).expand(batch, -1, -1, -1)]
    if len(flat) != batch * tokens:
        return []
    first = flat.unflatten(0, (batch, tokens)).transpose(1, 2)
    return [first] if batch == 1 else [first, flat.unflatten(0, (tokens, batch)).permute(1, 2, 0, 3)]
