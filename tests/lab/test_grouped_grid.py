"""The grid of a table in groups of sets: what is marked as at chance, and what a mean is over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headwise.lab.cells import NONE
from headwise.lab.claims import Contrast
from headwise.lab.statistics import Estimate
from headwise.lab.tables.grouped import grouped_grid
from headwise.lab.tables.reproduction import Column, PaperRow, Published

GROUPS = {"Easy": ("One", "Two"), "Hard": ("Three", "Four")}
PAPER = {"One": "90.00", "Two": "80.40", "Three": "55.00"}
PUBLISHED = Published(
    "somewhere",
    (Column("accuracy"),),
    tuple(PaperRow("Base", "plain", (cell,), part) for part, cell in PAPER.items()),
)


def table(**scores: tuple[float, float, float]) -> Any:
    """A table of rows by arm: value, lower and upper end."""
    rows = {
        arm: SimpleNamespace(arm=arm, score=Estimate(*ends, 0.5, 5, 100), baseline=arm == "majority")
        for arm, ends in scores.items()
    }
    return SimpleNamespace(row=rows.get, arms=tuple(row for row in rows.values() if not row.baseline))


def grid(**tables: Any) -> dict[str, tuple[str, ...]]:
    found = grouped_grid("A table", PUBLISHED, GROUPS, tables, lambda _part, arm: arm)
    assert found.header == ("task", "majority", "plain, paper", "plain, here", "em, here")
    assert "in parentheses what is not told to be better than the majority baseline" in found.title
    return {row[0]: tuple(row[1:]) for row in found.rows}


MAJORITY = (0.5, 0.45, 0.55)
TOLD, REACHING, TOUCHING, BELOW = (0.6, 0.51, 0.7), (0.6, 0.49, 0.7), (0.6, 0.5, 0.7), (0.4, 0.3, 0.45)


@pytest.mark.parametrize(("ends", "marked"), [(TOLD, False), (REACHING, True), (TOUCHING, True), (BELOW, True)])
def test_what_does_not_stand_clear_of_the_majority_is_in_parentheses_and_nothing_else(ends, marked):
    rows = grid(One=table(majority=MAJORITY, plain=TOLD, em=ends))
    assert rows["One"][:2] == ("50.0", "90.00")
    assert not rows["One"][2].startswith("(")
    assert rows["One"][3].startswith("(") == rows["One"][3].endswith(")") == marked
    assert f"{100 * ends[0]:.1f}" in rows["One"][3]


def test_without_a_majority_nothing_is_marked():
    rows = grid(One=table(plain=TOLD, em=BELOW))
    assert rows["One"][0] == NONE
    assert "(" not in rows["One"][3]


def test_a_mean_is_over_the_parts_that_were_run_and_says_which():
    rows = grid(
        One=table(majority=MAJORITY, plain=(0.7, 0.6, 0.8), em=TOLD),
        Two=table(majority=MAJORITY, plain=(0.8, 0.7, 0.9), em=TOLD),
        Three=table(majority=MAJORITY, plain=(0.55, 0.5, 0.6), em=(0.65, 0.6, 0.7)),
    )
    assert rows["Easy: mean"] == (NONE, "85.20", "75.00", "60.00")
    assert rows["Hard: mean (Three)"] == (NONE, "55.00", "55.00", "65.00")
    assert rows["Four"] == (NONE,) * 4
    assert "Hard: mean" not in rows


def test_an_arm_that_some_part_of_a_group_lacks_has_no_mean_there():
    rows = grid(One=table(majority=MAJORITY, plain=TOLD, em=TOLD), Two=table(majority=MAJORITY, plain=(0.8, 0.7, 0.9)))
    assert rows["Easy: mean"] == (NONE, "85.20", "70.00", NONE)


def test_a_contrast_is_narrowed_to_the_parts_that_are_there_on_both_of_its_sides():
    less = Contrast("em", "plain", over=("Three", "Four"))
    found = Contrast("em", "plain", over=("One", "Two"), less=less).within({"Two", "Three"})
    assert found.over == ("Two",)
    assert found.less is not None
    assert found.less.over == ("Three",)
    assert found.parts == ("Two", "Three")
    # of a side without parts nothing can be said: it asks for a part that no reproduction with several has
    for known in ({"One"}, {"Four"}):
        assert "" in Contrast("em", "plain", over=("One", "Two"), less=less).within(known).parts
