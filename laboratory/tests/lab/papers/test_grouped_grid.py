"""The grid of a table in groups of sets: what is marked as at chance, and what a mean is over."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headwise.errors import DataError
from headwise_lab.experiment.evaluation import METRICS
from headwise_lab.papers import records
from headwise_lab.papers.claims import Contrast
from headwise_lab.papers.records import build_grouped_grid
from headwise_lab.papers.reproduction import Column, PaperRow, Published
from headwise_lab.results.cells import NONE
from headwise_lab.results.statistics import estimate, score

GROUPS = {"Easy": ("One", "Two"), "Hard": ("Three", "Four")}
PAPER = {"One": "90.00", "Two": "80.40", "Three": "55.00"}
PUBLISHED = Published(
    "somewhere",
    (Column("accuracy"),),
    tuple(PaperRow("Base", "plain", (cell,), part) for part, cell in PAPER.items()),
)


ITEMS = 400
# A share that is above a half by less than a two-sided test tells.
BARELY = 0.5175


@pytest.fixture(autouse=True)
def labeled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of two labels in the working folder."""
    monkeypatch.chdir(tmp_path)
    keep_labels(2)


def keep_labels(count: int) -> None:
    Path("vocabulary.json").write_text(json.dumps({"vocabulary": [], "labels": [str(one) for one in range(count)]}))


def right(share: float, seeds: int = 5) -> NDArray[np.bool_]:
    """Answers of which so many are right, under each seed others and a few more or fewer."""
    draw = np.random.default_rng(8)
    counts = [round(share * ITEMS) + (place - seeds // 2) * 4 for place in range(seeds)]
    return np.stack([draw.permutation(np.arange(ITEMS) < count) for count in counts])


def table(**shares: float) -> Any:
    """A table of rows by arm, and its runs."""
    rows, found = {}, []
    for arm, share in shares.items():
        baseline = arm == "majority"
        answers = right(share, 1 if baseline else 5)
        rows[arm] = SimpleNamespace(arm=arm, score=score(answers), baseline=baseline)
        found += [
            SimpleNamespace(arm=arm, seed=seed, baseline=baseline, statistics=one, folder=Path())
            for seed, one in enumerate(answers)
        ]
    arms = tuple(row for row in rows.values() if not row.baseline)
    results = SimpleNamespace(runs=found, metric=METRICS["accuracy"])
    return SimpleNamespace(row=rows.get, arms=arms, evidence=SimpleNamespace(results=results))


def grid(**tables: Any) -> dict[str, tuple[str, ...]]:
    evidence = {part: one.evidence for part, one in tables.items()}
    found = build_grouped_grid("A table", PUBLISHED, GROUPS, tables, evidence, lambda _part, arm: arm)
    assert found.header == ("task", "majority", "plain, paper", "plain, here", "em, here")
    assert (
        "scores in parentheses are not significantly above chance: the majority class, or 1/labels if higher"
        in found.title
    )
    assert "Holm-adjusted over all scores of the grid" in found.title
    return {row[0]: tuple(row[1:]) for row in found.text}


@pytest.mark.parametrize(("share", "marked"), [(0.7, False), (0.51, True), (0.5, True), (0.3, True)])
def test_what_is_not_told_to_be_above_the_majority_is_in_parentheses_and_nothing_else(share, marked):
    rows = grid(One=table(majority=0.5, plain=0.8, em=share))
    assert rows["One"][:2] == ("50.0", "90.00")
    assert not rows["One"][2].startswith("(")
    assert rows["One"][3].startswith("(") == rows["One"][3].endswith("))") == marked
    assert f"{100 * share:.1f}" in rows["One"][3]


def test_the_test_is_one_sided_and_adjusted_over_the_whole_grid():
    p = estimate(right(BARELY) - 0.5).p
    assert 0.05 < p < 0.1
    one = table(majority=0.5, plain=BARELY)
    assert records._find_at_chance({"One": one}, {"One": one.evidence}) == set()
    # it is told alone, and not beside three others
    rows = grid(One=one, Two=table(majority=0.5, plain=0.5, em=0.5))
    assert rows["One"][2].startswith("(")
    assert records._find_at_chance({"One": table(majority=0.5, plain=0.3)}, {"One": table(plain=0.3).evidence})


def test_where_guessing_does_better_than_the_majority_it_is_the_floor():
    rare = table(majority=0.0, plain=0.245, em=0.4)
    keep_labels(4)
    assert grid(One=rare)["One"][2].startswith("(")
    assert not grid(One=rare)["One"][3].startswith("(")
    keep_labels(40)
    assert not grid(One=rare)["One"][2].startswith("(")


def test_a_run_that_does_not_say_its_labels_is_named():
    Path("vocabulary.json").write_text("{}")
    with pytest.raises(DataError, match=r"vocabulary\.json does not hold the run's labels"):
        grid(One=table(majority=0.5, plain=0.8, em=0.7))


def test_without_a_majority_nothing_is_marked():
    rows = grid(One=table(plain=0.6, em=0.4))
    assert rows["One"][0] == NONE
    assert not rows["One"][3].startswith("(")


def test_a_mean_is_over_the_parts_that_were_run_and_says_which():
    rows = grid(
        One=table(majority=0.5, plain=0.7, em=0.6),
        Two=table(majority=0.5, plain=0.8, em=0.6),
        Three=table(majority=0.5, plain=0.55, em=0.65),
    )
    assert rows["Easy: mean"] == (NONE, "85.20", "75.00", "60.00")
    assert rows["Hard: mean (Three)"] == (NONE, "55.00", "55.00", "65.00")
    assert rows["Four"] == (NONE,) * 4
    assert "Hard: mean" not in rows


def test_an_arm_that_some_part_of_a_group_lacks_has_no_mean_there():
    rows = grid(One=table(majority=0.5, plain=0.6, em=0.6), Two=table(majority=0.5, plain=0.8))
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
