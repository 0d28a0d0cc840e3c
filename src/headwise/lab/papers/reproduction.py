"""A reproduction: the runs behind a paper's table or figure, its numbers and its claims.

Owns the form; which reproductions there are is in the files of the papers, running them is `reproduce`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from headwise.errors import SettingError, require_choice
from headwise.lab.papers.claims import Claim, Judged
from headwise.lab.papers.sizes import Sizes, arm_name, arm_names, resize_scale
from headwise.lab.results.cells import Grid
from headwise.lab.results.evidence import Evidence
from headwise.lab.results.figures import Picture
from headwise.lab.results.table import Table


@dataclass(frozen=True)
class Part:
    """Runs on one model and one corpus: one comparison.

    Attributes:
        arms: The arms, as `--arms` takes each, with the words in braces of `sizes.arm_name`.
        sizes: Its size at each scale; at a scale that is not there the part is left out.
        name: What claims call it; "" where there is one part alone.
        after: The part whose runs its own begin with; "" for none.
    """

    arms: tuple[str, ...]
    sizes: Sizes
    name: str = ""
    after: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a paper's table.

    Attributes:
        title: What the paper calls it.
        ours: What stands beside it: the score, the time of a step over plain's, the number of parameters, or a number
            of each run.
        per_second: Whether the paper prints steps a second, of which the time over plain's follows.
        measure: The number's name in a run's record, for a number of each run.
    """

    title: str
    ours: Literal["score", "step time", "parameters", "measure"] = "score"
    per_second: bool = False
    measure: str = ""


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table.

    Attributes:
        name: What the paper calls it.
        arm: The arm that stands for it, as in `Part.arms`; "" for a row that is quoted and has none.
        cells: The paper's numbers as it prints them, one a column; "" where it has none.
        part: The part that the arm is run in.
    """

    name: str
    arm: str
    cells: tuple[str, ...]
    part: str = ""


def build_rows(
    names: Sequence[str], arms: Callable[[str], Sequence[str]], table: Mapping[str, Sequence[str | tuple[str, ...]]]
) -> tuple[PaperRow, ...]:
    """Return the rows of a table with the same rows in each part.

    Args:
        names: What the paper calls the rows of a part.
        arms: Returns their arms in a part.
        table: Their cells in each part; text alone where there is one column.
    """
    return tuple(
        PaperRow(name, arm, (cells,) if isinstance(cells, str) else cells, part)
        for part, rows in table.items()
        for name, arm, cells in zip(names, arms(part), rows, strict=True)
    )


@dataclass(frozen=True)
class Published:
    """The numbers that a paper prints.

    Attributes:
        on: The data and the model they were measured with.
        columns: The columns.
        rows: The rows that there are arms for.
    """

    on: str
    columns: tuple[Column, ...]
    rows: tuple[PaperRow, ...]


class Writes(Protocol):
    """What writes further pages about the runs of one part."""

    def __call__(self, place: Path, folder: Path, data: Path | None, evidence: Evidence) -> tuple[Path, ...]:
        """Write the pages, and return their files.

        Args:
            place: Folder of the reproduction's page.
            folder: Folder of the part's comparison.
            data: Its data.
            evidence: Its runs.
        """
        ...


class Draws(Protocol):
    """What makes figures of the runs of one part."""

    def __call__(self, part: str, folder: Path, evidence: Evidence, table: Table) -> tuple[Picture, ...]:
        """Return the figures.

        Args:
            part: Name of the part.
            folder: Folder of its comparison.
            evidence: Its runs.
            table: Their table, whose arms keep their colors.
        """
        ...


@dataclass(frozen=True)
class Reproduction:
    """What stands behind one table or figure of a paper.

    Attributes:
        id: The paper's short name and the table's or figure's, for example "diversify/figure-4".
        title: What it shows.
        source: Where in the paper, and which of its numbers there are to compare with.
        task: The task of the laboratory.
        parts: Its runs.
        extra: What is run beyond the paper, and why.
        claims: What the paper says of it.
        published: The paper's numbers, where it prints any.
        analysis: What is measured of each trained model afterwards, one of `analyses.ANALYSES`; "" for nothing.
        measures: Numbers of each run that its claims are about in the place of the score; they get a grid and, over
            several parts, a figure.
        drawn: Makes the figures of each part beside these; None for none.
        overview: Makes a figure of what was found for its claims; None for none.
        after: The reproduction whose runs its own begin with, where the command names no others; "" for none.
        folder: Folder below that of the data which the sets of its parts may lie in; "" for none.
        made: Makes its claims from the parts that there is data for; None where there is data for all.
        summed: Makes a grid of all parts together; None for none.
        left_out: Parts that there is no data for, and what lacks.
        groups: Groups of parts whose scores the paper averages, by name; its numbers are then shown part by part beside
            ours, with the means.
        partial: Whether it says something without the parts whose data is not there; means are then over the others.
        pages: Writes further pages of each part; None for none.
        baselines: Rows of the task's table that no arm makes and that claims speak of.
    """

    id: str
    title: str
    source: str
    task: str
    parts: tuple[Part, ...]
    extra: str
    claims: tuple[Claim, ...]
    published: Published | None = None
    analysis: str = ""
    measures: tuple[str, ...] = ()
    drawn: Draws | None = None
    overview: Callable[[Sequence[Judged]], Picture | None] | None = None
    after: str = ""
    folder: str = ""
    made: Callable[[tuple[str, ...]], tuple[Claim, ...]] | None = None
    summed: Callable[[Mapping[str, Evidence], Mapping[str, Table]], Grid] | None = None
    left_out: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    partial: bool = False
    pages: Writes | None = None
    baselines: tuple[str, ...] = ()

    @property
    def scales(self) -> tuple[str, ...]:
        """The scales it can be run at."""
        return tuple(dict.fromkeys(scale for part in self.parts for scale in part.sizes))

    def parts_at(self, scale: str) -> tuple[Part, ...]:
        """Return the parts that a scale has."""
        return tuple(part for part in self.parts if scale in part.sizes)

    def only(self, names: Sequence[str], scale: str) -> Reproduction:
        """Return it with these of its parts alone, all of them where none is named; its claims then speak of no other.

        Raises:
            SettingError: A name is none of its parts' at this scale.
        """
        known = [part.name for part in self.parts_at(scale)]
        if names and known == [""]:
            raise SettingError(f"part is {names[0]!r}; {self.id} has one part alone: leave --part out.")
        for name in names:
            require_choice("part", name, known)
        return replace(self, parts=tuple(part for part in self.parts if part.name in names)) if names else self

    def without(self, absent: Mapping[str, str]) -> Reproduction:
        """Return it without parts that there is no data for, each with what lacks; its claims speak of the others."""
        parts = tuple(part for part in self.parts if part.name not in absent)
        claims = self.claims if self.made is None else self.made(tuple(part.name for part in parts))
        return replace(self, parts=parts, claims=claims, left_out=tuple(f"{n} ({why})" for n, why in absent.items()))

    @property
    def lack(self) -> str:
        """The sentence that names what there is no data for; empty where nothing lacks."""
        return lack_of(self.left_out)

    def corpora_at(self, scale: str) -> tuple[str, ...]:
        """Return the corpora that the paper trained on, where the scale is the paper's; elsewhere any will do."""
        found = (part.sizes[scale].corpus for part in self.parts_at(scale))
        return tuple(dict.fromkeys(corpus for corpus in found if corpus is not None))

    def arms_at(self, scale: str, scales: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """Return the canonical names of each part's arms at a scale; `scales` are the task's."""
        return {
            part.name: arm_names(part.arms, resize_scale(part.sizes[scale], scales)) for part in self.parts_at(scale)
        }

    def canonical(self, scale: str, scales: Mapping[str, Any]) -> Callable[[str, str], str]:
        """Return the function from (part, arm as written here) to the arm's canonical name at a scale."""
        models = {part.name: resize_scale(part.sizes[scale], scales) for part in self.parts_at(scale)}
        return lambda part, arm: arm if arm in self.baselines else arm_name(arm, models[part])

    def claims_at(self, scale: str, scales: Mapping[str, Any]) -> tuple[Claim, ...]:
        """Return the claims as far as a scale can speak of them: about parts it has, each contrast once.

        A contrast whose two sides are one arm on a model this small is left out where another one remains.
        """
        known = {part.name for part in self.parts_at(scale)}
        canonical = self.canonical(scale, scales)
        claims = []
        for claim in self.claims:
            asked = [one.within(known) for one in claim.contrasts] if self.partial else claim.contrasts
            contrasts = [one.named(canonical) for one in asked if known.issuperset(one.parts)]
            telling = [one for one in contrasts if not one.is_empty] or contrasts[:1]
            shown = tuple(one.named(canonical) for one in claim.shown if known.issuperset(one.parts))
            if telling or shown:
                claims.append(replace(claim, contrasts=tuple(dict.fromkeys(telling)), shown=shown))
        return tuple(claims)


def lack_of(left_out: Sequence[str]) -> str:
    """Return the sentence that names parts that there is no data for; empty for none."""
    return f"Not judged here, for want of data: {', '.join(left_out)}." if left_out else ""
