"""Simple routing as Triton programs: each iteration is one pass over a token's votes, tile by tile of capsules.

The backward pass repeats the iterations, keeping s and the sum of X, and goes back through them. A softmax over heads
needs one capsule at a time; one over capsules needs a sum over all of them, and so a pass more each way. Equations and
gradient are those of `routing.algorithms`, which is the reference. Importing this file imports Triton; `fused` does so
when a kernel is first used.
"""

# programs are in Triton's language, whose operators and launches are untyped:
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from headwise.routing.algorithms import SimpleKernel
from headwise.routing.triton_tiles import (
    add_exponents,
    apply_softmax,
    choose_tile,
    load_tile,
    make_scratch,
    place_tile,
    store_softmax,
)


def launch_forward(votes: Tensor, _weights: tuple[Tensor, ...], kernel: SimpleKernel, capsules: Tensor) -> None:
    """Write the capsules of votes [T, H, N, c], whose N * c numbers are contiguous, into `capsules` [T, N, c]."""
    arguments, numbers, constants = _prepare_launch(votes, kernel)
    scratch = make_scratch(votes, numbers)
    _forward[(len(scratch),)](*arguments, scratch, numbers, capsules, **constants)


def launch_backward(
    votes: Tensor, grad: Tensor, _weights: tuple[Tensor, ...], kernel: SimpleKernel, into: Tensor
) -> tuple[Tensor, ...]:
    """Given the contiguous gradient of the capsules, write the votes' into `into`, laid out as votes may be."""
    arguments, numbers, constants = _prepare_launch(votes, kernel)
    heads, capsules, size = votes.shape[1:]
    numbers += (2 + heads) * capsules * size
    scratch = make_scratch(votes, numbers)
    _backward[(len(scratch),)](*arguments, scratch, numbers, grad, into, into.stride(0), into.stride(1), **constants)
    return ()


def _prepare_launch(votes: Tensor, kernel: SimpleKernel) -> tuple[tuple[object, ...], int, dict[str, Any]]:
    """Return arguments, the scratch of the iterations of a token and their softmaxes, and constants."""
    tile = choose_tile(votes)
    numbers = kernel.iterations * (2 * votes.shape[2] * votes.shape[3] + 2 * tile["HEADS"])
    arguments = (votes, votes.stride(0), votes.stride(1), *votes.shape, kernel.floor)
    return arguments, numbers, {"ITERATIONS": kernel.iterations, "OVER_CAPSULES": kernel.over_capsules, **tile}


@triton.jit
def _squash(total, floor):
    """Return s |s|^2 / ((1 + |s|^2) |s|) of s [N, c]."""
    square = tl.sum(total * total, axis=1)
    return total * (square / (1.0 + square) / tl.sqrt(square + floor))[:, None]


@triton.jit
def _turn_back(total, grad, floor):
    """Return the gradient of s, given that of squash(s), both [N, c]."""
    square = tl.sum(total * total, axis=1)
    root = 1.0 / tl.sqrt(square + floor)
    ratio = square / (1.0 + square)
    slope = root / ((1.0 + square) * (1.0 + square)) - 0.5 * ratio * root * root * root
    along = tl.sum(grad * total, axis=1)
    return grad * (ratio * root)[:, None] + total * (2.0 * slope * along)[:, None]


@triton.jit
def _agree(votes, outputs, present):
    """Return B [H, N], minus infinity where `present` is False."""
    return tl.where(present, tl.sum(outputs[None, :, :] * votes, axis=2), -float("inf"))


@triton.jit
def _weigh(votes, outputs, present, softmax_at, OVER_CAPSULES: tl.constexpr, HEADS: tl.constexpr):
    """Return C [H, N]."""
    agreement = _agree(votes, outputs, present)
    if OVER_CAPSULES:
        weights = apply_softmax(softmax_at, agreement, HEADS)
    else:
        largest = tl.max(agreement, axis=0)
        # a capsule that is not there has no head
        drawn = tl.exp(agreement - tl.where(largest == -float("inf"), 0.0, largest)[None, :])
        weights = drawn / tl.maximum(tl.sum(drawn, axis=0), 1e-30)[None, :]
    return weights


