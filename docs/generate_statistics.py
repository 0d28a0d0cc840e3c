"""Writes the tables of docs/statistics.md from the record that `make bench NAME=calibration` wrote last: `make api`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headwise.input_files import parse_json

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "statistics.md"


def render() -> str:
    """Return the page as it is, with its tables made anew."""
    path = max((ROOT / "benchmarks" / "records").glob("*-calibration-cpu*.json"))
    record = parse_json(path.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    for name, table in (("normal", _list_normal(record)), ("logistic", _list_logistic(record))):
        start, end = f"<!-- {name}: written by make api -->", "<!-- end -->"
        before, found, rest = page.partition(start)
        if not found or end not in rest:
            raise SystemExit(f"{PAGE.name} has no place for the table {name}: {start} ... {end}.")
        page = f"{before}{start}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return page


def _list_normal(record: Mapping[str, Any]) -> str:
    seeds = list(dict.fromkeys(row["seeds"] for row in record["normal"]))
    rows = []
    for ratio in dict.fromkeys(row["ratio"] for row in record["normal"]):
        of = {row["seeds"]: row for row in record["normal"] if row["ratio"] == ratio}
        sizes = ["/".join(_percent(of[count]["sizes"][place], 2) for count in seeds) for place in range(3)]
        others = [_join(of[count][name] for count in seeds) for name in ("equivalence", "power_at_detectable")]
        rows.append([f"{ratio:g}", *sizes, *others])
    header = ("items over seeds", "at 5 %", "at 1 %", "at 0.5 %", "equivalence at its bound", "power at the detectable")
    return _write(header, rows)


def _list_logistic(record: Mapping[str, Any]) -> str:
    rows = []
    for name, items in dict.fromkeys((row["name"], row["items"]) for row in record["logistic"]):
        of = [row for row in record["logistic"] if (row["name"], row["items"]) == (name, items)]
        found = [_join(row[key] for row in of) for key in ("student", "joint", "cover", "gain_cover")]
        power = [_join((row["power"][place] for row in of), 0) for place in range(len(record["gains"]))]
        rows.append([name, f"{items:,}", *found, *power])
    gains = [f"power at {100 * gain:g}" for gain in record["gains"]]
    return _write(("what differs", "N", "t", "joint", "cover of 0", "cover of 2 points", *gains), rows)


def _join(values: Iterable[float], digits: int = 1) -> str:
    return "/".join(_percent(value, digits) for value in values)


def _percent(value: float, digits: int) -> str:
    return f"{100 * value:.{digits}f}"


def _write(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
