"""Writes in README.md what the demo prints and the summary of results, from their records: `make api`."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from headwise.input_files import parse_json
from headwise_lab.papers.overview import summarize_claims

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "README.md"
RECORDS = Path("benchmarks", "records")
# made by benchmarks/demo.py and by benchmarks/first_steps.py
DEMO, STEPS = RECORDS / "2026-11-25-demo-cpu", RECORDS / "2026-11-25-first-steps-cpu.json"
END = "<!-- end -->"
# The grids of a comparison that a newcomer reads first, by how their titles begin.
SHOWN = ("logic at scale", "how alike the heads are", "with half of the heads")
PICTURES = {
    "effective-heads": "Effective heads of each arm, as they are and by variance",
    "half-of-the-heads": "What half of the heads costs each arm, before and after a recovery",
}


def render() -> str:
    """Return the page as it is, with its parts from records made anew."""
    page = PAGE.read_text(encoding="utf-8")
    parts = {
        "demo": make_demo(),
        "first steps": make_steps(),
        "results": summarize_claims(ROOT / "laboratory" / "papers"),
    }
    for name, text in parts.items():
        start = f"<!-- {name}: written by make api -->"
        before, found, rest = page.partition(start)
        if not found or END not in rest:
            raise SystemExit(f"{PAGE.name} has no place for the {name}: {start} ... {END}.")
        page = f"{before}{start}\n\n{text}\n\n{END}{rest.partition(END)[2]}"
    return page


def make_demo() -> str:
    """Return what `make demo` printed of verdicts and heads, how long it took, and its pictures."""
    record, found = _read(DEMO / "record.json"), _read(DEMO / "results.json")
    rows = {row["arm"]: row for row in found["rows"]}
    heads = [rows[arm]["measures"] for arm in ("plain", "cka")]
    plain, cka = (f"{one['effective_heads']:.1f} ({one['effective_heads_weighted']:.1f} by variance)" for one in heads)
    lead, cores = rows["cka"]["to_control"], record["machine"]["cores"]
    text = (ROOT / DEMO / "printed.txt").read_text(encoding="utf-8")
    printed = "\n\n".join(_cut(text, title) for title in SHOWN if title in text)
    said = (
        f"Four arms of a small encoder with {len(found['seeds'])} seeds each took {record['seconds'] / 60:.1f} minutes "
        f"on {cores} cores. Of the 16 heads of a plain layer {plain} are effective; with a penalty on heads that do "
        f"the same, {cka}. The accuracy shows {lead['verdict'].partition(' shown')[0]}: {100 * lead['value']:+.1f} "
        f"points ({100 * lead['low']:+.1f} to {100 * lead['high']:+.1f})."
    )
    halves = re.search(r"^With half of its heads .*?\.$(?=\s*^page: )", text, re.MULTILINE | re.DOTALL)
    said += f" {' '.join(halves[0].split())}" if halves else ""
    places = {alt: DEMO / f"{name}.png" for name, alt in PICTURES.items()}
    pictures = "\n\n".join(f"![{alt}]({at.as_posix()})" for alt, at in places.items() if (ROOT / at).exists())
    return f"```console\n$ make demo\n...\n{printed}\n```\n\n{pictures}\n\n{_wrap(said)}"


def make_steps() -> str:
    """Return how long the five commands took."""
    record = _read(STEPS)
    seconds = record["seconds"]
    return _wrap(
        f"On {record['machine']['cores']} cores these took {seconds['all']:.0f} seconds, {seconds['install']:.0f} of "
        f"them for the installation from pip's cache, and {seconds['inspect']:.0f} for the report on MiniLM and "
        f"{record['sentences']} sentences."
    )


def _wrap(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _read(path: Path) -> dict[str, Any]:
    return parse_json((ROOT / path).read_text(encoding="utf-8"))


def _cut(printed: str, title: str) -> str:
    """Return the grid with a title, to its last row."""
    lines = [line.rstrip() for line in printed[printed.index(title) :].splitlines()]
    ends = (place for place in range(1, len(lines)) if lines[place][:1].strip() and not lines[place - 1])
    return re.sub("\n{3,}", "\n\n", "\n".join(lines[: next(ends, None)]).strip("\n"))


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
