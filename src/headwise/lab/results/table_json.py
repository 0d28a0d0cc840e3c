"""A comparison's table as JSON data: what `results.json` holds.

Owns the names and the order of its keys. Must not compute anything: the numbers are `table`'s.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from headwise.lab.experiment.run_folder import write_json
from headwise.lab.results.head_drops import pooled
from headwise.lab.results.paired_tests import PairedTests
from headwise.lab.results.statistics import Estimate
from headwise.lab.results.table import Difference, Row, Table


def record(table: Table) -> dict[str, Any]:
    """Return the table as JSON data whose keys keep their order."""
    return {
        "task": table.task,
        "scale": table.scale,
        "primary": table.primary,
        "data": table.data,
        "seeds": list(table.seeds),
        "bins": dict(zip(map(str, table.bins), table.items, strict=True)),
        "rows": [_row_record(row, table) for row in table.rows],
        "paired_tests": [_paired_record(tests) for tests in table.paired],
        "missing": list(table.missing),
        "signatures": [list(pair) for pair in table.signatures],
        "versions": dict(table.versions),
    }


def write_record(table: Table, path: Path) -> None:
    """Write `record(table)` so that a reader sees the old file or the new one, never a part."""
    write_json(path, record(table))


def _row_record(row: Row, table: Table) -> dict[str, Any]:
    return {
        "arm": row.arm,
        "control": row.control,
        "baseline": row.baseline,
        "seeds": list(row.seeds),
        "score": _estimate_record(row.score),
        "bins": {str(name): _estimate_record(found) for name, found in zip(table.bins, row.bins, strict=True)},
        "to_plain": _difference_record(row.to_plain),
        "to_control": _difference_record(row.to_control),
        "bins_to_plain": {
            str(name): _estimate_record(found) for name, found in zip(table.bins, row.bins_to_plain, strict=False)
        },
        "verdict": row.verdict,
        "measures": dict(row.measures),
        "answered": dict(row.answered),
        "heads": {
            score: {"seeds": len(models), "heads": sum(len(model.drops) for model in models), **pooled(models)}
            for score, models in row.head_drops.items()
        },
        "parameters": row.parameters,
        "step_ratio": row.step_ratio,
        "runs": [dataclasses.asdict(point) for point in row.points],
        "settings": dict(row.settings),
    }


def _paired_record(tests: PairedTests) -> dict[str, Any]:
    return {
        "arm": tests.arm,
        "against": tests.against,
        "metric": tests.metric,
        "difference": tests.difference,
        "ahead": tests.ahead,
        "behind": tests.behind,
        "seeds": {
            str(seed): {
                "score": test.score,
                "against": test.baseline,
                "p_bootstrap": test.bootstrap,
                "p_randomisation": test.randomisation,
            }
            for seed, test in zip(tests.seeds, tests.tests, strict=True)
        },
    }


def _estimate_record(found: Estimate) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}


def _difference_record(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    estimate = found.estimate
    return {
        "against": found.against,
        **_estimate_record(estimate),
        "seeds": estimate.seeds,
        "drawn": estimate.drawn,
        "p": estimate.p,
        "p_holm": found.adjusted,
        "verdict": found.verdict,
    }
