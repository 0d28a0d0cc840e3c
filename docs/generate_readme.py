"""Writes the summary of results in README.md from the records of the papers: `make api`."""

from __future__ import annotations

from pathlib import Path

from headwise.lab.papers.overview import summarize_claims

PAGE = Path(__file__).parents[1] / "README.md"
START, END = "<!-- results: written by make api -->", "<!-- end -->"


def render() -> str:
    """Return the page as it is, with its summary of results made anew."""
    before, found, rest = PAGE.read_text(encoding="utf-8").partition(START)
    if not found or END not in rest:
        raise SystemExit(f"{PAGE.name} has no place for the results: {START} ... {END}.")
    return f"{before}{START}\n\n{summarize_claims(PAGE.parent / 'papers')}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
