"""A comparison's folder as `headwise compare` leaves it, filled with drawn answers: what the reporting tests read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headwise.atomic import seal
from headwise_lab.experiment.run_folder import write_result

LABELS = 7


@dataclass(frozen=True)
class Drawn:
    """How an arm answers: effect on its log odds, change of it per bin, and what is recorded beside it."""

    name: str
    control: str | None = "plain"
    effect: float = 0.0
    slope: float = 0.0
    cosine: float = 0.5
    force: float | None = None
    spread: float = 0.12
    baseline: bool = False


PAPER = (
    Drawn("majority", None, -3.0, 0.1, baseline=True),
    Drawn("counts", None, -2.2, 0.05, baseline=True),
    Drawn("plain", None),
    Drawn("smooth", "scaled", 0.02, 0.0, 0.61, 0.0),
    Drawn("svgd", "smooth", 0.1, 0.0, 0.47, 0.004),
    Drawn("svgd:alpha=3", "smooth", 0.35, 0.0, 0.30, 0.4),
    Drawn("svgd:alpha=30", "smooth", -0.8, 0.0, 0.11, 2.5),
    Drawn("output", "plain", 0.15, -0.03, 0.22),
    Drawn("trunk", "plain", 0.1, 0.0, 0.55),
    Drawn("em", "trunk", 0.3, 0.05, 0.58),
    Drawn("output+em", "trunk", 0.5, 0.04, 0.27),
)


def write_comparison(
    out: Path,
    arms: Sequence[Drawn] = PAPER,
    *,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    bins: Sequence[int] = (1, 2, 3),
    items: int = 400,
    seed: int = 7,
    data_seed: int = 1,
) -> Path:
    """Write a comparison of `arms`, `items` test items a bin, and return its folder."""
    generator = np.random.default_rng(data_seed)
    item_bins = np.repeat(np.asarray(bins), items)
    labels = generator.integers(LABELS, size=len(item_bins))
    ease = 3.6 - 0.45 * item_bins + generator.normal(0, 1.2, len(item_bins))
    out.mkdir(parents=True, exist_ok=True)
    comparison = {"task": "logic", "scale": "demo", "sizes": {"kind": "Scale", "name": "demo", "width": 32}}
    comparison |= {"data": "3f9a1c", "primary": "accuracy pooled over all test bins", "metric": "accuracy"}
    comparison |= {"difficulty": "number of operators", "seeds": list(seeds)}
    comparison["arms"] = [arm.name for arm in arms if not arm.baseline]
    np.savez(out / "test.npz", bins=item_bins, labels=labels)
    (out / "comparison.json").write_text(json.dumps(seal(comparison, out, ["test.npz"])))
    for number, arm in enumerate(arms):
        for run_seed in (0,) if arm.baseline else seeds:
            draws = np.random.default_rng([seed, number, run_seed])
            odds = ease + arm.effect + arm.slope * item_bins + draws.normal(0, arm.spread)
            correct = draws.random(len(labels)) < 1 / (1 + np.exp(-odds))
            predicted = np.where(correct, labels, (labels + draws.integers(1, LABELS, len(labels))) % LABELS)
            write_run(out, arm, run_seed, predicted, labels, item_bins, draws.normal(0, 0.03))
    return out


def change(path: Path, **entries: object) -> None:
    """Change entries of a record, and give it the digests of what is beside it now."""
    record = json.loads(path.read_text()) | entries
    path.write_text(json.dumps(seal(record, path.parent, record["file_digests"])))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file and close it."""
    with np.load(path) as file:
        return dict(file)


def write_run(
    out: Path,
    arm: Drawn,
    seed: int,
    predicted: np.ndarray,
    labels: np.ndarray,
    item_bins: np.ndarray,
    jitter: float = 0.0,
    **changed: object,
) -> Path:
    """Write one finished run and return its folder; `changed` replaces entries of its result."""
    folder = out / arm.name.replace(":", "@").replace("/", "_") / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    correct = predicted == labels
    np.savez(folder / "predictions.npz", statistics=correct, predicted=predicted)
    result = {"task": "logic", "scale": "demo", "arm": arm.name, "control": arm.control, "seed": seed}
    result["settings"] = {"seed": seed, **_settings(arm)}
    bins = {str(name): float(correct[item_bins == name].mean()) for name in np.unique(item_bins)}
    result |= {"score": {"pooled": float(correct.mean()), "bins": bins}, "dev_score": float(correct.mean())}
    result |= _measures(arm, jitter)
    result["versions"] = {"python": "3.11.7", "headwise": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"}
    write_result(folder, result | changed)
    return folder


def _settings(arm: Drawn) -> Mapping[str, object]:
    if arm.baseline:
        return {"baseline": arm.name}
    rule = {"kind": "SVGD", "alpha": arm.force, "kernel": {"kind": "RBF"}}
    methods = [] if arm.force is None else [{"kind": "Repel", "rule": rule}]
    return {"arm": {"kind": "Arm", "name": arm.name, "methods": methods}}


def _measures(arm: Drawn, jitter: float) -> Mapping[str, object]:
    names = ("distance", "output_cosine", "output_cka", "position_js", "parameter_cosine", "particle_norm")
    if arm.baseline:
        none = dict.fromkeys((*names, "force_ratio", "parameters", "step_seconds"))
        return {**none, "train_seconds": 3.0}
    cosine = arm.cosine + jitter
    values = (3.0 - 2 * cosine, cosine, cosine**2, 0.3, 0.02 * cosine, 5.7 + jitter)
    force = None if arm.force is None else arm.force * (1 + jitter)
    cost = {"parameters": 181_319, "step_seconds": 0.011 * (1 + abs(jitter)), "train_seconds": 43.0}
    return {**dict(zip(names, values, strict=True)), "force_ratio": force, **cost}


def write_head_costs(out: Path, costs: Mapping[str, Sequence[float]], *, seeds: Sequence[int] = (0, 1)) -> None:
    """Write what the heads of some arms cost on accuracy, the same under each seed; a tenth of that of loss.

    The heads are of two kinds in turn; each interval is 0.01 to either side.
    """
    for arm, values in costs.items():
        heads = []
        for head, value in enumerate(values):
            place = {"site": "encoder.layers.0", "kind": ("self", "cross")[head % 2], "layer": 0, "head": head}
            costs_of = {"accuracy": value, "loss": value / 10}
            drops = {score: {"value": c, "low": c - 0.01, "high": c + 0.01} for score, c in costs_of.items()}
            heads.append({**place, "drops": drops})
        record = {"numbers": {}, "scores": {"accuracy": 0.8, "loss": 0.5}, "items": 30, "heads": heads}
        for seed in seeds:
            path = out / arm.replace(":", "@") / f"seed-{seed}" / "analysis-redundancy.json"
            path.write_text(json.dumps(record))
