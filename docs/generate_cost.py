"""Writes the tables of docs/cost.md from records of benchmarks/floors.py and benchmarks/laboratory.py: `make api`."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from headwise.strict_json import parse_json

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
BEFORE, NOW = "2026-11-25-floors-cpu-before.json", "2026-11-25-floors-cpu.json"
LABORATORY = "2026-11-25-laboratory-cpu.json"
PAGE = Path(__file__).parent / "cost.md"
START, END = "<!-- {}: written by make api -->", "<!-- end -->"


def render() -> str:
    """Return the page as it is, with its tables made anew."""
    before, now, laboratory = (
        parse_json((RECORDS / name).read_text(encoding="utf-8")) for name in (BEFORE, NOW, LABORATORY)
    )
    page = PAGE.read_text(encoding="utf-8")
    tables = {"table": make_table(before, now), "laboratory": make_laboratory_table(laboratory)}
    for name, table in tables.items():
        start = START.format(name)
        head, _, rest = page.partition(start)
        page = f"{head}{start}\n\n{table}\n\n{END}{rest.partition(END)[2]}"
    return page


def make_table(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return a row for each figure: its floor, what it was, what it is and what is wanted."""
    wanted = now["wanted"]
    rows = [("what", "floor", "before", "now", "wanted, at most"), ("---",) * 5]
    for name, row in now["bytes"]["rows"].items():
        old = before["bytes"]["rows"][name]
        times = (f"{own['milliseconds']:.1f} ms, {own['times the floor']:.1f} times" for own in (old, row))
        alone = row["times the floor, products alone"]
        floor = f"{row['floor milliseconds']:.2f} ms" + ("" if alone is None else f"; products alone {alone:.1f} times")
        rows.append((f"{name}: bytes", floor, *times, f"{row['wanted']:g} times"))
    old, new = before["python"], now["python"]
    for name in ("svgd", "output", "three terms"):
        values = (f"{own['microseconds per layer'][name]:.0f} us" for own in (old, new))
        most = wanted.get(f"microseconds per layer, {name}")
        rows.append((f"{name}: Python per layer", "0 us", *values, "-" if most is None else f"{most:g} us"))
    for name in ("svgd", "output", "three terms"):
        values = (f"{own['operators of plain'][name]:.2f}" for own in (old, new))
        most = wanted.get(f"operators, {name}")
        rows.append((f"{name}: operators of a step over plain's", "1", *values, "-" if most is None else f"{most:g}"))
    values = (f"{own['seconds to attach']:.2f} s" for own in (old, new))
    rows.append(("attaching a penalty to 384 layers", "0 s", *values, f"{wanted['seconds to attach']:g} s"))
    noise = (own["bytes"]["copy again"] for own in (before, now))
    rows.append(("a copy over the same copy (A/A)", "1", *(f"{value:.3f}" for value in noise), "-"))
    speed = (own["bytes"]["bytes a second of copying"] / 1e9 for own in (before, now))
    rows.append(("a copy, GB/s", "-", *(f"{value:.1f}" for value in speed), "-"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def make_laboratory_table(record: dict[str, Any]) -> str:
    """Return a row for each kind of run: its speed beside a bare loop's, and how long its start takes."""
    rows = [("runs of", "examples a second, of a bare loop's", "the bare loop over itself", "more a step", "start")]
    rows.append(("---",) * 5)
    for name, found in record["speeds"].items():
        start = record["starts"].get(name.partition(" ")[0])
        seconds = f"{median(start['wall']):.1f} s" if start and name.endswith("demo") else "-"
        more = f"{found['microseconds_more_a_step'] / 1000:.1f} ms"
        rows.append((name, f"{found['ratio']:.2f}", f"{found['bare_again']:.2f}", more, seconds))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
