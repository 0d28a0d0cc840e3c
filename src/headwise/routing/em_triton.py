"""EM routing as Triton programs: each M-step is one pass over a token's votes, tile by tile of capsules.

The forward pass makes T passes and writes the capsules. The backward pass repeats them, keeping the M-steps, and goes
back through them: two passes for each but the first, since the softmax over capsules needs a sum over all of them.
Equations and gradient are those of `routing.algorithms`, which is the reference. Importing this file imports Triton;
`fused` does so when a kernel is first used.
"""

# programs are in Triton's language, whose operators and launches are untyped:
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from headwise.routing.algorithms import EMKernel
from headwise.routing.triton_tiles import (
    add_exponents,
    apply_softmax,
    choose_tile,
    get_compute_dtype,
    load_tile,
    make_scratch,
    place_tile,
    store_softmax,
)

NATS_PER_DIMENSION = tl.constexpr(0.5 * (1.0 + math.log(2.0 * math.pi)))


def launch_forward(votes: Tensor, betas: tuple[Tensor, ...], kernel: EMKernel, capsules: Tensor) -> None:
    """Write the capsules of votes [T, H, N, c], whose N * c numbers are contiguous, into `capsules` [T, N, c]."""
    arguments, numbers, constants = _prepare_launch(votes, betas, kernel)
    scratch = make_scratch(votes, numbers)
    _forward[(len(scratch),)](*arguments, scratch, numbers, capsules, **constants)


def launch_backward(
    votes: Tensor, grad: Tensor, betas: tuple[Tensor, ...], kernel: EMKernel, into: Tensor
) -> tuple[Tensor, ...]:
    """Given the contiguous gradient of the capsules, write the votes' into `into` and return the betas' gradients."""
    arguments, numbers, constants = _prepare_launch(votes, betas, kernel)
    heads, capsules, size = votes.shape[1:]
    numbers += 2 * (2 * capsules * size + 2 * capsules) + heads * capsules * size
    scratch = make_scratch(votes, numbers)
    # one row of sums per program, added up afterwards: the order, and so every bit, is the same in each run
    sums = votes.new_zeros((2, len(scratch), capsules), dtype=get_compute_dtype(votes))
    strides = into.stride(0), into.stride(1)
    _backward[(len(scratch),)](*arguments, scratch, numbers, grad, into, *strides, sums, sums.stride(0), **constants)
    return tuple(sums.sum(1)) if betas else ()


def _prepare_launch(
    votes: Tensor, betas: tuple[Tensor, ...], kernel: EMKernel
) -> tuple[tuple[object, ...], int, dict[str, Any]]:
    """Return arguments, the scratch of the M-steps of a token and their softmaxes, and constants."""
    schedule, tile = kernel.schedule, choose_tile(votes)
    (capsules, size), (beta_a, beta_mu) = votes.shape[2:], betas or (votes, votes)
    numbers = len(schedule) * (2 * capsules * size + 3 * capsules + 2 * tile["HEADS"])
    step = (schedule[-1] - schedule[0]) / max(len(schedule) - 1, 1)
    strides = votes.stride(0), votes.stride(1)
    arguments = (votes, *strides, beta_a, beta_mu, *votes.shape, schedule[0], step, kernel.floor)
    return arguments, numbers, {"ITERATIONS": len(schedule), "ACTIVE": bool(betas), **tile}


@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _logistic(x):
    return tl.exp(_log_sigmoid(x))


