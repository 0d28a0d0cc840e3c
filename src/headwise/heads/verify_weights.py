"""Experiments on the weights of one attention, for those whose projections are no module calls.

Nothing can be put in the place of queries, keys and values there. What tells heads apart is written into the weights:
all of them get zeros for one input, and one feature of each head gets that input back, so that moving it moves this
feature and nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from headwise.errors import HeadwiseError, NotFired
from headwise.heads.head_slice import HeadSlice
from headwise.heads.heads import Site
from headwise.heads.replay import RecordedCall, Replay, Uncalled, draw_noise
from headwise.heads.verify_shared import UNCHANGED, list_changes

# Tokens that are moved: some that others attend to, and some that attend to others.
PROBES = 5


class WeightReplay:
    """One site, called again and again with changed weights and inputs; its heads are read where they can be.

    That is at the input of W_O, and where W_O is a parameter, in the output of the module, with W_O replaced by one
    that copies features.

    Args:
        site: The site, of a copy in evaluation mode.
        call: A call that runs the site and its output projection.
    """

    def __init__(self, site: Site, call: RecordedCall) -> None:
        self.site, self.call = site, call

    def heads(self, call: RecordedCall | None = None) -> Tensor:
        """Return the outputs of the heads [T, H, e], in the recorded call or another one."""
        call = self.call if call is None else call
        sizes = self.site.num_heads, self.site.head_size
        if self.site.output_projection is not None:
            try:
                return Replay(self.site, call).outputs().flatten(0, -3)
            except Uncalled:
                if self.site.output is None or self.site.output.obstacle is not None:
                    raise
        assert self.site.output is not None
        with restored(list_views(self.site.output)) as views:
            without, heads = self._copy_through(call, views, range(0), 1.0), []
            width = without.shape[-1]
            features = range(sizes[0] * sizes[1])
            for first in range(0, len(features), width):
                chunk = features[first : first + width]
                once, twice = (self._copy_through(call, views, chunk, factor) - without for factor in (1.0, 2.0))
                if (twice - 2.0 * once).abs().max() > 1e-6 * once.abs().max().clamp_min(1e-12):
                    raise HeadwiseError(
                        f"{self.site.label}: its heads cannot be read, so nothing can be proved: its W_O, "
                        f"{self.site.output.name}, is a parameter, and its output is not linear in that (a norm?)."
                    )
                heads.append(once[..., : len(chunk)])
        return torch.cat(heads, -1).unflatten(-1, sizes).flatten(0, -3)

    def _copy_through(self, call: RecordedCall, views: Sequence[Tensor], features: range, factor: float) -> Tensor:
        """Return the module's output where W_O copies some features of all heads into its first entries."""
        size = self.site.head_size
        for view in views:
            view.zero_()
        for place, feature in enumerate(features):
            views[feature // size][feature % size, place] = factor
        return _read_output(self.site, call)

    def move(self, token: int, distance: float) -> RecordedCall:
        """Return the call with input 0 of one token of everything that may be projected moved."""

        def shift(rows: Tensor) -> None:
            rows[min(token, len(rows) - 1), 0] += distance

        return self._change(shift)

    def fill(self, pattern: Callable[[int], Tensor]) -> RecordedCall:
        """Return the call with input 0 of all tokens of everything that may be projected set: [T] by their number."""

        def write(rows: Tensor) -> None:
            rows[:, 0] = pattern(len(rows)).to(rows)

        return self._change(write)

    def _change(self, change: Callable[[Tensor], None]) -> RecordedCall:
        widths = {part.across for part in self.site.parts}
        changed = 0

        def copy_changed(value: object) -> object:
            nonlocal changed
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
                return value
            if value.shape[-1] not in widths:
                return value
            changed += 1
            copied = value.clone()
            rows = copied.flatten(0, -2)
            change(rows)
            return rows.view(copied.shape)

        args, kwargs = tree_map(copy_changed, (self.call.args, self.call.kwargs))
        if not changed:
            raise NotFired(
                f"{self.site.label}: none of its arguments has the {', '.join(map(str, sorted(widths)))} features that "
                "are projected, so nothing can be proved."
            )
        return replace(self.call, args=args, kwargs=kwargs)


class WeightExperiments:
    """The experiments on one site."""

    def __init__(self, replay: WeightReplay) -> None:
        self.replay, self.site = replay, replay.site
        self.views = {head_slice.projection: list_views(head_slice) for head_slice in self.site.slices}
        self.unchanged = UNCHANGED[replay.call.dtype]

    def run(self) -> None:
        """Run all; raise `LayoutError` for a misread site, `HeadwiseError` for one that cannot be proved."""
        first, second = self.replay.heads(), self.replay.heads()
        if not torch.equal(first, second):
            raise HeadwiseError(
                f"{self.site.label}: called twice with the same inputs it gave two results, so nothing can be proved; "
                "it draws random numbers or keeps state."
            )
        self._check_heads_are_apart()
        # of whole parameters: what is read as heads may not be all of theirs
        columns = {
            (id(part.owner), part.attribute): part.parameter.data.select(part.axes.inputs, 0)
            for part in self.site.parts
        }
        with restored(list(columns.values()), value=0.0):
            tokens = first.shape[0]
            probes = sorted({round(i * (tokens - 1) / (PROBES - 1)) for i in range(PROBES)})
            if self._find_moved(probes):
                raise HeadwiseError(
                    f"{self.site.label}: its weights were made blind to an input, which changed its heads all the "
                    "same, so nothing can be proved: what is projected is not what the module is given (a norm before "
                    "it?)."
                )
            for projection, views in self.views.items():
                for feature in range(self.site.head_size):
                    for view in views:
                        view[feature, 0] = 1.0
                    self._check_feature(projection, feature, probes)
                    for view in views:
                        view[feature, 0] = 0.0

    def _check_heads_are_apart(self) -> None:
        """Changing the weights of a head changes its outputs, and no others."""
        before = self.replay.heads()
        for projection, views in self.views.items():
            for head, view in enumerate(views):
                saved = view.clone()
                view.add_(draw_noise(saved))
                changed = list_changes(before, self.replay.heads(), (-2,), self.unchanged)
                view.copy_(saved)
                own = [head] if projection == "query" else list(self.site.list_members(head))
                if changed != own:
                    self._refuse(
                        f"changing the {projection} weights of head {head} changed heads {changed or 'none'}, not {own}"
                    )

    def _check_feature(self, projection: str, feature: int, probes: Sequence[int]) -> None:
        """One feature of each head sees a token move: that of a query, a key or a value."""
        moved = self._find_moved(probes)
        what = f"feature {feature} of each {projection}"
        if not moved:
            self._refuse(f"moving {what} changed nothing")
        positions = max(len(changed.any((1, 2)).nonzero()) for changed in moved)
        if projection == "query" and positions > 1:
            self._refuse(f"moving {what} of one token changed the output at {positions} positions, not at its own")
        if projection == "key" and positions < 2:
            self._refuse(
                f"moving {what} of one token changed the output at its own position, not at all that attend to it (the "
                "inputs need at least three different tokens)"
            )
        features = torch.stack([changed.any(0) for changed in moved]).any(0)
        if projection == "value":
            others = (features.sum(-1) > 2) & (features.sum(-1) == features.shape[-1])
            if not features[:, feature].all() or bool(others.any()):
                seen = features[0].nonzero().flatten().tolist()
                self._refuse(f"moving {what} changed features {seen} of the output of head 0")
        elif not features.all():
            head = int((~features.all(-1)).nonzero()[0])
            count = int(features[head].sum())
            self._refuse(
                f"moving {what} changed {count} of the {features.shape[-1]} features of the output of head {head}"
            )

    def _find_moved(self, probes: Sequence[int]) -> list[Tensor]:
        """Return, for each token that changed something when it was moved, what changed [T, H, e]."""
        before = self.replay.heads()
        scale = before.abs().max().clamp_min(1e-12)
        found = []
        for token in probes:
            after = self.replay.heads(self.replay.move(token, 1.0))
            changed = (after - before).abs() / scale > self.unchanged
            if bool(changed.any()):
                found.append(changed)
        return found

    def _refuse(self, finding: str) -> None:
        Replay(self.site, self.replay.call).refuse(finding)


def list_views(head_slice: HeadSlice) -> list[Tensor]:
    """Return the weights of each head [e, d], to be written to."""
    views = [view for part in head_slice.parts for view in part.view(part.parameter.data)]
    return [view.mT for view in views] if head_slice.transposed else views


@contextmanager
def restored(views: Sequence[Tensor], value: float | None = None) -> Iterator[Sequence[Tensor]]:
    """Give views of weights a value inside the block, and what they were at its end."""
    saved = [view.clone() for view in views]
    if value is not None:
        for view in views:
            view.fill_(value)
    try:
        yield views
    finally:
        for view, before in zip(views, saved, strict=True):
            view.copy_(before)


def _read_output(site: Site, call: RecordedCall) -> Tensor:
    """Return the first floating-point tensor that the site's module returns."""
    seen: list[object] = []
    handle = site.module.register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        call.again()
    finally:
        handle.remove()
    found = next(
        (leaf for leaf in tree_leaves(seen[:1]) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None
    )
    if found is None:
        raise NotFired(f"{site.label} was not called in a forward pass on the given inputs, or returned no tensor.")
    return found.detach().clone()
