"""A reproduction: the runs behind a paper's table or figure, its numbers and its claims.

How large the runs of a table are at each scale, and what an arm such as "em:layers={last}" means at that size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from headwise.errors import SettingError, require_choice
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.registry import named_task
from headwise_lab.experiment.scale import ScaleOptions, with_options
from headwise_lab.papers.claims import EFFICACY, Canonical, Claim, Contrast, Judged
from headwise_lab.results.cells import Grid
from headwise_lab.results.evidence import Evidence
from headwise_lab.results.figures import Picture
from headwise_lab.results.table import Table

# The source of studies that no paper has.
OWN = "ours"
CAPSULES = 64


@dataclass(frozen=True)
class Size:
    """The size of a table's runs at one scale.

    Attributes:
        scale: Name of the task's scale.
        times: Width, hidden units and heads are this many times as large as there.
        heads: Heads a layer; None for those of the scale, times `times`.
        corpus: Name of the corpus that the paper trained on, where the scale is the paper's; None elsewhere. Where a
            table has several sets of data at every scale, the name of the set's folder.
        folds: Parts of a cross-validation; None for the scale's own.
        sets: Other fields of the scale, as "heads=15".
    """

    scale: str
    times: int = 1
    heads: int | None = None
    corpus: str | None = None
    folds: int | None = None
    sets: tuple[str, ...] = ()


def resize_scale(size: Size, scales: Mapping[str, Any]) -> Any:
    """Return the scale of a size; the task's own where nothing differs, else one with another name.

    >>> from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES
    >>> sizes = (Size("demo", **more) for more in ({"heads": 4}, {"heads": 2}, {"times": 2}))
    >>> [resize_scale(size, TRANSLATION_SCALES).name for size in sizes]
    ['demo', 'demo-2-heads', 'demo-2-times']
    """
    scale, name = scales[size.scale], size.scale
    changes: dict[str, Any] = {}
    if size.times != 1:
        changes = {field: size.times * getattr(scale, field) for field in ("width", "hidden", "heads")}
        name += f"-{size.times}-times"
    if size.heads is not None and size.heads != changes.get("heads", scale.heads):
        changes["heads"] = size.heads
        name += f"-{size.heads}-heads"
    if size.folds not in (None, getattr(scale, "folds", None)):
        changes["folds"] = size.folds
        name += f"-{size.folds}-folds"
    scale = replace(scale, name=name, **changes) if changes else scale
    return with_options(scale, ScaleOptions(size.scale, sizes=size.sets), "the reproduction's") if size.sets else scale


def arm_names(texts: Sequence[str], scale: Any) -> tuple[str, ...]:
    """Return the canonical names of a table's arms at a scale, each once; see `arm_name`.

    >>> from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES
    >>> arm_names(("plain", "em:layers={lower}", "em:layers={first}", "em:layers={two}"), TRANSLATION_SCALES["demo"])
    ('plain', 'em:layers=0', 'em')
    """
    return tuple(dict.fromkeys(arm_name(text, scale) for text in texts))


def arm_name(text: str, scale: Any) -> str:
    """Return the canonical name of an arm of a table at a scale.

    Words in braces depend on the model: {first} and {last}, the layers at both ends; {lower} and
    {upper}, the halves; {two}, the first two; {heads}, the number of heads; {sixty-four}, 64 or, where the
    model is no wider or 64 does not divide its width, the default. Layers that come out as all are not written, so
    that one arm has one name.
    """
    layers = getattr(scale, "encoder_layers", None) or scale.layers
    half = max(1, layers // 2)
    places = {
        "first": range(1),
        "last": range(layers - 1, layers),
        "lower": range(half),
        "upper": range(layers - half, layers),
        "two": range(min(2, layers)),
    }
    words = {word: "all" if len(chosen) == layers else "/".join(map(str, chosen)) for word, chosen in places.items()}
    # a model that was trained before has the sizes of its folder, and its tables name none
    width = getattr(scale, "width", 0)
    words["heads"] = str(getattr(scale, "heads", 0))
    words["sixty-four"] = str(CAPSULES) if width > CAPSULES and width % CAPSULES == 0 else "none"
    for word, meaning in words.items():
        text = text.replace(f"{{{word}}}", meaning)
    return _name(text)


@cache
def _name(text: str) -> str:
    return parse_arm(text).name


@dataclass(frozen=True)
class Part:
    """Runs on one model and one corpus: one comparison.

    Attributes:
        arms: The arms, as `--arms` takes each, with the words in braces of `arm_name`.
        sizes: Its size at each scale; at a scale that is not there the part is left out.
        name: What claims call it; "" where there is one part alone.
        after: The part whose runs its own begin with; "" for none.
    """

    arms: tuple[str, ...]
    sizes: Mapping[str, Size]
    name: str = ""
    after: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a paper's table.

    Attributes:
        title: What the paper calls it.
        ours: Our number for it: the score, the step time over plain's, or the number of parameters.
        per_second: Whether the paper prints steps a second, of which the time over plain's follows.
        measure: The name in a run's record of the number that stands for the score; "" for the score.
    """

    title: str
    ours: Literal["score", "step time", "parameters"] = "score"
    per_second: bool = False
    measure: str = ""


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table.

    Attributes:
        name: What the paper calls it.
        arm: Our arm for it, as in `Part.arms`; "" for a row that is quoted and has none.
        cells: The paper's numbers as it prints them, one a column; "" where it has none.
        part: The part that the arm is run in.
    """

    name: str
    arm: str
    cells: tuple[str, ...]
    part: str = ""


@dataclass(frozen=True)
class Published:
    """The numbers that a paper prints, with the data and the model they were measured `on`."""

    on: str
    columns: tuple[Column, ...]
    rows: tuple[PaperRow, ...]

    def difference(self, contrast: Contrast, canonical: Canonical, baselines: Sequence[str] = ()) -> float | None:
        """Return what the paper found for a contrast of scores, in the units of ours; None without all its numbers.

        Scores are printed times 100, other numbers in units of ours.
        """
        shown = [(column.ours, column.measure) for column in self.columns]
        wanted = ("score", contrast.measure or "")
        if contrast.bins or contrast.beyond or contrast.less or contrast.kind != EFFICACY or wanted not in shown:
            return None
        rows = [row for row in self.rows if row.arm and row.arm not in baselines and row.part in contrast.parts]
        cells = {(row.part, canonical(row.part, row.arm)): row.cells[shown.index(wanted)] for row in rows}
        sides = [(part, part) for part in contrast.over] or [contrast.sides]
        pairs = [(cells.get((one, contrast.arm), ""), cells.get((other, contrast.against), "")) for one, other in sides]
        if not all(one and other for one, other in pairs):
            return None
        factor = 100 if contrast.measure is None else 1
        return sum(float(one) - float(other) for one, other in pairs) / len(pairs) / factor


@dataclass(frozen=True)
class Reproduction:
    """The runs, claims and published numbers of one table or figure of a paper.

    Attributes:
        id: The paper's short name and the table's or figure's, for example "diversify/figure-4".
        title: What it shows.
        source: Where in the paper, and which of its numbers there are to compare with.
        task: The task of the laboratory.
        parts: Its runs.
        extra: What is run beyond the paper, and why.
        claims: The paper's claims about it.
        published: The paper's numbers, where it prints any.
        analysis: What is measured of each trained model afterwards, one of `analyses.ANALYSES`; "" for nothing.
        measures: Numbers of each run that its claims are about instead of the score; they get a grid and, over several
            parts, a figure.
        drawn: Draws figures of a part from its name, the folder of its comparison, its runs and their table.
        drawn_together: Makes a figure of all parts together from their runs and tables.
        overview: Makes a figure of its claims with their verdicts.
        after: The reproduction whose runs its own begin with, where the command names no others; "" for none.
        folder: Folder below that of the data that may hold the sets of its parts; "" for none.
        made: Makes its claims from the parts that there is data for; None where there is data for all.
        summed: Makes a grid of all parts together from their runs and tables.
        left_out: Parts that there is no data for, and what is missing.
        unasked: Parts of the scale that were not asked for.
        groups: Groups of parts whose scores the paper averages, by name; its grid then has each part, and the
            means.
        partial: Whether it can be run without the parts whose data is missing; means are then over the others.
        pages: Writes further pages of a part from the folder of the page, that of the comparison, the data, the runs.
        baselines: Baselines of the task that claims are about.
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
    drawn: Callable[[str, Path, Evidence, Table], tuple[Picture, ...]] | None = None
    drawn_together: Callable[[Mapping[str, Evidence], Mapping[str, Table]], Picture | None] | None = None
    overview: Callable[[Sequence[Judged]], Picture | None] | None = None
    after: str = ""
    folder: str = ""
    made: Callable[[tuple[str, ...]], tuple[Claim, ...]] | None = None
    summed: Callable[[Mapping[str, Evidence], Mapping[str, Table]], Grid | None] | None = None
    left_out: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    partial: bool = False
    pages: Callable[[Path, Path, Path | None, Evidence], tuple[Path, ...]] | None = None
    baselines: tuple[str, ...] = ()

    @property
    def scales(self) -> tuple[str, ...]:
        """The scales it can be run at."""
        return tuple(dict.fromkeys(scale for part in self.parts for scale in part.sizes))

    @property
    def lack(self) -> str:
        """The sentences that name what there is no data for and what was not asked for; empty where that is nothing."""
        return describe_lack(self.left_out, self.unasked)

    def parts_at(self, scale: str) -> tuple[Part, ...]:
        """Return the parts that a scale has."""
        return tuple(part for part in self.parts if scale in part.sizes)

    def only(self, names: Sequence[str], scale: str) -> Reproduction:
        """Return it with these of its parts alone, all of them where none is named; its claims are then about these.

        Raises:
            SettingError: A name is none of its parts' at this scale.
        """
        known = [part.name for part in self.parts_at(scale)]
        if names and known == [""]:
            raise SettingError(f"part is {names[0]!r}; {self.id} has one part alone: leave --part out.")
        for name in names:
            require_choice("part", name, known)
        if not names:
            return self
        parts = tuple(part for part in self.parts if part.name in names)
        return replace(self, parts=parts, unasked=tuple(name for name in known if name not in names))

    def without(self, absent: Mapping[str, str]) -> Reproduction:
        """Return it without parts that there is no data for, each with what is missing, and without their claims."""
        parts = tuple(part for part in self.parts if part.name not in absent)
        claims = self.claims if self.made is None else self.made(tuple(part.name for part in parts))
        return replace(self, parts=parts, claims=claims, left_out=tuple(f"{n} ({why})" for n, why in absent.items()))

    def corpora_at(self, scale: str) -> tuple[str, ...]:
        """Return the corpora that the paper trained on, where the scale is the paper's; elsewhere any will do."""
        return tuple(dict.fromkeys(corpus for part in self.parts_at(scale) if (corpus := part.sizes[scale].corpus)))

    def arms_at(self, scale: str, scales: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """Return the canonical names of each part's arms at a scale; `scales` are the task's."""
        return {
            part.name: arm_names(part.arms, resize_scale(part.sizes[scale], scales)) for part in self.parts_at(scale)
        }

    def canonical(self, scale: str, scales: Mapping[str, Any]) -> Canonical:
        """Return the function from (part, arm as written here) to the arm's canonical name at a scale."""
        models = {part.name: resize_scale(part.sizes[scale], scales) for part in self.parts_at(scale)}
        return lambda part, arm: arm if arm in self.baselines else arm_name(arm, models[part])

    def claims_at(self, scale: str, scales: Mapping[str, Any]) -> tuple[Claim, ...]:
        """Return the claims as far as a scale can speak of them: about parts it has, each contrast once.

        A contrast whose two sides are one arm on a model this small is left out where another one remains.
        """
        known = {part.name for part in self.parts_at(scale)}
        canonical, baselines = self.canonical(scale, scales), named_task(self.task).baselines
        claims = []
        for claim in self.claims:
            within = [one.within(known) if self.partial else one for one in claim.contrasts]
            contrasts = [one.named(canonical) for one in within if known.issuperset(one.parts)]
            if self.published is not None:
                gains = [self.published.difference(one, canonical, baselines) for one in contrasts]
                contrasts = [replace(one, published=gain) for one, gain in zip(contrasts, gains, strict=True)]
            telling = [one for one in contrasts if not one.is_empty] or contrasts[:1]
            shown = tuple(one.named(canonical) for one in claim.shown if known.issuperset(one.parts))
            if telling or shown:
                claims.append(replace(claim, contrasts=tuple(dict.fromkeys(telling)), shown=shown))
        return tuple(claims)


def describe_lack(left_out: Sequence[str], unasked: Sequence[str]) -> str:
    """Return the sentences that name parts that there is no data for, and that were not asked for; empty for none."""
    lines = [f"Not judged here, for want of data: {', '.join(left_out)}."] if left_out else []
    if unasked:
        lines.append(f"Not asked for: {', '.join(unasked)}. Claims, and families of tests, are about the other parts.")
    return " ".join(lines)
