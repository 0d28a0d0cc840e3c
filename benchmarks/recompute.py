"""Recompute what stands in the records of papers from the numbers in them; imports nothing of headwise.

For each contrast of each claim: its value, its 95 % interval and the smallest effect that could have been detected; for
one with a verdict also its p-value, and Holm's. Says how many agree, and fails where one does not.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

# What a record prints of a contrast.
NAMES = ("value", "low", "high", "p", "detectable")


def recompute(contrast: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a contrast from the means of its seeds and its mean squares."""
    means, items = np.array(contrast["by_seed"]), contrast["items"]
    seeds, value = len(means), float(means.mean())
    # records made before means over several sets of items were told apart are of one
    inside = items - contrast.get("sets", 1)
    ms_seeds = items * float(means.var(ddof=1))
    errors = [(math.sqrt(ms_seeds / (seeds * items)), seeds - 1.0)]
    excess = contrast["between_items"] - contrast["rest"]
    if excess > 0:
        total = ms_seeds + excess
        squares = ms_seeds**2 / (seeds - 1) + contrast["between_items"] ** 2 / inside
        squares += contrast["rest"] ** 2 / ((seeds - 1) * inside)
        errors.append((math.sqrt(total / (seeds * items)), max(total**2 / squares, seeds - 1.0)))
    half, error, freedom = max((stats.t.ppf(0.975, freedom) * error, error, freedom) for error, freedom in errors)
    low, high = value - half, value + half
    if contrast["least"] is not None:
        low, high = max(low, contrast["least"]), min(high, contrast["most"])
    # of arms that answer alike there is nothing to test
    p = max(2 * stats.t.sf(abs(value) / error, freedom) for error, freedom in errors) if half > 0 else 1.0
    detectable = half + stats.t.ppf(0.8, freedom) * error
    found = {"value": value, "low": low, "high": high, "p": p, "detectable": detectable}
    return {name: float(number) for name, number in found.items()}


def adjust(p_values: dict[str, float], family: int) -> dict[str, float]:
    """Return p-values after Holm's adjustment for a family of so many tests."""
    adjusted, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (family - rank) * p))
        adjusted[name] = largest
    return adjusted


def check(record: dict[str, Any]) -> tuple[int, list[str]]:
    """Return how many numbers of a record were recomputed, and what disagrees."""
    contrasts = {one["contrast"]: one for claim in record["claims"] for one in claim["contrasts"]}
    found = {name: recompute(one) for name, one in contrasts.items() if one["low"] is not None}
    judged = {name: one for name, one in contrasts.items() if one["p_holm"] is not None}
    for kind in {one["kind"] for one in judged.values()}:
        of = {name: found[name]["p"] for name, one in judged.items() if one["kind"] == kind}
        for name, p in adjust(of, judged[next(iter(of))]["family"]).items():
            found[name]["p_holm"] = p
    count, wrong = 0, []
    for name, numbers in found.items():
        one = contrasts[name]
        for key in (*NAMES, "p_holm") if name in judged else (key for key in NAMES if key != "p"):
            count += 1
            if not math.isclose(numbers[key], one[key] or 0.0, rel_tol=1e-6, abs_tol=1e-12):
                wrong.append(f"{record['id']}, {name}: {key} is {one[key]}, recomputed {numbers[key]}")
    return count, wrong


def main() -> None:
    """Check every record below a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with records of papers, at any depth")
    paths, failed = sorted(parser.parse_args().folder.rglob("*.json")), False
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("format", 1) < 2:
            continue
        count, wrong = check(record)
        print(f"{path}: {count} numbers recomputed, {len(wrong)} disagree")
        print("\n".join(wrong), end="\n" if wrong else "")
        failed |= bool(wrong)
    sys.exit(failed)


if __name__ == "__main__":
    main()