@triton.jit
def _load_beta(at, capsule, capsules, ACTIVE: tl.constexpr, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """Return a beta [TILE], zero without activations."""
    beta = tl.zeros([TILE], dtype=DTYPE)
    if ACTIVE:
        beta = tl.load(at + capsule, mask=capsule < capsules, other=0.0).to(DTYPE)
    return beta


@triton.jit
def _count_nats(cost, size):
    """Return what the dimensions of a capsule add to its cost [N], in the dtype of that."""
    return (tl.zeros_like(cost) + size) * NATS_PER_DIMENSION


@triton.jit
def _maximize(votes, weights, real, beta_a, beta_mu, size, temperature, floor, ACTIVE: tl.constexpr):
    """Return total [N], mean [N, c], spread [N, c], cost [N] and logit [N] for weights [H, N]."""
    total = tl.sum(weights, axis=0)
    scale = 1.0 / tl.maximum(total, floor)
    mean = tl.sum(weights[:, :, None] * votes, axis=0) * scale[:, None]
    centered = votes - mean[None, :, :]
    spread = tl.sum(weights[:, :, None] * centered * centered, axis=0) * scale[:, None]
    cost = tl.sum(tl.where(real, 0.5 * tl.log(tl.maximum(spread, floor)), 0.0), axis=1)
    logit = total * 0.0
    if ACTIVE:
        logit = temperature * (beta_a - total * (beta_mu + cost + _count_nats(cost, size)))
    return total, mean, spread, cost, logit


@triton.jit
def _expect(votes, mean, spread, cost, logit, present, floor, ACTIVE: tl.constexpr):
    """Return the exponents [H, N] of the softmax over capsules, minus infinity where `present` [H, N] is False."""
    z = (votes - mean[None, :, :]) / tl.sqrt(tl.maximum(spread, floor))[None, :, :]
    offset = -cost
    if ACTIVE:
        offset += _log_sigmoid(logit)
    return tl.where(present, offset[None, :] - 0.5 * tl.sum(z * z, axis=2), -float("inf"))


@triton.jit
def _load_state(at, capsule, places, capsules, size, real):
    """Return total, mean, spread, cost and logit of an M-step for a tile."""
    there, after = capsule < capsules, at + 2 * capsules * size + capsule
    mean = tl.load(at + places, mask=real, other=0.0)
    spread = tl.load(at + capsules * size + places, mask=real, other=0.0)
    total = tl.load(after, mask=there, other=0.0)
    cost = tl.load(after + capsules, mask=there, other=0.0)
    logit = tl.load(after + 2 * capsules, mask=there, other=0.0)
    return total, mean, spread, cost, logit


@triton.jit
def _store_state(at, total, mean, spread, cost, logit, capsule, places, capsules, size, real):
    there, after = capsule < capsules, at + 2 * capsules * size + capsule
    tl.store(at + places, mean, mask=real)
    tl.store(at + capsules * size + places, spread, mask=real)
    tl.store(after, total, mask=there)
    tl.store(after + capsules, cost, mask=there)
    tl.store(after + 2 * capsules, logit, mask=there)


@triton.jit
def _forward_passes(
    votes_at, head_stride, beta_a_at, beta_mu_at, heads, capsules, size, first, step, floor, state_at, state_size,
    softmax_at, capsules_at,
    ITERATIONS: tl.constexpr, ACTIVE: tl.constexpr, DTYPE: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """Do the M-steps of a token: step t is kept at `state_at` + t, the softmax after it at `softmax_at` + t.

    With WRITES, the last is not kept, and the capsules are written.
    """
    for t in tl.static_range(ITERATIONS):
        largest = tl.full([HEADS], -float("inf"), dtype=DTYPE)
        summed = tl.zeros([HEADS], dtype=DTYPE)
        before_at = state_at + (t - 1) * state_size
        for start in range(0, capsules, TILE):
            capsule, places, present, real, mask = place_tile(start, heads, capsules, size, HEADS, TILE, SIZE)
            votes = load_tile(votes_at, head_stride, places, mask, DTYPE, HEADS)
            beta_a = _load_beta(beta_a_at, capsule, capsules, ACTIVE, DTYPE, TILE)
            beta_mu = _load_beta(beta_mu_at, capsule, capsules, ACTIVE, DTYPE, TILE)
            # a quotient of an integer alone would be float32
            weights = tl.where(present, tl.full([], 1.0, DTYPE) / capsules, 0.0)
            if t > 0:
                _total, mean, spread, cost, logit = _load_state(before_at, capsule, places, capsules, size, real)
                exponent = _expect(votes, mean, spread, cost, logit, present, floor, ACTIVE)
                weights = apply_softmax(softmax_at + (t - 1) * 2 * HEADS, exponent, HEADS)
            temperature = first + t * step
            total, mean, spread, cost, logit = _maximize(
                votes, weights, real, beta_a, beta_mu, size, temperature, floor, ACTIVE
            )
            if WRITES and t == ITERATIONS - 1:
                if ACTIVE:
                    mean = mean * _logistic(logit)[:, None]
                tl.store(capsules_at + places, mean, mask=real)
            else:
                at = state_at + t * state_size
                _store_state(at, total, mean, spread, cost, logit, capsule, places, capsules, size, real)
                if t < ITERATIONS - 1:
                    exponent = _expect(votes, mean, spread, cost, logit, present, floor, ACTIVE)
                    largest, summed = add_exponents(largest, summed, exponent)
        if t < ITERATIONS - 1:
            store_softmax(softmax_at + t * 2 * HEADS, largest, summed, HEADS)
        # other threads read what was kept
        tl.debug_barrier()


@triton.jit
def _forward(
    votes_at, token_stride, head_stride, beta_a_at, beta_mu_at, tokens, heads, capsules, size, first, step, floor,
    scratch_at, scratch_size, capsules_at,
    ITERATIONS: tl.constexpr, ACTIVE: tl.constexpr, DTYPE: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    state_size = 2 * capsules * size + 3 * capsules
    state_at = scratch_at + tl.program_id(0).to(tl.int64) * scratch_size
    softmax_at = state_at + ITERATIONS * state_size
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = tl.zeros([], dtype=tl.int64) + token
        _forward_passes(
            votes_at + row * token_stride, head_stride, beta_a_at, beta_mu_at, heads, capsules, size, first, step,
            floor, state_at, state_size, softmax_at, capsules_at + row * capsules * size,
            ITERATIONS, ACTIVE, DTYPE, HEADS, TILE, SIZE, True,
        )  # fmt: skip


@triton.jit
def _receive(
    grad_at, received_at, capsule, places, total, mean, spread, cost, logit, beta_mu, capsules, size, real,
    temperature, floor, LAST: tl.constexpr, ACTIVE: tl.constexpr, DTYPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return what an M-step's votes and weights receive: toward and along [N, c], offset, and both d_beta [N]."""
    there = capsule < capsules
    if LAST:
        d_mean = tl.load(grad_at + places, mask=real, other=0.0).to(DTYPE)
        d_variance = d_mean * 0.0
        d_cost = tl.zeros([TILE], dtype=DTYPE)
        d_logit = tl.zeros([TILE], dtype=DTYPE)
        if ACTIVE:
            activation = _logistic(logit)
            d_logit = tl.sum(d_mean * mean, axis=1) * activation * (1.0 - activation)
            d_mean = d_mean * activation[:, None]
    else:
        after = received_at + 2 * capsules * size + capsule
        d_mean = tl.load(received_at + places, mask=real, other=0.0)
        d_variance = tl.load(received_at + capsules * size + places, mask=real, other=0.0)
        d_cost = tl.load(after, mask=there, other=0.0)
        d_logit = tl.load(after + capsules, mask=there, other=0.0)
    d_total = tl.zeros([TILE], dtype=DTYPE)
    scaled = temperature * d_logit
    if ACTIVE:
        d_total = -scaled * (beta_mu + cost + _count_nats(cost, size))
        d_cost = d_cost - scaled * total
    scale = 1.0 / tl.maximum(total, floor)
    d_variance += 0.5 * d_cost[:, None] / tl.maximum(spread, floor)
    d_variance = tl.where(real & (spread >= floor), d_variance, 0.0)
    # sum_h q (V - mu) is mu (1 - sum_h q), zero unless R is below the floor
    d_mean -= 2.0 * d_variance * mean * (1.0 - total * scale)[:, None]
    toward = d_mean * scale[:, None]
    along = d_variance * scale[:, None]
    held = tl.where((total >= floor)[:, None], along * spread + toward * mean, 0.0)
    offset = d_total + tl.sum(toward * mean - held, axis=1)
    return toward, along, offset, scaled, -scaled * total


@triton.jit
def _pull(votes, weights, mean, toward, along, offset):
    """Return weights times what they receive, [H, N], before the softmax's own sum is taken off."""
    centered = votes - mean[None, :, :]
    drawn = (toward[None, :, :] + centered * along[None, :, :]) * centered
    return weights * (tl.sum(drawn, axis=2) + offset[None, :])


@triton.jit
def _backward(
    votes_at, token_stride, head_stride, beta_a_at, beta_mu_at, tokens, heads, capsules, size, first, step, floor,
    scratch_at, scratch_size, grad_at, into_at, into_token_stride, into_head_stride, sums_at, sums_stride,
    ITERATIONS: tl.constexpr, ACTIVE: tl.constexpr, DTYPE: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    state_size, received_size = 2 * capsules * size + 3 * capsules, 2 * capsules * size + 2 * capsules
    state_at = scratch_at + tl.program_id(0).to(tl.int64) * scratch_size
    softmax_at = state_at + ITERATIONS * state_size
    # what M-step t receives is in the place t % 2: step t reads one and writes the other
    received_at = softmax_at + ITERATIONS * 2 * HEADS
    votes_sum_at = received_at + 2 * received_size
    sums_at += tl.program_id(0) * capsules
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = tl.zeros([], dtype=tl.int64) + token
        own_at, row_at = votes_at + row * token_stride, grad_at + row * capsules * size
        _forward_passes(
            own_at, head_stride, beta_a_at, beta_mu_at, heads, capsules, size, first, step, floor, state_at,
            state_size, softmax_at, own_at, ITERATIONS, ACTIVE, DTYPE, HEADS, TILE, SIZE, False,
        )  # fmt: skip
        for t in tl.static_range(ITERATIONS - 1, -1, -1):
            temperature, at = first + t * step, state_at + t * state_size
            before_at, weights_at = at - state_size, softmax_at + (t - 1) * 2 * HEADS
            here_at = received_at + (t % 2) * received_size
            pulled_sum = tl.zeros([HEADS], dtype=DTYPE)
            if t > 0:
                for start in range(0, capsules, TILE):
                    capsule, places, present, real, mask = place_tile(start, heads, capsules, size, HEADS, TILE, SIZE)
                    votes = load_tile(own_at, head_stride, places, mask, DTYPE, HEADS)
                    beta_mu = _load_beta(beta_mu_at, capsule, capsules, ACTIVE, DTYPE, TILE)
                    _total, mean, spread, cost, logit = _load_state(before_at, capsule, places, capsules, size, real)
                    exponent = _expect(votes, mean, spread, cost, logit, present, floor, ACTIVE)
                    weights = apply_softmax(weights_at, exponent, HEADS)
                    total, mean, spread, cost, logit = _load_state(at, capsule, places, capsules, size, real)
                    toward, along, offset, _d_a, _d_mu = _receive(
                        row_at, here_at, capsule, places, total, mean, spread, cost, logit, beta_mu, capsules, size,
                        real, temperature, floor, t == ITERATIONS - 1, ACTIVE, DTYPE, TILE,
                    )  # fmt: skip
                    pulled_sum += tl.sum(_pull(votes, weights, mean, toward, along, offset), axis=1)
            for start in range(0, capsules, TILE):
                capsule, places, present, real, mask = place_tile(start, heads, capsules, size, HEADS, TILE, SIZE)
                votes = load_tile(own_at, head_stride, places, mask, DTYPE, HEADS)
                beta_mu = _load_beta(beta_mu_at, capsule, capsules, ACTIVE, DTYPE, TILE)
                total, mean, spread, cost, logit = _load_state(at, capsule, places, capsules, size, real)
                toward, along, offset, d_beta_a, d_beta_mu = _receive(
                    row_at, here_at, capsule, places, total, mean, spread, cost, logit, beta_mu, capsules, size, real,
                    temperature, floor, t == ITERATIONS - 1, ACTIVE, DTYPE, TILE,
                )  # fmt: skip
                if ACTIVE:
                    there = capsule < capsules
                    sum_at = sums_at + capsule
                    tl.store(sum_at, tl.load(sum_at, mask=there) + d_beta_a, mask=there)
                    sum_at += sums_stride
                    tl.store(sum_at, tl.load(sum_at, mask=there) + d_beta_mu, mask=there)
                received = toward[None, :, :] + 2.0 * (votes - mean[None, :, :]) * along[None, :, :]
                offsets = tl.arange(0, HEADS)[:, None, None] * (capsules * size) + places[None, :, :]
                d_votes = tl.zeros([HEADS, TILE, SIZE], dtype=DTYPE)
                if t < ITERATIONS - 1:
                    d_votes = tl.load(votes_sum_at + offsets, mask=mask, other=0.0)
                if t > 0:
                    _total, mean_before, spread, cost, logit = _load_state(
                        before_at, capsule, places, capsules, size, real
                    )
                    exponent = _expect(votes, mean_before, spread, cost, logit, present, floor, ACTIVE)
                    weights = apply_softmax(weights_at, exponent, HEADS)
                    d_log = _pull(votes, weights, mean, toward, along, offset) - weights * pulled_sum[:, None]
                    root = 1.0 / tl.sqrt(tl.maximum(spread, floor))
                    z = (votes - mean_before[None, :, :]) * root[None, :, :]
                    turned = d_log[:, :, None] * z
                    d_votes += weights[:, :, None] * received - turned * root[None, :, :]
                    tl.store(votes_sum_at + offsets, d_votes, mask=mask)
                    summed = tl.sum(d_log, axis=0)
                    there_at = received_at + ((t - 1) % 2) * received_size
                    after = there_at + 2 * capsules * size + capsule
                    tl.store(there_at + places, tl.sum(turned, axis=0) * root, mask=real)
                    d_variance = 0.5 * tl.sum(turned * z, axis=0) * root * root
                    tl.store(there_at + capsules * size + places, d_variance, mask=real)
                    tl.store(after, -summed, mask=capsule < capsules)
                    tl.store(after + capsules, summed * _logistic(-logit), mask=capsule < capsules)
                else:
                    d_votes += received / capsules
                    into = into_at + row * into_token_stride + tl.arange(0, HEADS)[:, None, None] * into_head_stride
                    tl.store(into + places[None, :, :], d_votes, mask=mask)
            tl.debug_barrier()
