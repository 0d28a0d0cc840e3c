"""Reads the files that raters saved and counts wins, losses and ties."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from headwise.digests import seal
from headwise.errors import DataError
from headwise.lab.experiment import run_folder as runs
from headwise.lab.results.cells import NONE, Grid, Number
from headwise.lab.results.statistics import Estimate, estimate
from headwise.lab.tasks.graph2text.rating_form import CRITERIA, SIDES

ANALYSIS = "ratings"
VALUES: Mapping[str, int] = {"win": 1, "lose": -1, "tie": 0}


@dataclass(frozen=True)
class Ratings:
    """The ratings of one form.

    Attributes:
        names: The rated run and the one it is compared with.
        runs: Their folders.
        values: By rater and item, for each criterion 1, -1 or 0: the rated run wins, loses, or neither.
    """

    names: tuple[str, str]
    runs: tuple[Path, Path]
    values: Mapping[tuple[str, int], Mapping[str, int]]

    @property
    def raters(self) -> tuple[str, ...]:
        """The raters."""
        return tuple(dict.fromkeys(rater for rater, _ in self.values))

    def shares(self, criterion: str) -> dict[str, float]:
        """Return the shares of "win", "lose" and "tie" among all ratings of a criterion."""
        found = [one[criterion] for one in self.values.values()]
        return {name: found.count(value) / len(found) for name, value in VALUES.items()}

    def lead(self, criterion: str) -> Estimate | None:
        """Return wins less losses as a share, over raters and items; None if no item has all raters."""
        items = [
            item
            for item in dict.fromkeys(i for _, i in self.values)
            if all((r, item) in self.values for r in self.raters)
        ]
        if not items:
            return None
        scores = [[self.values[rater, item][criterion] for item in items] for rater in self.raters]
        return estimate(np.array(scores, dtype=np.float64), least=-1.0, most=1.0)

    def agreement(self, criterion: str) -> float | None:
        """Return how often two raters of an item agree; None if no item has two."""
        pairs = [
            self.values[one, item][criterion] == self.values[other, item][criterion]
            for one, other in combinations(self.raters, 2)
            for item in {i for _, i in self.values}
            if (one, item) in self.values and (other, item) in self.values
        ]
        return sum(pairs) / len(pairs) if pairs else None


def read_ratings(path: Path, files: Sequence[Path]) -> Ratings:
    """Return the ratings in files that raters saved; items that a rater left unfinished are left out.

    Raises:
        DataError: A file is no ratings file or belongs to another form, two are of one rater, or nothing was rated.
    """
    found = runs.read_json(path, "give the rating-key.json that headwise rate wrote.")
    try:
        names, folders = (tuple(map(str, found[name])) for name in ("names", "runs"))
        named, sides = str(found["set"]), {int(item): str(side) for item, side in found["sides"].items()}
        (one, other), (run, against) = names, map(Path, folders)
        if not set(sides.values()) <= {"AB", "BA"}:
            raise ValueError("a side is neither AB nor BA")
    except (LookupError, TypeError, ValueError, AttributeError):
        raise DataError(f"{path} is not the key of a rating form; expected what headwise rate wrote.") from None
    values: dict[tuple[str, int], dict[str, int]] = {}
    for file in files:
        rater, answers = _read_answers(file, named)
        if any(rater == known for known, _ in values):
            raise DataError(f"{file} is a second file of rater {rater}; leave one of them out.")
        for answer in answers:
            item, rating = _read_rating(file, answer, sides)
            if rating is not None:
                values[rater, item] = rating
    if not values:
        named_files = ", ".join(map(str, files))
        raise DataError(f"no item is rated in all respects in {named_files}; expected at least one in any of them.")
    return Ratings((one, other), (run, against), values)


def draw_ratings(ratings: Ratings) -> Grid:
    """Return wins, losses and ties by criterion, with the lead and how far raters agree."""
    found = []
    for name, _ in CRITERIA:
        shares, lead, agreed = ratings.shares(name), ratings.lead(name), ratings.agreement(name)
        cells = [f"{100 * shares[kind]:.0f}%" for kind in VALUES]
        cells.append(NONE if lead is None else str(_show_lead(lead)))
        found.append((name.capitalize(), *cells, NONE if agreed is None else f"{100 * agreed:.0f}%"))
    items = len({item for _, item in ratings.values})
    raters = len(ratings.raters)
    title = f"{ratings.names[0]} against {ratings.names[1]}: {items} texts, {raters} rater{'s' * (raters != 1)}"
    return Grid(title, ("", "Win", "Lose", "Tie", "win - lose, points", "agreement"), tuple(found), "lrrrrr")


def record_ratings(ratings: Ratings) -> Path:
    """Save the shares with the rated run, where `headwise reproduce repulsive/table-5` finds them.

    Raises:
        DataError: The run is no longer there.
    """
    folder = ratings.runs[0]
    if not runs.is_finished(folder):
        raise DataError(f"{folder}, the run that was rated, is no longer there; ratings are saved with it.")
    numbers: dict[str, float] = {
        f"{name}_{kind}": 100 * share for name, _ in CRITERIA for kind, share in ratings.shares(name).items()
    }
    numbers |= {"raters": len(ratings.raters), "rated_texts": len({item for _, item in ratings.values})}
    path = runs.analysis_file(folder, ANALYSIS)
    runs.write_json(path, seal({"numbers": numbers, "against": ratings.names[1]}, folder))
    return path


def _show_lead(lead: Estimate) -> Number:
    return Number(lead.value, lead.low, lead.high, digits=0, factor=100, signed=True)


def _read_answers(file: Path, named: str) -> tuple[str, list[Any]]:
    found = runs.read_json(file, "ask the rater for the file again.")
    try:
        rater, own, answers = str(found["rater"]), str(found["set"]), list(found["answers"])
    except (LookupError, TypeError):
        raise DataError(f"{file} is no file of ratings; expected what the form's button saved.") from None
    if own != named:
        raise DataError(
            f"{file} rates another form ({own:.60}) than the key's ({named:.60}); read it with its own key."
        )
    return rater, answers


def _read_rating(file: Path, answer: Any, sides: Mapping[int, str]) -> tuple[int, dict[str, int] | None]:
    """Return an item and its ratings as 1, -1 or 0 a criterion; None where one is missing."""
    try:
        item = int(answer["item"])
        side = sides[item]
        given = {name: answer.get(name) for name, _ in CRITERIA}
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        raise DataError(f"{file}: {str(answer)[:80]} rates no text of the form.") from None
    strange = [value for value in given.values() if value not in (*SIDES, "tie", None)]
    if strange:
        raise DataError(f"{file}: item {item} is rated {strange[0]!r:.60}; expected A, B or tie.")
    if None in given.values():
        return item, None
    # "AB" means that the rated run is A
    return item, {name: 0 if value == "tie" else (1 if value == side[0] else -1) for name, value in given.items()}
