"""The table of the study of shrinking says what its records say: each number, arm by arm."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TABLE = re.search(r"^\| task \|.*?\n\n", (DOCS / "shrinking.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
ROWS = TABLE[0].splitlines()[2:-1] if TABLE else []
ARMS = ("plain", "scaled", "output-relative", "CKA", "SVGD-span", "CKA-together")


@pytest.mark.parametrize("place", range(len(ROWS)))
def test_each_number_is_the_records(place: int):
    title, *shown = ROWS[place].strip("| ").split(" | ")
    merged = "merged" in title
    # what is merged are the heads of the row above
    (link,) = re.findall(r"\((\S+)\.md\)", ROWS[place - 1] if merged else title)
    grids = json.loads((DOCS / f"{link}.json").read_text(encoding="utf-8"))["grids"]
    grid = next(grid for grid in grids if grid["title"].startswith("loss on the test set"))
    column = grid["header"].index("50% of key/value heads" if merged else "50% of heads")
    kept = {row[0]: row[column]["value"] for row in grid["rows"]}
    assert [number.strip("*") for number in shown] == [f"{kept[arm]:.3f}" for arm in ARMS]


def test_there_are_five_rows():
    assert len(ROWS) == 5
