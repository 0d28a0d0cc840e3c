"""Experiments on the weights of one attention, for those whose projections are no module calls.

Nothing can be put in the place of queries, keys and values there. What tells heads apart is written into the weights:
all of them get zeros for one input, and one feature of each head gets that input back, so that moving it moves this
feature and nothing else.

Whether heads attend: each output is a mean of the values, by weights over positions that queries and keys choose.

That heads are apart does not say so. The heads of linear attention, of a recurrent state (mLSTM) or of retention are
apart too, and their weights are of any sign or sum to anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from headwise.errors import HeadwiseError, NotFired
from headwise.heads.experiments.replay import Edit, Replay, Uncalled, clear, draw_noise, redraw
from headwise.heads.heads import Site
from headwise.heads.record import Call, clone, record, restored
from headwise.heads.view import HeadView
from headwise.nn.scores import Attended, Observer

# Tokens that are moved: some that others attend to, and some that attend to others.
PROBES = 5


class WeightReplay(Replay):
    """One site, called again and again with changed weights and inputs; its heads are read where they can be.

    They are read at the input of W_O, and where W_O is a parameter, in the output of the module, with W_O replaced by
    one that copies features.
    """

    def read(self, call: Call | None = None) -> Tensor:
        """Return the outputs of the heads [T, H, e], in the recorded call or another one."""
        call = self.call if call is None else call
        sizes = self.site.num_heads, self.site.head_size
        if self.site.output_projection is not None:
            try:
                return self.outputs(call).flatten(0, -3)
            except Uncalled:
                if self.site.output is None or self.site.output.obstacle is not None:
                    raise
        assert self.site.output is not None
        views = list_views(self.site.output)

        def copy_through(features: range, factor: float) -> Tensor:
            # the module's output where W_O copies some features of all heads into its first entries
            for view in views:
                view.zero_()
            for place, feature in enumerate(features):
                views[feature // sizes[1]][feature % sizes[1], place] = factor
            return _read_output(self.site, call)

        with restored(views):
            without, heads = copy_through(range(0), 1.0), []
            width, features = without.shape[-1], range(sizes[0] * sizes[1])
            for first in range(0, len(features), width):
                chunk = features[first : first + width]
                once, twice = (copy_through(chunk, factor) - without for factor in (1.0, 2.0))
                if (twice - 2.0 * once).abs().max() > 1e-6 * once.abs().max().clamp_min(1e-12):
                    raise HeadwiseError(
                        f"{self.site.label}: its heads cannot be read, so nothing can be proved: its W_O, "
                        f"{self.site.output.name}, is a parameter, and its output is not linear in that (a norm?)."
                    )
                heads.append(once[..., : len(chunk)])
        return torch.cat(heads, -1).unflatten(-1, sizes).flatten(0, -3)

    def move(self, token: int, distance: float) -> Call:
        """Return the call with input 0 of one token of everything that may be projected moved."""

        def shift(rows: Tensor) -> None:
            rows[min(token, len(rows) - 1), 0] += distance

        return self._change(shift)

    def fill(self, pattern: Callable[[int], Tensor]) -> Call:
        """Return the call with input 0 of all tokens of everything that may be projected set: [T] by their number."""

        def write(rows: Tensor) -> None:
            rows[:, 0] = pattern(len(rows)).to(rows)

        return self._change(write)

    def _change(self, change: Callable[[Tensor], None]) -> Call:
        widths = {part.across for part in self.site.parts}

        def is_projected(value: object) -> bool:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return False
            return value.dim() > 1 and value.shape[-1] in widths

        def copy_changed(value: Any) -> Any:
            if not is_projected(value):
                return value
            rows = value.clone().flatten(0, -2)
            change(rows)
            return rows.view(value.shape)

        args, kwargs = tree_map(copy_changed, (self.call.args, self.call.kwargs))
        if not any(map(is_projected, tree_leaves((self.call.args, self.call.kwargs)))):
            raise NotFired(
                f"{self.site.label}: none of its arguments has the {', '.join(map(str, sorted(widths)))} features that "
                "are projected, so nothing can be proved."
            )
        return replace(self.call, args=args, kwargs=kwargs)


def check_weights(replay: WeightReplay) -> None:
    """Run all; raise `LayoutError` for a misread site, `HeadwiseError` for one that cannot be proved."""
    site, before = replay.site, replay.read()
    if not torch.equal(before, replay.read()):
        raise HeadwiseError(
            f"{site.label}: called twice with the same inputs it gave two results, so nothing can be proved; it draws "
            "random numbers or keeps state."
        )
    views = {head_slice.projection: list_views(head_slice) for head_slice in site.slices}
    for projection, own_views in views.items():
        for head, view in enumerate(own_views):
            changed, own = replay.disturb(view, before, replay.read), replay.list_own(projection, head)
            if changed != own:
                replay.refuse(
                    f"changing the {projection} weights of head {head} changed heads {changed or 'none'}, not {own}"
                )
    # of whole parameters: what is read as heads may not be all of theirs
    columns = {(id(part.owner), part.attribute): part.parameter.data.select(part.axes.inputs, 0) for part in site.parts}
    with restored(columns.values(), value=0.0):
        probes = sorted({round(i * (len(before) - 1) / (PROBES - 1)) for i in range(PROBES)})
        if _find_moved(replay, probes):
            raise HeadwiseError(
                f"{site.label}: its weights were made blind to an input, which changed its heads all the same, so "
                "nothing can be proved: what is projected is not what the module is given (a norm before it?)."
            )
        for projection, own_views in views.items():
            for feature in range(site.head_size):
                with restored(view[feature, 0] for view in own_views):
                    for view in own_views:
                        view[feature, 0] = 1.0
                    _check_feature(replay, projection, feature, _find_moved(replay, probes))


def _check_feature(replay: WeightReplay, projection: str, feature: int, moved: Sequence[Tensor]) -> None:
    """One feature of each head sees a token move, a feature of a query, a key or a value."""
    what = f"moving feature {feature} of each {projection}"
    if not moved:
        replay.refuse(f"{what} changed nothing")
    positions = max(len(changed.any((1, 2)).nonzero()) for changed in moved)
    if projection == "query" and positions > 1:
        replay.refuse(f"{what} of one token changed the output at {positions} positions, not at its own")
    if projection == "key" and positions < 2:
        replay.refuse(
            f"{what} of one token changed the output at its own position, not at all that attend to it (the inputs "
            "need at least three different tokens)"
        )
    features = torch.stack([changed.any(0) for changed in moved]).any(0)
    counts, size = features.sum(-1), features.shape[-1]
    if projection == "value" and (not features[:, feature].all() or ((counts > 2) & (counts == size)).any()):
        seen = features[0].nonzero().flatten().tolist()
        replay.refuse(f"{what} changed features {seen} of the output of head 0")
    if projection != "value" and not features.all():
        head = int((counts < size).nonzero()[0])
        replay.refuse(f"{what} changed {int(counts[head])} of the {size} features of the output of head {head}")


def _find_moved(replay: WeightReplay, probes: Sequence[int]) -> list[Tensor]:
    """Return, for each token that changed something when it was moved, what changed [T, H, e]."""
    before = replay.read()
    scale = before.abs().max().clamp_min(1e-12)
    after = (replay.read(replay.move(token, 1.0)) for token in probes)
    changed = [(one - before).abs() / scale > replay.unchanged for one in after]
    return [one for one in changed if one.any()]


def list_views(head_slice: HeadView) -> list[Tensor]:
    """Return the weights of each head [e, d], to be written to."""
    views = [view for part in head_slice.parts for view in part.of(part.parameter.data)]
    return [view.mT for view in views] if head_slice.transposed else views


def _read_output(site: Site, call: Call) -> Tensor:
    """Return the first floating-point tensor that the site's module returns."""
    with record([site.module], outputs=clone) as calls:
        call.again()
    leaves = tree_leaves([one.output for one in calls[:1]])
    found = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
    if found is None:
        raise NotFired(f"{site.label} was not called in a forward pass on the given inputs, or returned no tensor.")
    return found


