"""Experiments on one attention that only true heads pass.

What they test holds for every softmax attention, whatever its norms, positions, biases or gates, and for no other set
of features.
"""

import torch
from torch import Tensor

from headwise.errors import LayoutError
from headwise.heads.replay import Replay, draw_noise

# Where nothing may change, what is left in float64 is rounding; a change of the kind sought is far above it.
UNCHANGED = 1e-9
# Positions at which single queries and keys are changed: enough to meet some that others attend to.
PROBES = 8


class Experiments:
    """The experiments on one site."""

    def __init__(self, replay: Replay) -> None:
        self.replay, self.site = replay, replay.site
        self.slices = {head_slice.projection: head_slice for head_slice in self.site.slices}
        self.members = self.site.num_heads // self.site.key_value_heads

    def run(self) -> None:
        """Run all; raise `LayoutError` for a misread site or calls that are not repeatable."""
        if not torch.equal(self.replay.heads({}), self.replay.heads({})):
            raise LayoutError(
                f"{self.site.label}: called twice with the same inputs in float64 it gave two results, or none that "
                "is finite, so nothing can be proved; it draws random numbers, keeps state or cannot take float64."
            )
        self._check_weights_make_features()
        self._check_features_share_weights()
        self._check_heads_are_apart()
        self._check_queries_and_keys()

    def _check_weights_make_features(self) -> None:
        """The rows of a head in the weight make its features, and no others."""
        for head_slice in self.site.slices:
            if head_slice.obstacle is not None:
                continue
            before = self.replay.project(head_slice)
            views = [("rows", head_slice.view(head_slice.parameter))]
            bias = head_slice.owner._parameters.get(head_slice.bias or "")
            if bias is not None:
                views.append(("biases", head_slice.bias_view(bias)))
            for what, view in views:
                for head in range(head_slice.heads):
                    saved = view[head].clone()
                    view[head] += draw_noise(saved)
                    changed = _find_changes(before, self.replay.project(head_slice), (-2,))
                    view[head] = saved
                    self._require(
                        f"changing the {head_slice.projection} {what} of head {head}", changed, [head], "features"
                    )

    def _check_features_share_weights(self) -> None:
        """Constant values: with V_jc = u_j for all features c, O_tc = sum_j A_tj u_j is one number a head.

        Two such inputs and the zero one cancel what is added to O and what multiplies it (relative positions, gates).
        """
        probes = []
        for index in range(3):

            def constant(features: Tensor, index: int = index) -> None:
                tokens = (*features.shape[:-2], 1, 1)
                generator = torch.Generator().manual_seed(100 + index)
                drawn = torch.rand(tokens, generator=generator, dtype=torch.float64) + 0.5
                # signs, as a norm of the values takes the size away
                drawn *= torch.randint(0, 2, tokens, generator=generator) * 2 - 1
                features.copy_((drawn if index else 0.0 * drawn).to(features).expand_as(features))

            probes.append(self.replay.heads({"value": constant}))
        first, second = probes[1] - probes[0], probes[2] - probes[0]
        known = first.abs() > 1e-4 * first.abs().max()
        ratio = torch.where(known, second / first, torch.nan)
        apart = (ratio - ratio.nanmean(-1, keepdim=True)).abs()
        spread = float(apart.nan_to_num().amax()) if bool(known.any()) else torch.inf
        if spread > UNCHANGED:
            self.replay.refuse(f"with equal values in all features of a head they differ by {spread:.1e} in its output")

    def _check_heads_are_apart(self) -> None:
        """Changing the query, key or value of a head changes its outputs, and no others."""
        before = self.replay.heads({})
        for projection, head_slice in self.slices.items():
            members = 1 if projection == "query" else self.members
            for head in range(head_slice.heads):

                def change(features: Tensor, head: int = head) -> None:
                    features[..., head, :] = _shift(features[..., head, :])

                changed = _find_changes(before, self.replay.heads({projection: change}), (-2,))
                own = list(range(head * members, (head + 1) * members))
                self._require(f"changing the {projection} features of head {head}", changed, own, "heads")

    def _check_queries_and_keys(self) -> None:
        """The query of a token changes the output at its own position only; its key that of all who attend to it."""
        before = self.replay.heads({})
        tokens = {projection: draw.shape[:-2].numel() for projection, draw in self.replay.draws.items()}
        # one query a sequence (a pooling head) has no second position, but then keys are as many as values alone
        one_each = tokens["key"] == tokens["value"] != tokens["query"]
        reached: dict[str, list[int]] = {"query": [], "key": []}
        for projection, counts in reached.items():
            shape = self.replay.draws[projection].shape[:-2]
            last = tokens[projection] - 1
            for token in sorted({round(i * last / (PROBES - 1)) for i in range(PROBES)}):
                place = tuple(int(i) for i in torch.unravel_index(torch.tensor(token), shape))

                def change(features: Tensor, place: tuple[int, ...] = place) -> None:
                    features[place] = _shift(features[place])

                counts.append(len(_find_changes(before, self.replay.heads({projection: change}), (0,))))
        if max(reached["query"]) > 1:
            self.replay.refuse(
                f"changing the query of one token changed the output at {max(reached['query'])} positions"
            )
        if max(reached["query"]) == 0:
            self.replay.refuse("changing the query of one token changed nothing")
        if max(reached["key"]) < (1 if one_each else 2):
            self.replay.refuse(
                f"changing the key of one token changed the output at {max(reached['key'])} positions, not at all that "
                "attend to it (the inputs need at least three different tokens)"
            )

    def _require(self, what: str, changed: list[int], own: list[int], things: str) -> None:
        others = [head for head in changed if head not in own]
        if others:
            self.replay.refuse(f"{what} changed the {things} of heads {_format_heads(others)}; true heads would not")
        missed = [head for head in own if head not in changed]
        if missed:
            self.replay.refuse(f"{what} did not change the {things} of heads {_format_heads(missed)}; true heads would")


def _find_changes(before: Tensor, after: Tensor, axes: tuple[int, ...]) -> list[int]:
    """Return the indices along `axes` at which two tensors differ by more than rounding."""
    scale = before.abs().max().clamp_min(1e-12)
    others = [axis for axis in range(before.dim()) if axis - before.dim() not in axes and axis not in axes]
    return ((after - before).abs() / scale > UNCHANGED).amax(others).nonzero().flatten().tolist()


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
        own = head_slice.view(head_slice.parameter.data)[head]
        kept = own.clone()
        own += 1.0
        changed = (replay.outputs() != before).flatten(0, -3).any(-1).any(0).nonzero().flatten().tolist()
        own.copy_(kept)
        if changed != [head]:
            replay.refuse(f"changing the query of head {head} changes the outputs of heads {changed}")
