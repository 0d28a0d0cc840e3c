"""Experiments on one attention that only true heads pass.

What they test holds for every softmax attention, whatever its norms, positions, biases or gates, and for no other set
of features.

Experiments on an attention whose values cannot be drawn apart: they are its keys, or another layer's.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from headwise.errors import LayoutError
from headwise.heads.experiments.replay import Edit, Replay, clear, draw_noise, redraw
from headwise.heads.record import restored


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
                changed = ((after - before).abs() > replay.unchanged * before.abs().max()).any(0)
                own = range(head * members, (head + 1) * members)
                counts = [int(changed[index].sum()) for index in range(site.num_heads)]
                if any(count != (site.head_size if index in own else 0) for index, count in enumerate(counts)):
                    replay.refuse(
                        f"flipping feature {place} of the {head_slice.projection} of head {head} changed {counts} "
                        f"features of the outputs of heads; expected {site.head_size} of heads {own[0]} to {own[-1]}"
                    )


def _check_values_are_keys(replay: Replay) -> None:
    """With keys at zero, all tokens have one value, and heads give the same at each."""
    found = replay.heads({"key": clear})
    if replay.list_changes(found[:1].expand_as(found), found, (0,)):
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
            with restored([view]):
                view.copy_(draw_noise(view))
                changed = replay.list_changes(before, replay.heads({}))
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


# Positions at which single queries and keys are changed: enough to meet some that others attend to.
PROBES = 8


class Experiments:
    """The experiments on one site."""

    def __init__(self, replay: Replay) -> None:
        self.replay, self.site = replay, replay.site
        self.slices = {head_slice.projection: head_slice for head_slice in self.site.slices}

    def run(self) -> None:
        """Run all; raise `LayoutError` for a misread site or calls that are not repeatable."""
        if not torch.equal(self.replay.heads({}), self.replay.heads({})):
            raise LayoutError(
                f"{self.site.label}: called twice with the same inputs it gave two results, or none that is finite, so "
                "nothing can be proved; it draws random numbers or keeps state."
            )
        self._check_weights_make_features()
        self._check_added_biases()
        self._check_heads_are_apart()
        self._check_queries_and_keys()
        if "value" in self.slices:
            self._check_every_feature_weighs()
        else:
            check_shared(self.replay)

    def _check_weights_make_features(self) -> None:
        """The rows of a head in the weight make its features, and no others."""
        for head_slice in self.site.slices:
            if head_slice.obstacle is not None:
                continue
            before = self.replay.project(head_slice)
            rows = [view for part in head_slice.parts for view in part.of(part.parameter)]
            biases = [
                view
                for part in head_slice.parts
                if (bias := part.owner._parameters.get(part.bias or "")) is not None
                for view in part.bias_view(bias)
            ]
            for what, views in (("rows", rows), ("biases", biases)):
                for head, view in enumerate(views):
                    with restored([view]):
                        view.add_(draw_noise(view))
                        changed = self.replay.list_changes(before, self.replay.project(head_slice))
                    self._require(
                        f"changing the {head_slice.projection} {what} of head {head}", changed, [head], "features"
                    )

    def _check_added_biases(self) -> None:
        """A bias that the attention itself adds to the features of a head changes the output of that head alone."""
        before = self.replay.heads({})
        for projection, head_slice in self.slices.items():
            for head, view in enumerate(() if head_slice.added_bias is None else head_slice.added_bias):
                with restored([view]):
                    view.add_(draw_noise(view))
                    changed = self.replay.list_changes(before, self.replay.heads({}))
                if projection == "key" and not changed:
                    # what it adds to the scores of a query is one number for all keys
                    continue
                own = self._list_own(projection, head)
                self._require(f"changing the {projection} bias of head {head}", changed, own, "heads")

    def _check_heads_are_apart(self) -> None:
        """Changing the query, key or value of a head changes its outputs, and no others."""
        before = self.replay.heads({})
        for projection, head_slice in self.slices.items():
            for head in range(head_slice.heads):

                def change(features: Tensor, head: int = head) -> None:
                    features[..., head, :] = _shift(features[..., head, :])

                changed = self.replay.list_changes(before, self.replay.heads({projection: change}))
                own = self._list_own(projection, head)
                self._require(f"changing the {projection} features of head {head}", changed, own, "heads")

    def _check_queries_and_keys(self) -> None:
        """The query of a token changes the output at its own position only; its key that of all who attend to it."""
        before = self.replay.heads({})
        tokens = {projection: draw.shape[:-2].numel() for projection, draw in self.replay.draws.items()}
        # one query a sequence (a pooling head) has no second position, but then keys are as many as values alone
        one_each = tokens["query"] != tokens.get("key") == tokens.get("value", tokens.get("key"))
        reached: dict[str, list[int]] = {projection: [] for projection in ("query", "key") if projection in tokens}
        for projection, counts in reached.items():
            shape = self.replay.draws[projection].shape[:-2]
            last = tokens[projection] - 1
            for token in sorted({round(i * last / (PROBES - 1)) for i in range(PROBES)}):
                place = tuple(int(i) for i in torch.unravel_index(torch.tensor(token, device="cpu"), shape))

                def change(features: Tensor, place: tuple[int, ...] = place) -> None:
                    features[place] = _shift(features[place])

                counts.append(len(self.replay.list_changes(before, self.replay.heads({projection: change}), (0,))))
        if max(reached["query"]) > 1:
            self.replay.refuse(
                f"changing the query of one token changed the output at {max(reached['query'])} positions"
            )
        if max(reached["query"]) == 0:
            self.replay.refuse("changing the query of one token changed nothing")
        if "key" in reached and max(reached["key"]) < (1 if one_each else 2):
            self.replay.refuse(
                f"changing the key of one token changed the output at {max(reached['key'])} positions, not at all that "
                "attend to it (the inputs need at least three different tokens)"
            )

    def _check_every_feature_weighs(self) -> None:
        """One feature of a query or key changes the weights of its head, and with them all features of its output.

        O_tc(V) = g_tc (sum_j A_tj (M_j V_j)_c + r_tc), whatever gates g, rotates M or adds to values r (relative
        positions). With N = O(V) - O(0) and D = O(V') - O(0) for drawn V and V', N / D depends on the weights A alone.
        """
        before = self._weigh({})
        scale = before[0].abs().max() * before[1].abs().max()
        for projection in ("query", "key"):
            head_slice = self.slices[projection]
            # features of different heads at once, as heads are apart
            for first in range(0, head_slice.head_size, head_slice.heads):
                places = [(first + head) % head_slice.head_size for head in range(head_slice.heads)]

                def flip(features: Tensor, places: list[int] = places) -> None:
                    for head, place in enumerate(places):
                        features[..., head, place] *= -1.0

                after = self._weigh({projection: flip})
                crossed = (after[0] * before[1] - before[0] * after[1]).abs() / scale
                weighs = (crossed > self.replay.unchanged).any(0)
                weighs = weighs[:, None] if projection == "query" else self.site.group_queries(weighs)
                weighs = weighs.all(1)
                for head, place in enumerate(places):
                    count = int(weighs[head].sum())
                    if count < self.site.head_size:
                        self.replay.refuse(
                            f"flipping feature {place} of the {projection} of head {head} changed the weights of "
                            f"{count} of the {self.site.head_size} features of its output"
                        )

    def _weigh(self, edits: dict[str, Edit]) -> tuple[Tensor, Tensor]:
        """Return what two drawings of the values add to the output of heads without values, [T, H, e] each."""
        drawn = self.replay.heads(edits)
        without, other = (self.replay.heads({**edits, "value": edit}) for edit in (clear, redraw))
        return drawn - without, other - without

    def _list_own(self, projection: str, head: int) -> list[int]:
        """Return the query heads that a head of a projection belongs to."""
        return [head] if projection == "query" else list(self.site.list_members(head))

    def _require(self, what: str, changed: list[int], own: list[int], things: str) -> None:
        others = [head for head in changed if head not in own]
        if others:
            self.replay.refuse(f"{what} changed the {things} of heads {_format_heads(others)}; true heads would not")
        missed = [head for head in own if head not in changed]
        if missed:
            self.replay.refuse(f"{what} did not change the {things} of heads {_format_heads(missed)}; true heads would")


def _shift(features: Tensor) -> Tensor:
    """Return the features of heads [..., e] in another order: other heads, whose mean and norm are the same."""
    return features.roll(1, -1) if features.shape[-1] > 1 else -features


def _format_heads(heads: list[int]) -> str:
    return ", ".join(map(str, heads[:6])) + (", ..." if len(heads) > 6 else "")


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