# Patterns of tokens whose values are 1 while those of the others are 0.
PATTERNS = 8
# Relative to the largest output. Some code computes its softmax in float32, whatever the precision of the rest.
TOLERANCE = 1e-3
# The most for which single tokens are tried one after another.
MOST_TOKENS = 256


def weighs_positions(site: Site, call: Call, *, by_weights: bool) -> bool:
    """Return whether heads that were proved to be apart are seen to attend: by weights >= 0 that sum to 1.

    With values of 1 everywhere the output is sum_j A_tj = 1, whatever the queries and keys; with values of 1 at some
    tokens it is between 0 and 1. A gate after the weights multiplies both. Where positions rotate the values, those of
    single tokens have outputs of the lengths A_tj and of one direction each. Where neither holds, the weights are read,
    if the scores of the site are reached; attention sinks are positions too. `by_weights` has values written through
    the weights, where no module call returns them.
    """
    if all(head_slice.projection != "value" for head_slice in site.slices):
        # they are its keys, or another layer's
        return _see_weights(site, call)
    read = _read_by_weights(site, call) if by_weights else _read_replaced(site, call)
    try:
        seen = _see_values(read) or _see_rotated(read)
    except HeadwiseError:
        seen = False
    return seen or _see_weights(site, call)


# The heads [T, H, e] when the value of each token is 0 or 1 in all features, with one or another drawing of queries and
# keys, less those when it is 0.
Read = Callable[[Callable[[int], Tensor], bool], Tensor]


