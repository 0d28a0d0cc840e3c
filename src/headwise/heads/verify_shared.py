"""Experiments on an attention whose values cannot be drawn apart: they are its keys, or another layer's."""

from collections import UserDict
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from headwise.heads.replay import Replay, draw_noise

# Where nothing may change, what is left is rounding; a change of the kind sought is far above it.
UNCHANGED = {torch.float64: 1e-9, torch.float32: 1e-5}


def check_shared(replay: Replay) -> None:
    """Raise `LayoutError` unless features of queries and keys reach their own heads, and groups have their keys."""
    _check_every_feature_reaches(replay)
    if replay.site.borrows:
        _check_given_groups(replay)
    else:
        _check_values_are_keys(replay)


def _check_every_feature_reaches(replay: Replay) -> None:
    """Changing one feature of a query or key changes all features of the outputs of its heads, and no others."""
    site, before = replay.site, replay.heads({})
    for head_slice in site.slices:
        members = site.num_heads // head_slice.heads
        for head in range(head_slice.heads):
            for place in range(head_slice.head_size):

                def flip(features: Tensor, head: int = head, place: int = place) -> None:
                    features[..., head, place] *= -1.0

                after = replay.heads({head_slice.projection: flip})
                changed = ((after - before).abs() > UNCHANGED[replay.call.dtype] * before.abs().max()).any(0)
                own = range(head * members, (head + 1) * members)
                counts = [int(changed[index].sum()) for index in range(site.num_heads)]
                if any(count != (site.head_size if index in own else 0) for index, count in enumerate(counts)):
                    replay.refuse(
                        f"flipping feature {place} of the {head_slice.projection} of head {head} changed {counts} "
                        f"features of the outputs of heads; expected {site.head_size} of heads {own[0]} to {own[-1]}"
                    )


def _check_values_are_keys(replay: Replay) -> None:
    """With keys at zero, all tokens have one value, and heads give the same at each."""

    def clear(features: Tensor) -> None:
        features.zero_()

    found = replay.heads({"key": clear})
    if list_changes(found[:1].expand_as(found), found, (0,), UNCHANGED[replay.call.dtype]):
        replay.refuse("with keys at zero, tokens have different values, so that values are not the keys")


def _check_given_groups(replay: Replay) -> None:
    """Of the tensors that the attention is called with, the keys and values hold as many groups as are read."""
    site = replay.site
    counts = [count for count in range(site.num_heads, 0, -1) if site.num_heads % count == 0]
    found = next((count for count in counts if _are_given(replay, count)), None)
    if found != site.key_value_heads:
        given = "no keys or values of its heads" if found is None else f"keys and values of {found} heads"
        replay.refuse(f"it is called with {given}, and {site.key_value_heads} key/value heads are read")


def _are_given(replay: Replay, groups: int) -> bool:
    """Return whether a tensor of the call holds something of each of some groups, for its query heads alone."""
    site, before = replay.site, replay.heads({})
    members = site.num_heads // groups
    own = [list(range(group * members, (group + 1) * members)) for group in range(groups)]
    for heads in _list_given(replay, groups):
        for group in range(groups):
            view = heads.narrow(-2, group, 1)
            saved = view.clone()
            view.copy_(draw_noise(saved))
            changed = list_changes(before, replay.heads({}), (-2,), UNCHANGED[replay.call.dtype])
            view.copy_(saved)
            if changed != own[group]:
                break
        else:
            return True
    return False


def _list_given(replay: Replay, groups: int) -> Iterator[Tensor]:
    """Yield views [..., G, e] of tensors of a call that may hold keys or values: [B, G, K, e] or [B, K, G * e]."""
    size, call = replay.site.head_size, replay.call
    leaves = tree_leaves((call.args, call.kwargs))
    leaves += [part for leaf in leaves if isinstance(leaf, UserDict) for part in tree_leaves(dict(leaf))]
    for tensor in leaves:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        if tensor.dim() == 4 and tensor.shape[-1] == size:
            yield from (tensor.movedim(axis, -2) for axis in (1, 2) if tensor.shape[axis] == groups)
        if tensor.dim() == 3 and tensor.shape[-1] == groups * size:
            yield tensor.unflatten(-1, (groups, size))


def list_changes(before: Tensor, after: Tensor, axes: tuple[int, ...], unchanged: float) -> list[int]:
    """Return the indices along `axes` at which two tensors differ by more than rounding, `unchanged`, relatively."""
    scale = before.abs().max().clamp_min(1e-12)
    others = [axis for axis in range(before.dim()) if axis - before.dim() not in axes and axis not in axes]
    return ((after - before).abs() / scale > unchanged).amax(others).nonzero().flatten().tolist()
