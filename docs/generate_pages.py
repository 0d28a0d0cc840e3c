"""Writes the parts of pages that come from records, and what commands print: `make api`."""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from types import ModuleType
from typing import Any

import pandas as pd

from headwise.input_files import parse_json
from headwise.report.layer import PAIRS
from headwise_lab.papers.overview import build_overview, read_papers

ROOT = Path(__file__).parents[1]
PAPERS = ROOT / "laboratory" / "papers"
RECORDS = Path("benchmarks", "records")
BLIND_SPOTS = ROOT / "benchmarks" / "blind_spots.py"
# Records of benchmarks: of costs as they were and as they are, and what benchmarks/demo.py wrote.
BEFORE, NOW = "2026-11-25-floors-cpu-before.json", "2026-11-26-floors-cpu.json"
STEPS_BEFORE, STEPS = "2026-11-21-overhead-cpu.json", "2026-11-26-overhead-cpu.json"
MEASURE_BEFORE = "2026-11-22-measure-cpu.json"
MEASURE = ("2026-11-26-measure-cpu.json", "2026-11-26-measure-cpu-12-layers.json")
LABORATORY = "2026-11-26-laboratory-cpu-2.json"
DEMO = RECORDS / "2026-11-29-demo-cpu"
SHRINKING = "2026-11-24-shrinking-cpu.json"
REAL_MODELS = "2026-11-28-real-models-cpu.json"
TYPICAL = "2026-11-29-typical-cpu.json"
CACHE = "2026-11-29-cache-cpu.json"
LANGUAGE_MODEL = "2026-11-29-language-model-cpu.json"
# Lines of `headwise inspect` that the README shows.
LOOK_LINES = 11
# What is wanted at most: of a plain step, of the trunk's time, of separate evaluations.
STEP_GOALS = {"svgd apply, 54 groups": 0.003, "svgd apply, first encoder layer": 0.0005}
ROUTING_GOALS = {"em": 1.10, "simple": 1.15}
MEASURE_GOAL = 0.56
# The grids of a comparison that a newcomer reads first, by how their titles begin.
SHOWN = ("facts at scale", "how alike the heads are", "with half of the heads")
PICTURES = {
    "effective-heads": "Effective heads of each arm, as they are and by variance",
    "half-of-the-heads": "What half of the heads costs each arm, before and after a recovery",
}


def render() -> dict[Path, str]:
    """Return every page by its path: as it is, with its parts from records made anew."""
    papers, blind_spots = read_papers(PAPERS), load_blind_spots()
    calibration = read(max(path.name for path in (ROOT / RECORDS).glob("*-calibration-cpu*.json")))
    parts = {
        "README.md": {"look": make_look(), "smaller": make_smaller(read(REAL_MODELS))},
        "docs/laboratory.md": {"demo": make_demo()},
        "docs/cost.md": {
            "table": make_table(read(BEFORE), read(NOW)),
            "steps": make_steps_table(read(STEPS)),
            "routing": make_routing_table(read(STEPS_BEFORE), read(STEPS)),
            "measure": make_measure_table(read(MEASURE_BEFORE), [read(name) for name in MEASURE]),
            "laboratory": make_laboratory_table(read(LABORATORY)),
        },
        "docs/measure.md": {"typical": make_typical(read(TYPICAL))},
        "docs/shrinking.md": {
            "cache": make_cache(read(CACHE)),
            "language model": make_language_model(read(LANGUAGE_MODEL)),
        },
        "docs/diversity.md": {"tricks": blind_spots.render(), "attention": blind_spots.render_attention()},
        "docs/statistics.md": {"normal": list_normal(calibration), "logistic": list_logistic(calibration)},
    }
    filled = {ROOT / name: fill((ROOT / name).read_text(encoding="utf-8"), texts) for name, texts in parts.items()}
    return {PAPERS / "README.md": build_overview(papers), **filled}