@triton.jit
def _share(heads, capsules, floor, OVER_CAPSULES: tl.constexpr, DTYPE: tl.constexpr):
    """Return C_hn / max(sum_h C_hn, floor) of the first iteration, the same for all."""
    # a quotient of an integer alone would be float32
    one = tl.full([], 1.0, DTYPE)
    share = one / heads
    if OVER_CAPSULES:
        share = one / capsules / tl.maximum(one * heads / capsules, floor)
    return share


@triton.jit
def _forward_passes(
    votes_at, head_stride, heads, capsules, size, floor, state_at, softmax_at, capsules_at,
    ITERATIONS: tl.constexpr, OVER_CAPSULES: tl.constexpr, DTYPE: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """Do the iterations of a token: s of iteration t and the sum of X up to it are kept at `state_at` + t.

    With WRITES, the last are not kept, and the capsules are written.
    """
    numbers = capsules * size
    for t in tl.static_range(ITERATIONS):
        largest = tl.full([HEADS], -float("inf"), dtype=DTYPE)
        summed = tl.zeros([HEADS], dtype=DTYPE)
        for start in range(0, capsules, TILE):
            _capsule, places, present, real, mask = place_tile(start, heads, capsules, size, HEADS, TILE, SIZE)
            votes = load_tile(votes_at, head_stride, places, mask, DTYPE, HEADS)
            outputs = tl.zeros([TILE, SIZE], dtype=DTYPE)
            if t == 0:
                total = tl.sum(votes, axis=0) * _share(heads, capsules, floor, OVER_CAPSULES, DTYPE)
            else:
                outputs = tl.load(state_at + (2 * t - 1) * numbers + places, mask=real, other=0.0)
                weights = _weigh(votes, outputs, present, softmax_at + (t - 1) * 2 * HEADS, OVER_CAPSULES, HEADS)
                total = tl.sum(weights[:, :, None] * votes, axis=0)
                if OVER_CAPSULES:
                    total = total / tl.maximum(tl.sum(weights, axis=0), floor)[:, None]
            if WRITES and t == ITERATIONS - 1:
                tl.store(capsules_at + places, _squash(total, floor), mask=real)
            else:
                outputs += _squash(total, floor)
                tl.store(state_at + 2 * t * numbers + places, total, mask=real)
                tl.store(state_at + (2 * t + 1) * numbers + places, outputs, mask=real)
                if OVER_CAPSULES and t < ITERATIONS - 1:
                    largest, summed = add_exponents(largest, summed, _agree(votes, outputs, present))
        if OVER_CAPSULES and t < ITERATIONS - 1:
            store_softmax(softmax_at + t * 2 * HEADS, largest, summed, HEADS)
        # other threads read what was kept
        tl.debug_barrier()


@triton.jit
def _forward(
    votes_at, token_stride, head_stride, tokens, heads, capsules, size, floor, scratch_at, scratch_size, capsules_at,
    ITERATIONS: tl.constexpr, OVER_CAPSULES: tl.constexpr, DTYPE: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    state_at = scratch_at + tl.program_id(0).to(tl.int64) * scratch_size
    softmax_at = state_at + 2 * ITERATIONS * capsules * size
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = tl.zeros([], dtype=tl.int64) + token
        _forward_passes(
            votes_at + row * token_stride, head_stride, heads, capsules, size, floor, state_at, softmax_at,
            capsules_at + row * capsules * size, ITERATIONS, OVER_CAPSULES, DTYPE, HEADS, TILE, SIZE, True,
        )  # fmt: skip


@triton.jit
def _receive(votes, weights, total, d_output, present, floor, OVER_CAPSULES: tl.constexpr):
    """Return what the votes of an iteration receive from s through C, [N, c], and C times what C receives, [H, N]."""
    d_total = _turn_back(total, d_output, floor)
    held = tl.sum(d_total * total, axis=1) * 0.0
    if OVER_CAPSULES:
        received = tl.sum(weights, axis=0)
        d_total = d_total / tl.maximum(received, floor)[:, None]
        held = tl.where(received >= floor, tl.sum(d_total * total, axis=1), 0.0)
    d_weights = tl.sum(d_total[None, :, :] * votes, axis=2) - held[None, :]
    return d_total, tl.where(present, weights * d_weights, 0.0)


@triton.jit
def _backward(
    votes_at, token_stride, head_stride, tokens, heads, capsules, size, floor, scratch_at, scratch_size,
    grad_at, into_at, into_token_stride, into_head_stride,
    ITERATIONS: tl.constexpr, OVER_CAPSULES: tl.constexpr, DTYPE: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    numbers = capsules * size
    state_at = scratch_at + tl.program_id(0).to(tl.int64) * scratch_size
    softmax_at = state_at + 2 * ITERATIONS * numbers
    # what X of iteration t receives from later ones is in the place t % 2: iteration t reads one and writes the other
    received_at = softmax_at + ITERATIONS * 2 * HEADS
    votes_sum_at = received_at + 2 * numbers
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = tl.zeros([], dtype=tl.int64) + token
        own_at, row_at = votes_at + row * token_stride, grad_at + row * numbers
        _forward_passes(
            own_at, head_stride, heads, capsules, size, floor, state_at, softmax_at, own_at,
            ITERATIONS, OVER_CAPSULES, DTYPE, HEADS, TILE, SIZE, False,
        )  # fmt: skip
        for t in tl.static_range(ITERATIONS - 1, -1, -1):
            total_at, sum_at = state_at + 2 * t * numbers, state_at + (2 * t - 1) * numbers
            weights_at = softmax_at + (t - 1) * 2 * HEADS
            d_output_at = row_at if t == ITERATIONS - 1 else received_at + (t % 2) * numbers
            drawn_sum = tl.zeros([HEADS], dtype=DTYPE)
            if OVER_CAPSULES and t > 0:
                for start in range(0, capsules, TILE):
                    _capsule, places, present, real, mask = place_tile(start, heads, capsules, size, HEADS, TILE, SIZE)
                    votes = load_tile(own_at, head_stride, places, mask, DTYPE, HEADS)
                    total = tl.load(total_at + places, mask=real, other=0.0)
                    d_output = tl.load(d_output_at + places, mask=real, other=0.0).to(DTYPE)
                    outputs = tl.load(sum_at + places, mask=real, other=0.0)
                    weights = _weigh(votes, outputs, present, weights_at, OVER_CAPSULES, HEADS)
                    drawn_sum += tl.sum(_receive(votes, weights, total, d_output, present, floor, OVER_CAPSULES)[1], 1)
            for start in range(0, capsules, TILE):
                _capsule, places, present, real, mask = place_tile(start, heads, capsules, size, HEADS, TILE, SIZE)
                votes = load_tile(own_at, head_stride, places, mask, DTYPE, HEADS)
                total = tl.load(total_at + places, mask=real, other=0.0)
                d_output = tl.load(d_output_at + places, mask=real, other=0.0).to(DTYPE)
                offsets = tl.arange(0, HEADS)[:, None, None] * numbers + places[None, :, :]
                d_votes = tl.zeros([HEADS, TILE, SIZE], dtype=DTYPE)
                if t < ITERATIONS - 1:
                    d_votes = tl.load(votes_sum_at + offsets, mask=mask, other=0.0)
                if t > 0:
                    outputs = tl.load(sum_at + places, mask=real, other=0.0)
                    weights = _weigh(votes, outputs, present, weights_at, OVER_CAPSULES, HEADS)
                    d_total, drawn = _receive(votes, weights, total, d_output, present, floor, OVER_CAPSULES)
                    if OVER_CAPSULES:
                        d_agreement = drawn - weights * drawn_sum[:, None]
                    else:
                        d_agreement = drawn - weights * tl.sum(drawn, axis=0)[None, :]
                    d_votes += weights[:, :, None] * d_total[None, :, :]
                    d_votes += d_agreement[:, :, None] * outputs[None, :, :]
                    tl.store(votes_sum_at + offsets, d_votes, mask=mask)
                    pulled = tl.sum(d_agreement[:, :, None] * votes, axis=0)
                    if t < ITERATIONS - 1:
                        pulled += d_output
                    tl.store(received_at + ((t - 1) % 2) * numbers + places, pulled, mask=real)
                else:
                    share = _share(heads, capsules, floor, OVER_CAPSULES, DTYPE)
                    d_votes += (_turn_back(total, d_output, floor) * share)[None, :, :]
                    into = into_at + row * into_token_stride + tl.arange(0, HEADS)[:, None, None] * into_head_stride
                    tl.store(into + places[None, :, :], d_votes, mask=mask)
            tl.debug_barrier()
