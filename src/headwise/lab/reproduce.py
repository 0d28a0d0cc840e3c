"""The reproductions there are, and what is shown and kept once their runs are done."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from headwise.lab.claims import judge
from headwise.lab.results import read_results
from headwise.lab.tables.diversify import FIGURE_4
from headwise.lab.tables.reproduction import Reproduction, write_records

__all__ = ["REPRODUCTIONS", "report"]

REPRODUCTIONS: dict[str, Reproduction] = {reproduction.id: reproduction for reproduction in (FIGURE_4,)}


def report(reproduction: Reproduction, out: Path, paper: Path | None, console: Console, command: str) -> None:
    """Show the verdict on each claim, and write the record and RESULTS.md where a folder of notes is named.

    Args:
        reproduction: What was run.
        out: The folder of its comparison.
        paper: Folder of the paper's notes, or None.
        console: Where the claims are shown.
        command: What makes the record again.

    Raises:
        DataError: The folder of the comparison is damaged.
    """
    grid = RichTable("claim", "verdict", title=f"{reproduction.id}: {reproduction.source}", title_style="bold")
    for judged in judge(reproduction.claims, read_results(out)):
        grid.add_row(judged.claim.statement, judged.verdict)
    console.print(grid)
    if paper is not None:
        console.print(f"written: {write_records(reproduction, out, paper, command)}")
