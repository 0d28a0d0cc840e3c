"""What the Triton programs of both routings share: tiles of capsules, and a softmax over capsules that visits them.

A program loops over tokens. Each pass over a token's votes visits tiles of capsules, so that what a pass computes fits
in registers for any number of capsules. What one pass leaves for the next, numbers of each capsule and of each head, is
in a part of a scratch tensor that the program owns. Importing this file imports Triton.
"""

# programs are in Triton's language, whose operators are untyped:
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.errors import LayoutError

# Votes of a tile, with heads and capsule sizes rounded up to powers of two: 8 numbers of each thread. With 16 the
# backward programs take nearly all registers that a thread can have, and spill some. Not tuned at run time: other tiles
# sum in another order, and a run could not be repeated to the bit.
TILE_VOTES, WARPS = 1024, 4
# Most votes of a tile that holds one capsule.
MAX_CAPSULE_VOTES = 4096
# Each program loops over several tokens and sums their gradients of the weights.
MAX_PROGRAMS = 1024
# Most numbers of scratch of all programs together.
MAX_SCRATCH = 2**27


def choose_tile(votes: Tensor) -> dict[str, Any]:
    """Return the constants of a launch on votes [T, H, N, c] that say how a tile is laid out.

    Raises:
        LayoutError: One capsule of all heads is too large for a tile.
    """
    heads, capsules, size = (triton.next_power_of_2(length) for length in votes.shape[1:])
    if heads * size > MAX_CAPSULE_VOTES:
        raise LayoutError(
            f"a capsule of {votes.shape[1]} heads and {votes.shape[3]} numbers is {heads * size} numbers, rounded up "
            f"to powers of two; expected at most {MAX_CAPSULE_VOTES}."
        )
    return {
        "DTYPE": tl.float64 if votes.dtype == torch.float64 else tl.float32,
        "HEADS": heads,
        "TILE": min(capsules, max(1, TILE_VOTES // (heads * size))),
        "SIZE": size,
        "num_warps": WARPS,
    }


def make_scratch(votes: Tensor, numbers: int) -> Tensor:
    """Return what programs leave for their next pass, [programs, numbers]."""
    programs = max(1, min(votes.shape[0], MAX_PROGRAMS, MAX_SCRATCH // numbers))
    return votes.new_empty((programs, numbers), dtype=get_compute_dtype(votes))


def get_compute_dtype(votes: Tensor) -> torch.dtype:
    """Return the dtype that votes are routed in."""
    return torch.float64 if votes.dtype == torch.float64 else torch.float32


@triton.jit
def place_tile(start, heads, capsules, size, HEADS: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr):
    """Return capsules [TILE] and their numbers' places [TILE, c], with masks [H, TILE], [TILE, c] and [H, TILE, c]."""
    head, capsule, number = tl.arange(0, HEADS), start + tl.arange(0, TILE), tl.arange(0, SIZE)
    present = (head < heads)[:, None] & (capsule < capsules)[None, :]
    real = (capsule < capsules)[:, None] & (number < size)[None, :]
    places = capsule[:, None] * size + number[None, :]
    mask = (head < heads)[:, None, None] & real[None, :, :]
    return capsule, places, present, real, mask


@triton.jit
def load_tile(votes_at, head_stride, places, mask, DTYPE: tl.constexpr, HEADS: tl.constexpr):
    """Return votes [H, TILE, c], zero where there are none."""
    offsets = tl.arange(0, HEADS)[:, None, None] * head_stride + places[None, :, :]
    return tl.load(votes_at + offsets, mask=mask, other=0.0).to(DTYPE)


@triton.jit
def add_exponents(largest, summed, exponent):
    """Return the largest exponent of each head so far and the sum of exponentials less it, for one more tile."""
    new = tl.maximum(largest, tl.max(exponent, axis=1))
    # a padded head has no exponent but minus infinity
    finite = tl.where(new == -float("inf"), 0.0, new)
    return new, summed * tl.exp(largest - finite) + tl.sum(tl.exp(exponent - finite[:, None]), axis=1)


@triton.jit
def store_softmax(at, largest, summed, HEADS: tl.constexpr):
    """Keep what a softmax over all capsules needs: each head's largest exponent, and one over its sum."""
    head = tl.arange(0, HEADS)
    tl.store(at + head, tl.where(largest == -float("inf"), 0.0, largest))
    tl.store(at + HEADS + head, 1.0 / tl.maximum(summed, 1e-30))


@triton.jit
def apply_softmax(at, exponent, HEADS: tl.constexpr):
    """Return the weights [H, TILE] of a softmax over all capsules."""
    head = tl.arange(0, HEADS)
    largest, inverse = tl.load(at + head), tl.load(at + HEADS + head)
    return tl.exp(exponent - largest[:, None]) * inverse[:, None]
