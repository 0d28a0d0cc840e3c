"""Experiments on one attention that only true heads pass.

What they test holds for every softmax attention, whatever its norms, positions, biases or gates, and for no other set
of features. Where values cannot be drawn apart, as they are the keys or another layer's, other experiments take the
place of the last one.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from headwise.errors import LayoutError
from headwise.heads.experiments.replay import Edit, Replay, clear, redraw
from headwise.heads.record import restored

# Positions at which single queries and keys are changed: enough to meet some that others attend to.
PROBES = 8


def check_heads(replay: Replay) -> None:
    """Run all experiments; raise `LayoutError` for a misread site or calls that are not repeatable."""
    before, site = replay.heads({}), replay.site
    if not torch.equal(before, replay.heads({})):
        raise LayoutError(
            f"{site.label}: called twice with the same inputs it gave two results, or none that is finite, so "
            "nothing can be proved; it draws random numbers or keeps state."
        )
    _check_weights_make_features(replay)
    _check_added_biases(replay, before)
    _check_heads_are_apart(replay, before)
    _check_queries_and_keys(replay, before)
    if any(head_slice.projection == "value" for head_slice in site.slices):
        _check_every_feature_weighs(replay)
        return
    _check_every_feature_reaches(replay, before)
    if site.borrows:
        _check_given_groups(replay, before)
    else:
        # all tokens have one value then, and heads give the same at each
        found = replay.heads({"key": clear})
        if replay.list_changes(found[:1].expand_as(found), found, (0,)):
            replay.refuse("with keys at zero, tokens have different values, so that values are not the keys")


def _check_weights_make_features(replay: Replay) -> None:
    """The rows of a head in the weight make its features, and no others."""
    for head_slice in replay.site.slices:
        if head_slice.obstacle is not None:
            continue
        before, biases = replay.project(head_slice), []
        for part in head_slice.parts:
            bias = part.owner._parameters.get(part.bias or "")
            biases += [] if bias is None else part.bias_view(bias)
        rows = [view for part in head_slice.parts for view in part.of(part.parameter)]
        for kind, views in (("rows", rows), ("biases", biases)):
            for head, view in enumerate(views):
                changed = replay.disturb(view, before, lambda one=head_slice: replay.project(one))
                what = f"changing the {head_slice.projection} {kind} of head {head}"
                _require(replay, what, changed, [head], "features")


def _check_added_biases(replay: Replay, before: Tensor) -> None:
    """A bias that the attention itself adds to the features of a head changes the output of that head alone."""
    for head_slice in replay.site.slices:
        projection, added = head_slice.projection, head_slice.added_bias
        for head, view in enumerate(() if added is None else added):
            changed = replay.disturb(view, before, lambda: replay.heads({}))
            # what a bias of the keys adds to the scores of a query is one number for all keys
            if changed or projection != "key":
                what = f"changing the {projection} bias of head {head}"
                _require(replay, what, changed, replay.list_own(projection, head), "heads")


def _check_heads_are_apart(replay: Replay, before: Tensor) -> None:
    """Changing the query, key or value of a head changes its outputs, and no others."""
    for head_slice in replay.site.slices:
        for head in range(head_slice.heads):

            def change(features: Tensor, head: int = head) -> None:
                features[..., head, :] = _shift(features[..., head, :])

            projection = head_slice.projection
            changed = replay.list_changes(before, replay.heads({projection: change}))
            what = f"changing the {projection} features of head {head}"
            _require(replay, what, changed, replay.list_own(projection, head), "heads")


def _check_queries_and_keys(replay: Replay, before: Tensor) -> None:
    """The query of a token changes the output at its own position only; its key that of all who attend to it."""
    tokens = {projection: draw.shape[:-2].numel() for projection, draw in replay.draws.items()}
    reached: dict[str, int] = {}
    for projection in (kind for kind in ("query", "key") if kind in tokens):
        shape, last, counts = replay.draws[projection].shape[:-2], tokens[projection] - 1, []
        for token in sorted({round(i * last / (PROBES - 1)) for i in range(PROBES)}):
            place = tuple(int(i) for i in torch.unravel_index(torch.tensor(token, device="cpu"), shape))

            def change(features: Tensor, place: tuple[int, ...] = place) -> None:
                features[place] = _shift(features[place])

            counts.append(len(replay.list_changes(before, replay.heads({projection: change}), (0,))))
        reached[projection] = max(counts)
    if reached["query"] > 1:
        replay.refuse(f"changing the query of one token changed the output at {reached['query']} positions")
    if reached["query"] == 0:
        replay.refuse("changing the query of one token changed nothing")
    # one query a sequence (a pooling head) has no second position, but then keys are as many as values alone
    one_each = tokens["query"] != tokens.get("key") == tokens.get("value", tokens.get("key"))
    if "key" in reached and reached["key"] < (1 if one_each else 2):
        replay.refuse(
            f"changing the key of one token changed the output at {reached['key']} positions, not at all that attend "
            "to it (the inputs need at least three different tokens)"
        )


def _check_every_feature_weighs(replay: Replay) -> None:
    """One feature of a query or key changes the weights of its head, and with them all features of its output.

    O_tc(V) = g_tc (sum_j A_tj (M_j V_j)_c + r_tc), whatever gates g, rotates M or adds to values r (relative
    positions). With N = O(V) - O(0) and D = O(V') - O(0) for drawn V and V', N / D depends on the weights A alone.
    """
    site = replay.site

    def weigh(edits: dict[str, Edit]) -> tuple[Tensor, Tensor]:
        drawn = replay.heads(edits)
        without, other = (replay.heads({**edits, "value": edit}) for edit in (clear, redraw))
        return drawn - without, other - without

    before = weigh({})
    scale = before[0].abs().max() * before[1].abs().max()
    for head_slice in (one for one in site.slices if one.projection != "value"):
        # features of different heads at once, as heads are apart
        for first in range(0, head_slice.head_size, head_slice.heads):
            places = [(first + head) % head_slice.head_size for head in range(head_slice.heads)]

            def flip(features: Tensor, places: list[int] = places) -> None:
                for head, place in enumerate(places):
                    features[..., head, place] *= -1.0

            after = weigh({head_slice.projection: flip})
            crossed = (after[0] * before[1] - before[0] * after[1]).abs() / scale
            weighs = (crossed > replay.unchanged).any(0)
            weighs = weighs[:, None] if head_slice.projection == "query" else site.group_queries(weighs)
            for head, place in enumerate(places):
                count = int(weighs.all(1)[head].sum())
                if count < site.head_size:
                    replay.refuse(
                        f"flipping feature {place} of the {head_slice.projection} of head {head} changed the weights "
                        f"of {count} of the {site.head_size} features of its output"
                    )


def _check_every_feature_reaches(replay: Replay, before: Tensor) -> None:
    """Changing one feature of a query or key changes all features of the outputs of its heads, and no others."""
    site = replay.site
    for head_slice in site.slices:
        members = site.num_heads // head_slice.heads
        for head, place in ((head, place) for head in range(head_slice.heads) for place in range(head_slice.head_size)):

            def flip(features: Tensor, head: int = head, place: int = place) -> None:
                features[..., head, place] *= -1.0

            after = replay.heads({head_slice.projection: flip})
            changed = ((after - before).abs() > replay.unchanged * before.abs().max()).any(0)
            own, counts = range(head * members, (head + 1) * members), changed.sum(-1).tolist()
            if counts != [site.head_size if index in own else 0 for index in range(site.num_heads)]:
                replay.refuse(
                    f"flipping feature {place} of the {head_slice.projection} of head {head} changed {counts} "
                    f"features of the outputs of heads; expected {site.head_size} of heads {own[0]} to {own[-1]}"
                )


def _check_given_groups(replay: Replay, before: Tensor) -> None:
    """Of the tensors that the attention is called with, the keys and values hold as many groups as are read."""
    site = replay.site

    def reaches_own(given: Tensor, groups: int) -> bool:
        # each group of a tensor its query heads alone
        members = site.num_heads // groups
        return all(
            replay.disturb(given.narrow(-2, group, 1), before, lambda: replay.heads({}))
            == list(range(group * members, (group + 1) * members))
            for group in range(groups)
        )

    counts = [count for count in range(site.num_heads, 0, -1) if site.num_heads % count == 0]
    seen = (n for n in counts if any(reaches_own(given, n) for given in _list_given(replay, n)))
    found = next(seen, None)
    if found != site.key_value_heads:
        given = "no keys or values of its heads" if found is None else f"keys and values of {found} heads"
        replay.refuse(f"it is called with {given}, and {site.key_value_heads} key/value heads are read")


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


def _require(replay: Replay, what: str, changed: list[int], own: list[int], things: str) -> None:
    others = [head for head in changed if head not in own]
    missed = [head for head in own if head not in changed]
    if others or missed:
        heads = ", ".join(map(str, (others or missed)[:6])) + (", ..." if len(others or missed) > 6 else "")
        did, would = ("changed", "would not") if others else ("did not change", "would")
        replay.refuse(f"{what} {did} the {things} of heads {heads}; true heads {would}")


def _shift(features: Tensor) -> Tensor:
    """Return the features of heads [..., e] in another order: other heads, whose mean and norm are the same."""
    return features.roll(1, -1) if features.shape[-1] > 1 else -features


def check_learned_queries(replay: Replay) -> None:
    """Raise `LayoutError` unless changing the learned query of a head changes the output of that head only."""
    (head_slice,) = replay.site.slices
    before = replay.outputs()
    for head in range(head_slice.heads):
        own = head_slice.of(head_slice.parameter.data)[head]
        with restored([own]):
            own += 1.0
            changed = (replay.outputs() != before).flatten(0, -3).any(-1).any(0).nonzero().flatten().tolist()
        if changed != [head]:
            replay.refuse(f"changing the query of head {head} changes the outputs of heads {changed}")
