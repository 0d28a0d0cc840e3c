"""Whether heads attend: each output is a mean of the values, by weights over positions that queries and keys choose.

That heads are apart does not say so. The heads of linear attention, of a recurrent state (mLSTM) or of retention are
apart too, and their weights are of any sign or sum to anything.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.heads import Site
from headwise.heads.replay import Edit, RecordedCall, Replay, draw_noise
from headwise.heads.verify_weights import WeightReplay, list_views, restored
from headwise.nn.scores import Attended, Observer

# Patterns of tokens whose values are 1 while those of the others are 0.
PATTERNS = 8
# Relative to the largest output. Some code computes its softmax in float32, whatever the precision of the rest.
TOLERANCE = 1e-3
# The most for which single tokens are tried one after another.
MOST_TOKENS = 256


def weighs_positions(site: Site, call: RecordedCall, *, by_weights: bool) -> bool:
    """Return whether heads are seen to attend by weights of at least 0 that sum to 1 over the positions.

    With values of 1 everywhere the output is sum_j A_tj = 1, whatever the queries and keys; with values of 1 at some
    tokens it is between 0 and 1. A gate after the weights multiplies both. Where positions rotate the values, those of
    single tokens have outputs of the lengths A_tj and of one direction each. Where neither holds, the weights are read,
    if the scores of the site are reached; attention sinks are positions too.

    Args:
        site: The site, of a copy in evaluation mode, whose heads were proved to be apart.
        call: The call it was proved with.
        by_weights: Whether values are written through the weights, as no module call returns them.
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


def _read_replaced(site: Site, call: RecordedCall) -> Read:
    replay = Replay(site, call)

    def redraw(features: Tensor) -> None:
        features.copy_(draw_noise(features, seed=61))

    def clear(features: Tensor) -> None:
        features.zero_()

    def read(pattern: Callable[[int], Tensor], other: bool) -> Tensor:
        def fill(features: Tensor) -> None:
            rows = features.shape[:-2]
            features.copy_(pattern(rows.numel()).to(features).view(*rows, 1, 1).expand_as(features))

        edits: dict[str, Edit] = {"query": redraw, "key": redraw} if other else {}
        return replay.heads({**edits, "value": fill}) - replay.heads({**edits, "value": clear})

    return read


def _read_by_weights(site: Site, call: RecordedCall) -> Read:
    replay = WeightReplay(site, call)
    views = {head_slice.projection: list_views(head_slice) for head_slice in site.slices}

    def read(pattern: Callable[[int], Tensor], other: bool) -> Tensor:
        with restored([view for each in views.values() for view in each]):
            # of all that is projected, values alone see the first input
            for projection, each in views.items():
                for view in each:
                    view[:, 0] = 1.0 if projection == "value" else 0.0
                    if other and projection != "value":
                        view[:, 1:] = draw_noise(view[:, 1:], seed=61)
            return replay.heads(replay.fill(pattern)) - replay.heads(replay.fill(lambda tokens: 0.0 * _ones(tokens)))

    return read


def _see_weights(site: Site, call: RecordedCall) -> bool:
    """Return whether the scores of a site are reached, and their weights are at least 0 and sum to at most 1."""
    found: list[Tensor] = []

    def see(attended: Attended) -> None:
        if attended.weights is not None:
            found.append(attended.weights)

    if site.scores is None:
        return False
    try:
        stop = site.reach_scores().listen(Observer(see, weights=True))
        try:
            call.again()
        finally:
            stop()
    except Exception:
        # no proof either way: a bare error of the model's would only hide what was proved
        return False
    sums = [weights.sum(-1) for weights in found]
    return bool(found) and all(
        bool((weights >= -TOLERANCE).all()) and bool((total <= 1.0 + TOLERANCE).all()) and bool((total > 0.0).any())
        for weights, total in zip(found, sums, strict=True)
    )
