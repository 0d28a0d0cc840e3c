"""EM routing as Triton programs that loop over tokens and keep the votes of a token on chip through all iterations.

The forward pass reads the votes once and writes the capsules. The backward pass reads them once more and repeats the
iterations as far as it needs them, instead of reading stored states. Equations and gradient are those of `routing.em`,
which is the reference. Importing this file imports Triton; `em_fused` does so when a kernel is first used.
"""

# programs are in Triton's language, whose operators and launches are untyped:
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

NATS_PER_DIMENSION = tl.constexpr(0.5 * (1.0 + math.log(2.0 * math.pi)))
# Each program loops over several tokens and sums their gradients of the betas.
MAX_PROGRAMS = 1024


def launch_forward(
    votes: Tensor, betas: tuple[Tensor, ...], schedule: tuple[float, ...], floor: float, capsules: Tensor
) -> None:
    """Write the capsules of votes [T, H, N, c] into `capsules` [T, N, c], contiguous.

    Args:
        votes: V; the N * c numbers of each head are contiguous.
        betas: beta_A and beta_mu, each [N], or empty.
        schedule: Inverse temperature of each iteration, linear.
        floor: Lower bound of the variance and of sum_h C_hn.
        capsules: The output.
    """
    grid, arguments, constants = _prepare_launch(votes, betas, schedule, floor)
    _forward[grid](*arguments, capsules, **constants)


def launch_backward(
    votes: Tensor,
    grad: Tensor,
    betas: tuple[Tensor, ...],
    schedule: tuple[float, ...],
    floor: float,
    into: Tensor,
) -> tuple[Tensor, ...]:
    """Write the gradient of the votes into `into` [T, H, N, c] and return the gradients of the betas.

    `grad` is the gradient of the capsules, [T, N, c], contiguous. `into` has a layout that votes may have. The other
    arguments are those of `launch_forward`.
    """
    grid, arguments, constants = _prepare_launch(votes, betas, schedule, floor)
    # one row of sums per program, added up afterwards: the order, and so every bit, is the same in each run
    sums = votes.new_zeros((2, *grid, votes.shape[2]), dtype=_get_compute_dtype(votes))
    _backward[grid](*arguments, grad, into, into.stride(0), into.stride(1), sums, grid[0] * votes.shape[2], **constants)
    return tuple(sums.sum(1)) if betas else ()


