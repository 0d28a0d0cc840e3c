"""Numbers shown with a claim without a test: what runs cost, how large a model is, where a curve is lowest."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from headwise.lab.results.cells import Cell, Line, Number
from headwise.lab.results.evidence import Evidence
from headwise.lab.results.runs import STEP_RATIO

ABSENT, UNMEASURED = "not run", "not measured"


class _PerArm:
    """A label with one value for each arm of a part."""

    label: str
    arms: tuple[str, ...]
    part: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The part the values come from."""
        return (self.part,)

    def named(self, canonical: Callable[[str, str], str]) -> Self:
        """Return it with each arm's name replaced by `canonical(part, name)`, each once."""
        arms = tuple(dict.fromkeys(canonical(self.part, arm) for arm in self.arms))
        this: Any = self  # a dataclass in each subclass
        return replace(this, arms=arms)

    def is_measured(self, parts: Mapping[str, Evidence]) -> bool:
        """Return whether any arm has a value."""
        return any(self._find(arm, parts) not in (ABSENT, UNMEASURED) for arm in self.arms)

    def line(self, parts: Mapping[str, Evidence]) -> Line:
        """Return the value of each arm."""
        place = f" in {self.part}" if self.part else ""
        return Line(f"{self.label}{place}", {arm: self._find(arm, parts) for arm in self.arms})

    def _find(self, arm: str, parts: Mapping[str, Evidence]) -> Cell:
        raise NotImplementedError


@dataclass(frozen=True)
class Numbers(_PerArm):
    """Means over seeds of a number of each run.

    Attributes:
        measure: The number's name in a run's record.
        label: What it is called in the text.
        arms: Names of the arms.
        part: The part they are run in.
        digits: Digits behind the point.
        scale: What it is multiplied by; 100 for shares in percent.
    """

    measure: str
    label: str
    arms: tuple[str, ...]
    part: str = ""
    digits: int = 2
    scale: float = 1.0

    def _find(self, arm: str, parts: Mapping[str, Evidence]) -> Cell:
        if self.part not in parts:
            return ABSENT
        value = parts[self.part].mean(arm, self.measure)
        if value is not None:
            return Number(value, digits=self.digits, factor=self.scale)
        return UNMEASURED if parts[self.part].has(arm) else ABSENT


@dataclass(frozen=True)
class StepTimes(_PerArm):
    """Time of a training step over plain's: of steps timed in turn, or of the runs themselves; median over seeds.

    Attributes:
        arms: Names of the arms.
        part: The part they are run in.
    """

    arms: tuple[str, ...]
    part: str = ""
    label: str = field(default="step time over plain", init=False, repr=False)

    def _find(self, arm: str, parts: Mapping[str, Evidence]) -> Cell:
        if self.part not in parts:
            return ABSENT
        ratios = parts[self.part].of(arm, STEP_RATIO).values()
        if not ratios:
            own, plain = (parts[self.part].of(name, "step_seconds") for name in (arm, "plain"))
            ratios = [own[seed] / plain[seed] for seed in own.keys() & plain.keys() if plain[seed] > 0]
        return Number(statistics.median(ratios), digits=2) if ratios else ABSENT


@dataclass(frozen=True)
class Least:
    """In which of several parts a number of an arm is least, on average and seed by seed.

    Attributes:
        measure: The number's name in a run's record.
        arm: Name of the arm.
        among: The parts, in their order.
    """

    measure: str
    arm: str
    among: tuple[str, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts it looks at."""
        return self.among

    def named(self, canonical: Callable[[str, str], str]) -> Least:
        """Return it with the canonical name."""
        return replace(self, arm=canonical(self.among[0], self.arm))

    def is_measured(self, parts: Mapping[str, Evidence]) -> bool:
        """Return whether a seed has the number in every part."""
        return bool(self._seeds(parts))

    def line(self, parts: Mapping[str, Evidence]) -> Line:
        """Return the means, and how many seeds say with them where it is least."""
        found = {part: parts[part].of(self.arm, self.measure) for part in self.among if part in parts}
        label, seeds = f"least {self.measure} of {self.arm}", self._seeds(parts)
        if not seeds:
            return Line(label, {", ".join(self.among): ABSENT})
        means = {part: statistics.fmean(values[seed] for seed in seeds) for part, values in found.items()}
        least = min(means, key=lambda part: means[part])
        agreeing = sum(min(found, key=lambda part: found[part][seed]) == least for seed in seeds)
        shown = {part: Number(mean, digits=3) for part, mean in means.items()}
        return Line(label, shown, f"; least in {least}, as {agreeing} of {len(seeds)} seeds agree")

    def _seeds(self, parts: Mapping[str, Evidence]) -> set[int]:
        return set.intersection(
            *(set(parts[part].of(self.arm, self.measure)) if part in parts else set() for part in self.among)
        )


Shown = Numbers | StepTimes | Least