def fill(page: str, parts: Mapping[str, str]) -> str:
    """Return a page with each part between its two comments."""
    for name, text in parts.items():
        start, end = f"<!-- {name}: written by make api -->", "<!-- end -->"
        before, found, rest = page.partition(start)
        if not found or end not in rest:
            raise SystemExit(f"a page has no place for {name}: {start} ... {end}.")
        page = f"{before}{start}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


def read(name: str) -> dict[str, Any]:
    """Return the record of a benchmark."""
    return parse_json((ROOT / RECORDS / name).read_text(encoding="utf-8"))


def load_blind_spots() -> ModuleType:
    """Return the benchmark as a module; its folder holds names that the tests have too, and is not put on the path."""
    spec = importlib.util.spec_from_file_location("blind_spots", BLIND_SPOTS)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["blind_spots"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def join_rows(header: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "---") -> str:
    """Return a table in Markdown; `rule` is that of all columns but the first."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---", *[rule] * (len(header) - 1)], *rows))


def make_table(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return a row for each figure: its floor, what it was, what it is and what is wanted."""
    rows = []
    for name, row in now["bytes"]["rows"].items():
        both = (before["bytes"]["rows"][name], row)
        times = (f"{own['milliseconds']:.1f} ms, {own['times the floor']:.1f} times" for own in both)
        alone = row["times the floor, products alone"]
        floor = f"{row['floor milliseconds']:.2f} ms" + ("" if alone is None else f"; products alone {alone:.1f} times")
        rows.append((f"{name}: bytes", floor, *times, f"{row['wanted']:g} times"))
    wanted, old, new = now["wanted"], before["python"], now["python"]
    names = ("svgd", "output", "three terms")
    for name in names:
        values = (f"{own['microseconds per layer'][name]:.0f} us" for own in (old, new))
        most = wanted.get(f"microseconds per layer, {name}")
        rows.append((f"{name}: Python per layer", "0 us", *values, "-" if most is None else f"{most:g} us"))
    for name in names:
        values = (f"{own['operators of plain'][name]:.2f}" for own in (old, new))
        most = wanted.get(f"operators, {name}")
        rows.append((f"{name}: operators of a step over plain's", "1", *values, "-" if most is None else f"{most:g}"))
    values = (f"{own['seconds to attach']:.2f} s" for own in (old, new))
    rows.append(("attaching a penalty to 384 layers", "0 s", *values, f"{wanted['seconds to attach']:g} s"))
    noise = (f"{own['bytes']['copy again']:.3f}" for own in (before, now))
    rows.append(("a copy over the same copy (A/A)", "1", *noise, "-"))
    speed = (f"{own['bytes']['bytes a second of copying'] / 1e9:.1f}" for own in (before, now))
    rows.append(("a copy, GB/s", "-", *speed, "-"))
    return join_rows(("what", "floor", "before", "now", "wanted, at most"), rows)


def make_steps_table(record: dict[str, Any]) -> str:
    """Return a row for each method: its share of a plain step, or the time of a step over that of a plain one."""
    models, rows = record["models"], []
    shapes = [f"{model['batch']} sentences of {model['length']} tokens" for model in models]
    for name in (name for name in models[0]["ratio to plain"] if name != "plain"):
        write = "{:.2%}" if " apply" in name else "{:.3f}"
        found = (model["ratio to plain"].get(name) for model in models)
        values = ("-" if value is None else write.format(value) for value in found)
        rows.append((name, *values, f"{STEP_GOALS[name]:.2%}" if name in STEP_GOALS else "-"))
    return join_rows(("what", *shapes, "wanted, at most"), rows)


def make_routing_table(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return a row for each routing: its time over that of uniform weights on the same votes."""
    old, new = (own["module"]["ratio to trunk"] for own in (before, now))
    goals = {name: f"{ROUTING_GOALS[name]:.2f}" if name in ROUTING_GOALS else "-" for name in new if name != "trunk"}
    rows = [(name, f"{old[name]:.2f}", f"{new[name]:.2f}", goal) for name, goal in goals.items()]
    return join_rows(("one module", "before", "now", "wanted, at most"), rows)


def make_measure_table(before: dict[str, Any], now: list[dict[str, Any]]) -> str:
    """Return a row for each model: the time of `measure` over that of an evaluation without each head."""
    rows = []
    for record in now:
        old = f"{before['ratio']:.2f}" if record["heads"] == before["heads"] else "-"
        sizes = (str(record["layers"]), str(record["heads"]), f"{record['expected']:.3f}")
        rows.append((*sizes, old, f"{record['ratio']:.3f}", f"{MEASURE_GOAL:.2f}"))
    return join_rows(("layers", "heads", "floor", "before", "now", "wanted, at most"), rows)


def make_laboratory_table(record: dict[str, Any]) -> str:
    """Return a row for each kind of run: its speed beside a bare loop's, and how long its start takes."""
    rows = []
    for name, found in record["speeds"].items():
        start = record["starts"].get(name.partition(" ")[0])
        seconds = f"{median(start['wall']):.1f} s" if start and name.endswith("demo") else "-"
        more = f"{found['microseconds_more_a_step'] / 1000:.1f} ms"
        rows.append((name, f"{found['ratio']:.2f}", f"{found['bare_again']:.2f}", more, seconds))
    header = ("runs of", "examples a second, of a bare loop's", "the bare loop over itself", "more a step", "start")
    return join_rows(header, rows)


def list_normal(record: Mapping[str, Any]) -> str:
    """Return how often the tests err on normal runs, a row for each ratio, the numbers of seeds in a cell."""
    levels = ("at 5 %", "at 1 %", "at 0.5 %")
    names = {"equivalence": "equivalence at its bound", "power_at_detectable": "power at the detectable"}
    return _join_seeds(
        {
            "items over seeds": f"{row['ratio']:g}",
            **{level: _percent(size, 2) for level, size in zip(levels, row["sizes"], strict=True)},
            **{name: _percent(row[key]) for key, name in names.items()},
        }
        for row in record["normal"]
    )


def list_logistic(record: Mapping[str, Any]) -> str:
    """Return how often the tests err on right and wrong answers, the numbers of seeds in a cell."""
    names = {"student": "t", "joint": "joint", "cover": "cover of 0", "gain_cover": "cover of 2 points"}
    gains = [f"power at {100 * gain:g}" for gain in record["gains"]]
    return _join_seeds(
        {
            "what differs": row["name"],
            "N": f"{row['items']:,}",
            **{name: _percent(row[key]) for key, name in names.items()},
            **{name: _percent(power, 0) for name, power in zip(gains, row["power"], strict=True)},
        }
        for row in record["logistic"]
    )


def _join_seeds(rows: Iterable[Mapping[str, str]]) -> str:
    frame = pd.DataFrame(rows)
    keys = [name for name in ("items over seeds", "what differs", "N") if name in frame]
    joined = frame.groupby(keys, sort=False).agg("/".join).reset_index()
    return join_rows(list(joined.columns), joined.to_numpy().tolist(), "--:")


def _percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}"


def make_demo() -> str:
    """Return what `make demo` printed of verdicts and heads, how long it took, and its pictures."""
    record, found = (parse_json((ROOT / DEMO / f"{name}.json").read_text("utf-8")) for name in ("record", "results"))
    rows = {row["arm"]: row for row in found["rows"]}
    cores, repelled = record["machine"]["cores"], next(arm for arm in rows if arm.startswith("svgd"))
    heads = {arm: rows[arm]["measures"]["effective_heads_weighted"] for arm in ("plain", repelled, "cka")}
    scores = {arm: f"{100 * rows[arm]['score']['value']:.1f} %" for arm in ("nb-lr", "plain")}
    text = (ROOT / DEMO / "printed.txt").read_text(encoding="utf-8")
    printed = "\n\n".join(_cut(text, title) for title in SHOWN if title in text)
    leads = (
        f"{arm} {100 * lead['value']:+.1f} ({100 * lead['low']:+.1f} to {100 * lead['high']:+.1f}) points over "
        f"{lead['against']}: {lead['verdict']}"
        for arm in (repelled, "cka")
        if (lead := rows[arm]["to_control"])
    )
    minutes = record["cpu_seconds"] / 60 / cores
    said = (
        (
            "A sentence says what three people drink (`anna drinks tea , ben drinks milk , emma drinks tea`), and a "
            "question asks about one of them (`what does ben drink ?`). The model is that of [sentence](sentence.md): "
            f"an LSTM and an attention of 8 heads. Four arms, {len(found['seeds'])} seeds each, took {minutes:.1f} "
            f"minutes of CPU time on each of {cores} cores."
        ),
        (
            f"* **Plain heads collapse**: {heads['plain']:.1f} of 8 are effective by variance. With repulsion "
            f"{heads[repelled]:.1f} are, with a penalty {heads['cka']:.1f}."
        ),
        f"* **Accuracy**: words without attention {scores['nb-lr']}, plain {scores['plain']}. {'; '.join(leads)}.",
        (
            "The task was chosen on dev so that plain heads collapse and training ends before all questions are "
            "answered: it shows what the methods do, not that they help elsewhere."
        ),
    )
    places = {alt: DEMO / f"{name}.png" for name, alt in PICTURES.items()}
    pictures = "\n\n".join(f"![{alt}](../{at.as_posix()})" for alt, at in places.items() if (ROOT / at).exists())
    return f"```console\n$ make demo\n...\n{printed}\n```\n\n{pictures}\n\n{_join(said)}"


def _join(parts: Iterable[str]) -> str:
    """Return paragraphs, and points of a list without lines between them."""
    return "\n\n".join(map(_wrap, parts)).replace("\n\n* ", "\n* ").replace("\n* ", "\n\n* ", 1)


def make_look() -> str:
    """Return the first lines that `headwise inspect` prints, and how long it took."""
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    section = page[page.index("$ headwise inspect") :]
    printed, _, rest = section.partition("\n```")
    lines = ["$ headwise inspect MODEL --text SENTENCES.txt --out my-heads", *printed.splitlines()[1:LOOK_LINES], "..."]
    seconds = re.search(r"It took (\d+) seconds", rest)
    assert seconds is not None
    said = (
        f"MODEL is a folder of `save_pretrained()` or a name on the Hub (MiniLM: {seconds[1]} seconds on one core);"
        " `my-heads/heads.html` begins with the map. [More commands](docs/commands.md)."
    )
    return "```console\n" + "\n".join(lines) + f"\n```\n\n{_wrap(said)}"


def make_smaller(record: dict[str, Any]) -> str:
    """Return what pruning a trained model costs, a row for each way to choose heads."""
    rows = []
    for name, row in record["models"]["MiniLM"].items():
        scores = [_show_seeds(row[key]) for key in ("score", "recovered")]
        rows.append((name, *scores))
    header = ("MiniLM on STS-B, Spearman in points", "as it is", f"after {record['steps']} steps of training")
    half = next(row for name, row in record["models"]["MiniLM"].items() if name.startswith("half"))["parameters"]
    whole = record["models"]["MiniLM"]["whole"]["parameters"]
    time = read(SHRINKING)["minilm"]["ratio"]["half of the heads removed"]
    works = read(CACHE)["works"]
    cache, budget = works["whole cache"], works["50%, kv_budget"]
    kept = budget["copying"]["right"] / cache["copying"]["right"]
    ways = read(LANGUAGE_MODEL)["ways"]
    merged, averaged = (
        ways[f"one key/value head, {way}"]["loss"] - ways["whole"]["loss"] for way in ("merged", "averaged")
    )
    said = (
        f"Half of the heads leave {half / 1e6:.1f} of {whole / 1e6:.1f} million parameters and {time:.2f} of the time. "
        "Heads are chosen on training pairs; the whole model gets the same training. `hw.shrink` takes neurons of MLPs "
        "too. Without training, half of the cache by `hw.kv_budget` adds "
        f"{budget['text']['loss'] - cache['text']['loss']:+.3f} nats to SmolLM2's loss on text and copies "
        f"{100 * kept:.0f} % of what the whole cache copies; a third of the cache by `hw.merge` adds {merged:+.2f}, "
        f"averaging {averaged:+.2f} ([beside other ways](docs/shrinking.md))."
    )
    return f"{join_rows(header, rows, '--:')}\n\n{_wrap(said)}"


def make_typical(record: Mapping[str, Any]) -> str:
    """Return a row for each measure of heads: of each model the median over layers, the least and the most."""
    models = record["models"]
    names = list(dict.fromkeys(name for model in models.values() for name in model["measures"]))
    rows = []
    for name in names:
        cells = (model["measures"].get(name) for model in models.values())
        values = ("-" if cell is None else "{:.2f} ({:.2f} to {:.2f})".format(*cell) for cell in cells)
        rows.append((PAIRS.get(name, name), *values))
    header = ("measure", *(f"{name}, {model['layers']} layers of {model['heads']}" for name, model in models.items()))
    return join_rows(header, rows, "--:")


def make_language_model(record: Mapping[str, Any]) -> str:
    """Return a row for each way to make a language model smaller."""
    ways = record["ways"]
    whole = ways["whole"]
    rows = [
        (
            name,
            f"{row['parameters'] / 1e6:.1f} million",
            f"{row['cache'] / 1024:.1f} kB",
            f"{row['time']:.2f}",
            f"{row['loss']:.3f}" if row is whole else f"{row['loss'] - whole['loss']:+.3f}",
            f"{100 * row['answers']['TREC']:.0f} %",
        )
        for name, row in ways.items()
    ]
    header = ("SmolLM2-135M", "parameters", "cache of a token", "time", "loss, nats a token", "TREC, five kinds")
    return join_rows(header, rows, "--:")


def make_cache(record: Mapping[str, Any]) -> str:
    """Return a row for each way to make a cache smaller: what it adds to losses, what is right, and the bytes."""
    works, long = record["works"], record["long"]
    whole = works["whole cache"]
    rows = []
    for name, row in works.items():
        added = (f"{row[work]['loss'] - (0 if row is whole else whole[work]['loss']):+.3f}" for work in row)
        right = (f"{row[work]['right']:.2f}" for work in ("copying", "number"))
        rows.append((name, *added, *right, f"{row['text']['bytes'] / whole['text']['bytes']:.2f}"))
    header = ("cache", *(f"loss added, {work}" for work in whole), "copied right", "digits right", "bytes")
    first, budget = long.values()
    said = (
        "The first row has the losses of the whole cache, in nats a token. After 8,192 tokens a budget with a quarter "
        f"of the heads holds {budget['of the bytes']:.2f} of the bytes ({budget['bytes'] / 1e6:.0f} of "
        f"{first['bytes'] / 1e6:.0f} MB), and a token takes {budget['time']:.2f} of the time."
    )
    return f"{join_rows(header, rows, '--:')}\n\n{_wrap(said)}"


def _show_seeds(values: Sequence[float]) -> str:
    """Return a mean, and the least and the most of several seeds."""
    ends = "" if len(values) == 1 else f" ({min(values):.1f} to {max(values):.1f})"
    return f"{fmean(values):.1f}{ends}"


def _wrap(text: str) -> str:
    indent = "  " if text.startswith("* ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _cut(printed: str, title: str) -> str:
    """Return the grid with a title, to its last row."""
    lines = [line.rstrip() for line in printed[printed.index(title) :].splitlines()]
    ends = (place for place in range(1, len(lines)) if lines[place][:1].strip() and not lines[place - 1])
    return re.sub("\n{3,}", "\n\n", "\n".join(lines[: next(ends, None)]).strip("\n"))


if __name__ == "__main__":
    for path, text in render().items():
        path.write_text(text, encoding="utf-8")
