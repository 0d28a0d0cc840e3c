"""Writes the tables of docs/cost.md from records of benchmarks: `make api`."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from headwise.input_files import parse_json

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
BEFORE, NOW = "2026-11-25-floors-cpu-before.json", "2026-11-26-floors-cpu.json"
STEPS_BEFORE, STEPS = "2026-11-21-overhead-cpu.json", "2026-11-26-overhead-cpu.json"
MEASURE_BEFORE = "2026-11-22-measure-cpu.json"
MEASURE = ("2026-11-26-measure-cpu.json", "2026-11-26-measure-cpu-12-layers.json")
LABORATORY = "2026-11-26-laboratory-cpu-2.json"
# What is wanted at most: of a plain step, of the trunk's time, of separate evaluations.
STEP_GOALS = {"svgd apply, 54 groups": 0.003, "svgd apply, first encoder layer": 0.0005}
ROUTING_GOALS = {"em": 1.10, "simple": 1.15}
MEASURE_GOAL = 0.56
PAGE = Path(__file__).parent / "cost.md"
START, END = "<!-- {}: written by make api -->", "<!-- end -->"


def render() -> str:
    """Return the page as it is, with its tables made anew."""
    page = PAGE.read_text(encoding="utf-8")
    tables = {
        "table": make_table(read(BEFORE), read(NOW)),
        "steps": make_steps_table(read(STEPS)),
        "routing": make_routing_table(read(STEPS_BEFORE), read(STEPS)),
        "measure": make_measure_table(read(MEASURE_BEFORE), [read(name) for name in MEASURE]),
        "laboratory": make_laboratory_table(read(LABORATORY)),
    }
    for name, table in tables.items():
        start = START.format(name)
        head, _, rest = page.partition(start)
        page = f"{head}{start}\n\n{table}\n\n{END}{rest.partition(END)[2]}"
    return page


def read(name: str) -> dict[str, Any]:
    """Return a record."""
    return parse_json((RECORDS / name).read_text(encoding="utf-8"))


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
    return join_rows(rows)


def make_steps_table(record: dict[str, Any]) -> str:
    """Return a row for each method: its share of a plain step, or the time of a step over that of a plain one."""
    models = record["models"]
    shapes = [f"{model['batch']} sentences of {model['length']} tokens" for model in models]
    rows = [("what", *shapes, "wanted, at most"), ("---",) * (len(shapes) + 2)]
    for name in models[0]["ratio to plain"]:
        if name != "plain":
            write = "{:.2%}" if " apply" in name else "{:.3f}"
            found = (model["ratio to plain"].get(name) for model in models)
            values = ("-" if value is None else write.format(value) for value in found)
            rows.append((name, *values, f"{STEP_GOALS[name]:.2%}" if name in STEP_GOALS else "-"))
    return join_rows(rows)


def make_routing_table(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return a row for each routing: its time over that of uniform weights on the same votes."""
    rows = [("one module", "before", "now", "wanted, at most"), ("---",) * 4]
    old, new = (own["module"]["ratio to trunk"] for own in (before, now))
    for name in (name for name in new if name != "trunk"):
        goal = f"{ROUTING_GOALS[name]:.2f}" if name in ROUTING_GOALS else "-"
        rows.append((name, f"{old[name]:.2f}", f"{new[name]:.2f}", goal))
    return join_rows(rows)


def make_measure_table(before: dict[str, Any], now: list[dict[str, Any]]) -> str:
    """Return a row for each model: the time of `measure` over that of an evaluation without each head."""
    rows = [("layers", "heads", "floor", "before", "now", "wanted, at most"), ("---",) * 6]
    for record in now:
        old = f"{before['ratio']:.2f}" if record["heads"] == before["heads"] else "-"
        sizes = (str(record["layers"]), str(record["heads"]), f"{record['expected']:.3f}")
        rows.append((*sizes, old, f"{record['ratio']:.3f}", f"{MEASURE_GOAL:.2f}"))
    return join_rows(rows)


def make_laboratory_table(record: dict[str, Any]) -> str:
    """Return a row for each kind of run: its speed beside a bare loop's, and how long its start takes."""
    rows = [("runs of", "examples a second, of a bare loop's", "the bare loop over itself", "more a step", "start")]
    rows.append(("---",) * 5)
    for name, found in record["speeds"].items():
        start = record["starts"].get(name.partition(" ")[0])
        seconds = f"{median(start['wall']):.1f} s" if start and name.endswith("demo") else "-"
        more = f"{found['microseconds_more_a_step'] / 1000:.1f} ms"
        rows.append((name, f"{found['ratio']:.2f}", f"{found['bare_again']:.2f}", more, seconds))
    return join_rows(rows)


def join_rows(rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
