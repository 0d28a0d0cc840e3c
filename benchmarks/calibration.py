"""How often the laboratory's tests find a difference where there is none, and how often its intervals hold the truth.

Two models of runs. In the *normal* one the difference of an arm and its control is d[s, n] = a[s] + b[n] + e[s, n], all
normal, drawn through its mean squares. In the *logistic* one run s of arm i answers item n correctly where

    2.7 + shift + 3.0 z[n] + 0.7 u[s, n] +- (eta / 2) h[n] + gamma g[s, i] + 0.35 L[s, n, i] > 0

with z, u, h, g standard normal and L standard logistic: items differ in difficulty, eta moves items up in one arm and
down in the other, gamma moves whole runs, and an accuracy is about 0.80. Run by `make bench NAME=calibration`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import brentq

from headwise_lab.results.statistics import Estimate, difference
from timing import console, new_record, write

SEEDS = (5, 10, 20)
ITEMS = 2000
LEVELS = (0.05, 0.01, 0.005)
# Variance of items over that of seeds, both of the mean over S seeds and N items.
RATIOS = (0.0, 0.1, 0.3, 1.0, 3.0)
GAINS = (0.01, 0.02, 0.03)
EASE, DIFFICULTY, SHARED, NOISE, LOSS = 2.7, 3.0, 0.7, 0.35, 2.0

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Null:
    """A population of runs in which neither arm is better.

    Attributes:
        name: What differs.
        items: Number of test items.
        points: Standard deviation of a difference between seeds, in points of accuracy.
        eta: How far items are moved.
        failing: Share of runs that fail.
    """

    name: str
    items: int
    points: float
    eta: float
    failing: float = 0.0


NULLS = (
    Null("seeds 1 point, and items", 500, 1.0, 1.0),
    Null("seeds 1 point, and items", 2000, 1.0, 1.0),
    Null("seeds 1 point, and items", 8000, 1.0, 1.0),
    Null("seeds 2 points, and items", 2000, 2.0, 1.0),
    Null("seeds 1 point alone", 2000, 1.0, 0.0),
    Null("items alone", 2000, 0.0, 1.0),
    Null("items alone, strongly", 2000, 0.0, 3.0),
    Null("one run in ten fails", 2000, 1.0, 1.0, failing=0.1),
)


def draw_normal(generator: np.random.Generator, seeds: int, ratio: float) -> Estimate:
    """Return the estimate of one comparison of the normal model with mean 0, whose mean has variance 1 + ratio.

    The residual Ve / (S N) has a tenth of the variance of the seeds' part.
    """
    rest = 0.1 * seeds * ITEMS * generator.chisquare((seeds - 1) * (ITEMS - 1)) / ((seeds - 1) * (ITEMS - 1))
    variance = ratio * ITEMS * seeds + 0.1 * seeds * ITEMS
    between_items = variance * generator.chisquare(ITEMS - 1) / (ITEMS - 1)
    by_seed = np.sqrt(ratio) * generator.normal() + np.sqrt(seeds) * generator.normal(size=seeds)
    return Estimate(tuple(by_seed.tolist()), ITEMS, between_items, rest)


def simulate_normal(seeds: int, ratio: float, repetitions: int, seed: int = 0) -> dict[str, Any]:
    """Return sizes at each level, coverage, and size and power of what is printed beside a verdict."""
    generator = np.random.default_rng([seed, seeds, int(1000 * ratio)])
    drawn = [draw_normal(generator, seeds, ratio) for _ in range(repetitions)]
    # in standard errors of the mean; the smallest detectable effect if the standard error were known
    spreads = ((1.0, seeds - 1), (np.sqrt(1 + ratio), (seeds - 1) * (1 + ratio) ** 2))
    effect = max((stats.t.ppf(0.975, freedom) + stats.t.ppf(0.8, freedom)) * error for error, freedom in spreads)
    bound = 8 * np.sqrt(1 + ratio)
    p_values = np.array([one.p for one in drawn])
    intervals = np.array([one.interval() for one in drawn])
    return {
        "sizes": [float(np.mean(p_values <= level)) for level in LEVELS],
        "cover": float(np.mean((intervals[:, 0] <= 0) & (intervals[:, 1] >= 0))),
        "equivalence": float(np.mean([_move(one, bound).p_within(bound) <= 0.05 for one in drawn])),
        "power_at_detectable": float(np.mean([_move(one, effect).p <= 0.05 for one in drawn])),
    }


def _move(found: Estimate, by: Any) -> Estimate:
    return Estimate(tuple(one + by for one in found.by_seed), found.items, found.between_items, found.rest)


def compute_accuracy(null: Null, gamma: float, shift: float) -> float:
    """Return the expected accuracy of an arm."""
    spread = np.sqrt(DIFFICULTY**2 + SHARED**2 + null.eta**2 / 4 + gamma**2)
    latent = EASE + shift + spread * stats.norm.ppf((np.arange(4001) + 0.5) / 4001)
    right = stats.logistic.cdf(latent / NOISE)
    failed = stats.logistic.cdf((latent - LOSS) / NOISE)
    return float(np.mean((1 - null.failing) * right + null.failing * failed))


def choose_gamma(null: Null) -> float:
    """Return how far runs are moved for the accuracies of seeds to differ as much as they should."""
    slope = (compute_accuracy(null, 0.0, 0.01) - compute_accuracy(null, 0.0, -0.01)) / 0.02
    return null.points / (100 * slope * np.sqrt(2))


def find_shift(null: Null, gamma: float, accuracy: float) -> float:
    """Return the shift of an arm with this expected accuracy."""
    root: Any = brentq(lambda shift: compute_accuracy(null, gamma, shift) - accuracy, 0.0, 5.0)
    return float(root)


def draw_logistic(
    generator: np.random.Generator, null: Null, seeds: int, gamma: float, shifts: Array
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return whether the control's runs, [S, N], and those of the arm at each shift, [K, S, N], answer correctly."""
    shape = seeds, null.items

    def normal(*size: int) -> NDArray[np.float32]:
        return generator.standard_normal(size, dtype=np.float32)

    ease = EASE + DIFFICULTY * normal(null.items) + SHARED * normal(*shape)
    moved = 0.5 * null.eta * normal(null.items)
    sides = []
    for sign in (-1, 1):
        drawn = generator.random(shape, dtype=np.float32).clip(1e-7, 1 - 1e-7)
        failed = LOSS * (generator.random((seeds, 1)) < null.failing)
        noise = NOISE * np.log(drawn / (1 - drawn))
        sides.append(ease + sign * moved + gamma * normal(seeds, 1) - failed + noise)
    control, arm = sides
    return control > 0, np.stack([arm + shift > 0 for shift in shifts])


