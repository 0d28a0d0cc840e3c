"""Writes laboratory/papers/README.md, the claims of all papers and what was found, from their records: `make api`."""

from __future__ import annotations

from pathlib import Path

from headwise_lab.papers.overview import build_overview

PAPERS = Path(__file__).parents[1] / "laboratory" / "papers"
PAGE = PAPERS / "README.md"


def render() -> str:
    """Return the page."""
    return build_overview(PAPERS)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