def _see_values(read: Read) -> bool:
    whole, again = read(_ones, False), read(_ones, True)
    scale = whole.abs().max()
    if not scale > 0.0 or (again - whole).abs().max() > TOLERANCE * scale:
        return False
    for seed in range(PATTERNS):
        share = read(lambda tokens, seed=seed: _draw_pattern(tokens, seed), False) * whole.sign()
        if share.min() < -TOLERANCE * scale or (share - whole.abs()).max() > TOLERANCE * scale:
            return False
    return True


def _see_rotated(read: Read) -> bool:
    counted: list[int] = []

    def count(tokens: int) -> Tensor:
        counted.append(tokens)
        return _ones(tokens)

    total = read(count, False).new_zeros(())
    if counted[-1] > MOST_TOKENS:
        return False
    for token in range(counted[-1]):
        alone = read(lambda tokens, token=token: torch.eye(tokens, device="cpu")[token], False)
        lengths = alone.norm(dim=-1)
        furthest = alone.gather(0, lengths.argmax(0)[None, :, None].expand(1, *alone.shape[1:]))
        if ((alone * furthest).sum(-1) < -TOLERANCE).any():
            return False
        total = total + lengths / alone.shape[-1] ** 0.5
    return bool(((total - 1.0).abs() < TOLERANCE).all())


def _draw_pattern(tokens: int, seed: int) -> Tensor:
    return (draw_noise(_ones(tokens), seed=70 + seed) > 0.0).float()


def _ones(tokens: int) -> Tensor:
    # whatever the default device is
    return torch.ones(tokens, device="cpu")


def _read_replaced(site: Site, call: Call) -> Read:
    replay = Replay(site, call)

    def read(pattern: Callable[[int], Tensor], other: bool) -> Tensor:
        def fill(features: Tensor) -> None:
            rows = features.shape[:-2]
            features.copy_(pattern(rows.numel()).to(features).view(*rows, 1, 1).expand_as(features))

        edits: dict[str, Edit] = dict.fromkeys(("query", "key"), partial(redraw, seed=61)) if other else {}
        return replay.heads({**edits, "value": fill}) - replay.heads({**edits, "value": clear})

    return read


def _read_by_weights(site: Site, call: Call) -> Read:
    replay = WeightReplay(site, call)
    views = {head_slice.projection: list_views(head_slice) for head_slice in site.slices}

    def read(pattern: Callable[[int], Tensor], other: bool) -> Tensor:
        with restored(view for each in views.values() for view in each):
            # of all that is projected, values alone see the first input
            for projection, each in views.items():
                for view in each:
                    view[:, 0] = 1.0 if projection == "value" else 0.0
                    if other and projection != "value":
                        view[:, 1:] = draw_noise(view[:, 1:], seed=61)
            return replay.read(replay.fill(pattern)) - replay.read(replay.fill(lambda tokens: 0.0 * _ones(tokens)))

    return read


def _see_weights(site: Site, call: Call) -> bool:
    """Return whether the scores of a site are reached, and their weights are at least 0 and sum to at most 1."""
    seen: list[Attended] = []
    if site.scores is None:
        return False
    try:
        stop = site.reach_scores().listen(Observer(seen.append, weights=True))
        try:
            call.again()
        finally:
            stop()
    except Exception:
        # no proof either way: a bare error of the model's would only hide what was proved
        return False
    found = [(one.weights, one.weights.sum(-1)) for one in seen if one.weights is not None]
    return bool(found) and all(
        bool((weights >= -TOLERANCE).all()) and bool((total <= 1.0 + TOLERANCE).all()) and bool((total > 0.0).any())
        for weights, total in found
    )