def _prepare_launch(
    votes: Tensor, betas: tuple[Tensor, ...], schedule: tuple[float, ...], floor: float
) -> tuple[tuple[int], tuple[object, ...], dict[str, object]]:
    tokens, heads, capsules, size = votes.shape
    padded_heads, padded_capsules, padded_size = (triton.next_power_of_2(length) for length in votes.shape[1:])
    beta_a, beta_mu = betas or (votes, votes)
    step = (schedule[-1] - schedule[0]) / max(len(schedule) - 1, 1)
    strides = votes.stride(0), votes.stride(1)
    arguments = (votes, *strides, beta_a, beta_mu, tokens, heads, capsules, size, schedule[0], step, floor)
    constants = {
        "ITERATIONS": len(schedule),
        "ACTIVE": bool(betas),
        "DTYPE": tl.float64 if votes.dtype == torch.float64 else tl.float32,
        "HEADS": padded_heads,
        "CAPSULES": padded_capsules,
        "SIZE": padded_size,
        "num_warps": min(max(padded_heads * padded_capsules * padded_size // 512, 4), 16),
    }
    return (min(tokens, MAX_PROGRAMS),), arguments, constants


def _get_compute_dtype(votes: Tensor) -> torch.dtype:
    return torch.float64 if votes.dtype == torch.float64 else torch.float32


@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _logistic(x):
    return tl.exp(_log_sigmoid(x))


@triton.jit
def _maximization(votes, weights, real, beta_a, beta_mu, size, temperature, floor, ACTIVE: tl.constexpr):
    """Return total [N], mean [N, c], spread [N, c], cost [N] and logit [N] for weights [H, N]."""
    total = tl.sum(weights, axis=0)
    scale = 1.0 / tl.maximum(total, floor)
    mean = tl.sum(weights[:, :, None] * votes, axis=0) * scale[:, None]
    centered = votes - mean[None, :, :]
    spread = tl.sum(weights[:, :, None] * centered * centered, axis=0) * scale[:, None]
    cost = tl.sum(tl.where(real, 0.5 * tl.log(tl.maximum(spread, floor)), 0.0), axis=1)
    logit = total * 0.0
    if ACTIVE:
        logit = temperature * (beta_a - total * (beta_mu + cost + size * NATS_PER_DIMENSION))
    return total, mean, spread, cost, logit


@triton.jit
def _expectation(votes, mean, spread, cost, logit, present, floor, ACTIVE: tl.constexpr):
    """Return the weights [H, N], zero where `present` [H, N] is False."""
    z = (votes - mean[None, :, :]) / tl.sqrt(tl.maximum(spread, floor))[None, :, :]
    offset = -cost
    if ACTIVE:
        offset += _log_sigmoid(logit)
    exponent = tl.where(present, offset[None, :] - 0.5 * tl.sum(z * z, axis=2), -float("inf"))
    # a padded head has no capsule to attend to: its largest exponent is set to 0
    largest = tl.max(exponent, axis=1)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    drawn = tl.exp(exponent - largest[:, None])
    return drawn / tl.maximum(tl.sum(drawn, axis=1), 1e-30)[:, None]


@triton.jit
def _iterate(
    votes, real, present, beta_a, beta_mu, capsules, size, first, step, floor, UNTIL: tl.constexpr, ACTIVE: tl.constexpr
):
    """Return weights, total, mean, spread, cost and logit after M-step number UNTIL, counted from 0."""
    weights = tl.where(present, 1.0 / capsules, 0.0).to(votes.dtype)
    total, mean, spread, cost, logit = _maximization(votes, weights, real, beta_a, beta_mu, size, first, floor, ACTIVE)
    for t in tl.static_range(1, UNTIL + 1):
        weights = _expectation(votes, mean, spread, cost, logit, present, floor, ACTIVE)
        total, mean, spread, cost, logit = _maximization(
            votes, weights, real, beta_a, beta_mu, size, first + t * step, floor, ACTIVE
        )
    return weights, total, mean, spread, cost, logit


@triton.jit
def _make_masks(heads, capsules, size, HEADS: tl.constexpr, CAPSULES: tl.constexpr, SIZE: tl.constexpr):
    """Return masks of what is not padding, [H, N], [N, c] and [H, N, c], and the offset of each number, [N, c]."""
    head, capsule, number = tl.arange(0, HEADS), tl.arange(0, CAPSULES), tl.arange(0, SIZE)
    present = (head < heads)[:, None] & (capsule < capsules)[None, :]
    real = (capsule < capsules)[:, None] & (number < size)[None, :]
    places = capsule[:, None] * size + number[None, :]
    mask = (head < heads)[:, None, None] & real[None, :, :]
    return present, real, places, mask


@triton.jit
def _load_beta(at, capsules, ACTIVE: tl.constexpr, DTYPE: tl.constexpr, CAPSULES: tl.constexpr):
    """Return a beta [N], zero without activations."""
    beta = tl.zeros([CAPSULES], dtype=DTYPE)
    if ACTIVE:
        capsule = tl.arange(0, CAPSULES)
        beta = tl.load(at + capsule, mask=capsule < capsules, other=0.0).to(DTYPE)
    return beta


@triton.jit
def _forward(
    votes_at,
    token_stride,
    head_stride,
    beta_a_at,
    beta_mu_at,
    tokens,
    heads,
    capsules,
    size,
    first,
    step,
    floor,
    capsules_at,
    ITERATIONS: tl.constexpr,
    ACTIVE: tl.constexpr,
    DTYPE: tl.constexpr,
    HEADS: tl.constexpr,
    CAPSULES: tl.constexpr,
    SIZE: tl.constexpr,
):
    head = tl.arange(0, HEADS)
    present, real, places, mask = _make_masks(heads, capsules, size, HEADS, CAPSULES, SIZE)
    offsets = head[:, None, None] * head_stride + places[None, :, :]
    beta_a = _load_beta(beta_a_at, capsules, ACTIVE, DTYPE, CAPSULES)
    beta_mu = _load_beta(beta_mu_at, capsules, ACTIVE, DTYPE, CAPSULES)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = tl.zeros([], dtype=tl.int64) + token
        votes = tl.load(votes_at + row * token_stride + offsets, mask=mask, other=0.0).to(DTYPE)
        _weights, _total, mean, _spread, _cost, logit = _iterate(
            votes, real, present, beta_a, beta_mu, capsules, size, first, step, floor, ITERATIONS - 1, ACTIVE
        )
        if ACTIVE:
            mean = mean * _logistic(logit)[:, None]
        tl.store(capsules_at + row * capsules * size + places, mean, mask=real)


@triton.jit
def _backward(
    votes_at,
    token_stride,
    head_stride,
    beta_a_at,
    beta_mu_at,
    tokens,
    heads,
    capsules,
    size,
    first,
    step,
    floor,
    grad_at,
    into_at,
    into_token_stride,
    into_head_stride,
    sums_at,
    sums_stride,
    ITERATIONS: tl.constexpr,
    ACTIVE: tl.constexpr,
    DTYPE: tl.constexpr,
    HEADS: tl.constexpr,
    CAPSULES: tl.constexpr,
    SIZE: tl.constexpr,
):
    head, capsule = tl.arange(0, HEADS), tl.arange(0, CAPSULES)
    present, real, places, mask = _make_masks(heads, capsules, size, HEADS, CAPSULES, SIZE)
    offsets = head[:, None, None] * head_stride + places[None, :, :]
    beta_a = _load_beta(beta_a_at, capsules, ACTIVE, DTYPE, CAPSULES)
    beta_mu = _load_beta(beta_mu_at, capsules, ACTIVE, DTYPE, CAPSULES)
    d_beta_a = tl.zeros([CAPSULES], dtype=DTYPE)
    d_beta_mu = tl.zeros([CAPSULES], dtype=DTYPE)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = tl.zeros([], dtype=tl.int64) + token
        votes = tl.load(votes_at + row * token_stride + offsets, mask=mask, other=0.0).to(DTYPE)
        d_mean = tl.load(grad_at + row * capsules * size + places, mask=real, other=0.0).to(DTYPE)
        weights, total, mean, spread, cost, logit = _iterate(
            votes, real, present, beta_a, beta_mu, capsules, size, first, step, floor, ITERATIONS - 1, ACTIVE
        )
        d_logit = tl.zeros([CAPSULES], dtype=DTYPE)
        if ACTIVE:
            activation = _logistic(logit)
            d_logit = tl.sum(d_mean * mean, axis=1) * activation * (1.0 - activation)
            d_mean = d_mean * activation[:, None]
        d_variance = tl.zeros([CAPSULES, SIZE], dtype=DTYPE)
        d_cost = tl.zeros([CAPSULES], dtype=DTYPE)
        d_votes = tl.zeros([HEADS, CAPSULES, SIZE], dtype=DTYPE)
        for t in tl.static_range(ITERATIONS - 1, -1, -1):
            if t < ITERATIONS - 1:
                weights, total, mean, spread, cost, logit = _iterate(
                    votes, real, present, beta_a, beta_mu, capsules, size, first, step, floor, t, ACTIVE
                )
            d_total = tl.zeros([CAPSULES], dtype=DTYPE)
            if ACTIVE:
                scaled = (first + t * step) * d_logit
                d_total = -scaled * (beta_mu + cost + size * NATS_PER_DIMENSION)
                d_cost = d_cost - scaled * total
                d_beta_a += scaled
                d_beta_mu -= scaled * total
            scale = 1.0 / tl.maximum(total, floor)
            d_variance += 0.5 * d_cost[:, None] / tl.maximum(spread, floor)
            d_variance = tl.where(real & (spread >= floor), d_variance, 0.0)
            # sum_h q (V - mu) is mu (1 - sum_h q), zero unless R is below the floor
            d_mean -= 2.0 * d_variance * mean * (1.0 - total * scale)[:, None]
            toward = d_mean * scale[:, None]
            along = d_variance * scale[:, None]
            centered = votes - mean[None, :, :]
            d_votes += weights[:, :, None] * (toward[None, :, :] + 2.0 * centered * along[None, :, :])
            if t > 0:
                above = (total >= floor)[:, None]
                held = tl.where(above, d_variance * scale[:, None] * spread + toward * mean, 0.0)
                offset = d_total + tl.sum(toward * mean - held, axis=1)
                drawn = (toward[None, :, :] + centered * along[None, :, :]) * centered
                pulled = weights * (tl.sum(drawn, axis=2) + offset[None, :])
                d_log = pulled - weights * tl.sum(pulled, axis=1)[:, None]
                _weights, _total, mean, spread, cost, logit = _iterate(
                    votes, real, present, beta_a, beta_mu, capsules, size, first, step, floor, t - 1, ACTIVE
                )
                root = 1.0 / tl.sqrt(tl.maximum(spread, floor))
                z = (votes - mean[None, :, :]) * root[None, :, :]
                turned = d_log[:, :, None] * z
                d_votes -= turned * root[None, :, :]
                d_mean = tl.sum(turned, axis=0) * root
                d_variance = 0.5 * tl.sum(turned * z, axis=0) * root * root
                summed = tl.sum(d_log, axis=0)
                d_cost = -summed
                if ACTIVE:
                    d_logit = summed * _logistic(-logit)
        into = into_at + row * into_token_stride + head[:, None, None] * into_head_stride + places[None, :, :]
        tl.store(into, d_votes, mask=mask)
    own = sums_at + tl.program_id(0) * capsules + capsule
    tl.store(own, d_beta_a, mask=capsule < capsules)
    tl.store(own + sums_stride, d_beta_mu, mask=capsule < capsules)