def simulate_logistic(null: Null, seeds: int, repetitions: int, seed: int = 0) -> dict[str, Any]:
    """Return size of Student's t over seeds and of the laboratory's test, its coverage, and its power at each gain."""
    generator = np.random.default_rng([seed, seeds, null.items, int(10 * null.points), int(10 * null.eta)])
    gamma = choose_gamma(null)
    base = compute_accuracy(null, gamma, 0.0)
    shifts = [0.0, *(find_shift(null, gamma, base + gain) for gain in GAINS)]
    found = {"student": 0, "joint": 0, "cover": 0, "gain_cover": 0, "power": np.zeros(len(GAINS))}
    for _ in range(repetitions):
        control, arms = draw_logistic(generator, null, seeds, gamma, np.array(shifts))
        nothing, *gains = (difference(arm, control) for arm in arms)
        found["student"] += Estimate(nothing.by_seed).p <= 0.05
        found["joint"] += nothing.p <= 0.05
        found["cover"] += _holds(nothing, 0.0)
        found["gain_cover"] += _holds(gains[1], GAINS[1])
        found["power"] += [one.p <= 0.05 for one in gains]
    return {name: (np.asarray(count) / repetitions).tolist() for name, count in found.items()}


def _holds(found: Estimate, truth: float) -> bool:
    low, high = found.interval()
    return low <= truth <= high


def simulate_all(repetitions: int, normal_repetitions: int) -> dict[str, Any]:
    """Return the results of both models at every setting."""
    normal = [
        {"ratio": ratio, "seeds": seeds, **simulate_normal(seeds, ratio, normal_repetitions)}
        for ratio in RATIOS
        for seeds in SEEDS
    ]
    logistic = []
    for null in NULLS:
        for seeds in SEEDS:
            began = time.perf_counter()
            row = {**asdict(null), "seeds": seeds, **simulate_logistic(null, seeds, repetitions)}
            logistic.append(row)
            took = time.perf_counter() - began
            console.print(f"{null.name}, N {null.items}, S {seeds}: {row['joint']:.3f} ({took:.0f} s)")
    return {"normal": normal, "logistic": logistic}


def main() -> None:
    """Simulate both models and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=2000, help="comparisons of each row of the logistic model")
    parser.add_argument("--normal-repetitions", type=int, default=40_000, help="those of the normal model")
    parser.add_argument("--out", type=Path, help="file of the record (default: a new one in benchmarks/records)")
    given, device = parser.parse_args(), torch.device("cpu")
    record = new_record("calibration", device)
    record |= {"repetitions": given.repetitions, "normal_repetitions": given.normal_repetitions}
    record |= {"levels": LEVELS, "gains": GAINS, **simulate_all(given.repetitions, given.normal_repetitions)}
    write(record, device, given.out)


if __name__ == "__main__":
    main()
