"""The evidence for a claim: finished runs of some arms and seeds of a comparison, and all their numbers."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise.errors import DataError
from headwise_lab.experiment.arm import escape_arm_name
from headwise_lab.experiment.run_folder import ANALYSIS, RESULT, read_json
from headwise_lab.results.runs import COMPARISON, Results, Run, read_results


@dataclass(frozen=True)
class Evidence:
    """The runs of one comparison that a reproduction needs.

    Attributes:
        results: The comparison, restricted to these arms and seeds.
        numbers: (arm, seed) to the numbers of that run by name: "step_seconds", "parameters", "output_cosine", measures
            of its answers such as "NLL", and results of its analyses.
    """

    results: Results
    numbers: Mapping[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)

    def has(self, arm: str) -> bool:
        """Return whether an arm has a run."""
        return any(known == arm for known, _ in self.numbers)

    def of(self, arm: str, name: str) -> dict[int, float]:
        """Return a number of an arm by seed, for the runs that have it."""
        return {
            seed: found[name]
            for (known, seed), found in sorted(self.numbers.items(), key=lambda item: item[0][1])
            if known == arm and name in found
        }

    def mean(self, arm: str, name: str) -> float | None:
        """Return the mean of a number over seeds, or None."""
        found = self.of(arm, name)
        return statistics.fmean(found.values()) if found else None


def read_evidence(out: Path, arms: Sequence[str], seeds: Sequence[int]) -> Evidence | None:
    """Return the finished runs of `arms` with `seeds`, and the baselines, from the folder of a comparison.

    Args:
        out: Folder of the comparison; it may hold other arms and seeds.
        arms: Names of the arms, in the order of the table.
        seeds: The seeds.

    Returns:
        The evidence, or None if none of these runs is finished.

    Raises:
        DataError: A file is damaged; see `read_results`.
    """
    finished = any((_find_folder(out, arm, seed) / RESULT).exists() for arm in arms for seed in seeds)
    if not finished or not (out / COMPARISON).exists():
        return None
    results = read_results(out).only(seeds, arms)
    numbers = {(run.arm, run.seed): read_numbers(_find_folder(out, run.arm, run.seed)) for run in results.runs}
    return Evidence(results, numbers)


def read_numbers(folder: Path) -> dict[str, float]:
    """Return the finite numbers of a finished run by name: of its result, answers, analyses and attentions.

    Raises:
        DataError: A file is malformed.
    """
    result = folder / RESULT
    records: list[tuple[Path, Any]] = [(result, read_json(result))]
    for path in sorted(folder.glob(f"{ANALYSIS}*.json")):
        analysis = read_json(path)
        records.append((path, analysis.get("numbers") if isinstance(analysis, dict) else None))
    found: dict[str, float] = {}
    for path, record in records:
        try:
            parts = [record]
            if path == result:
                parts.append(record.get("answers") or {})
                parts += [_name_numbers(site, values) for site, values in (record.get("sites") or {}).items()]
            found |= {str(name): float(value) for part in parts for name, value in part.items() if _is_number(value)}
        except (AttributeError, OverflowError):
            kind = "result of a run" if path == result else "record of an analysis"
            raise DataError(f"{path} is not the {kind}; delete it and run the same command again.") from None
    return found


def _name_numbers(site: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name} of {site}": value for name, value in values.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def index_by_seed(runs: Sequence[Run], arm: str) -> dict[int, Run]:
    """Return the runs of an arm by seed."""
    return {run.seed: run for run in runs if run.arm == arm}


def match_seeds(pairs: Sequence[tuple[Evidence, str]]) -> list[dict[int, Run]]:
    """Return the runs of several arms by shared seed; the one run of a baseline is matched with every seed."""
    runs = [index_by_seed(evidence.results.runs, arm) for evidence, arm in pairs]
    alone = [bool(found) and all(run.baseline for run in found.values()) for found in runs]
    others = [set(found) for found, baseline in zip(runs, alone, strict=True) if not baseline]
    if not others:
        return runs
    seeds = set.intersection(*others)
    return [
        dict.fromkeys(seeds, next(iter(found.values()))) if baseline else found
        for found, baseline in zip(runs, alone, strict=True)
    ]


def _find_folder(out: Path, arm: str, seed: int) -> Path:
    return out / escape_arm_name(arm) / f"seed-{seed}"
