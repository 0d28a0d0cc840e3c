"""Writes every record of the papers anew from the numbers of its runs, with its pictures and pages: `make records`.

After a change of statistics, claims, wording or figures. Records of version 0.1 have no such numbers and stay.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from rich.progress import track

from headwise_lab.experiment.run_folder import read_json, write_text
from headwise_lab.papers.pages import FOLDER, render
from headwise_lab.papers.recomputed import has_runs, recompute
from headwise_lab.papers.records import write_records

PAPERS = Path(__file__).parents[1] / "laboratory" / "papers"


def write_all(papers: Path) -> None:
    """Write every record whose runs are kept, and the pages of every paper."""
    kept = [path for path in sorted(papers.glob(f"*/{FOLDER}/*.json")) if has_runs(path)]
    for path in track(kept, "records"):
        with TemporaryDirectory() as place:
            write_records(recompute(path, Path(place)), path.parents[1], read_json(path)["command"])
    for paper in sorted({path.parents[1] for path in papers.glob(f"*/{FOLDER}/*.json")}):
        for path, text in render(paper).items():
            write_text(path, text)


if __name__ == "__main__":
    write_all(PAPERS)
