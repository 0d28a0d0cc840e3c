"""What a paper claims of its runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from headwise.lab.papers.measures import Shown
from headwise.lab.results.runs import MEASURES

# Contrasts of heads check that a method acted; those of what it costs have no test. Each kind is a family of its own.
EFFICACY, MANIPULATION, COST = "efficacy", "manipulation check", "cost"
OF_HEADS = {*MEASURES, "head_vector_cosine", "redundant_share", "raising_share", "different_words"}
OF_COST = {"parameters", "step_seconds", "step_ratio", "train_seconds", "decoding_seconds"}


@dataclass(frozen=True)
class Contrast:
    """The score of one arm minus another's, expected to be above zero.

    Attributes:
        arm: Name of the arm that should be ahead.
        against: Name of the arm that should be behind.
        bins: First and last bin; None for all items.
        beyond: First and last bin of a range whose difference is taken off: the contrast is then that the lead is
            larger on `bins` than there. None for a plain difference.
        of: What the bins count, as in "operators".
        part: The part of the reproduction that `arm` is run in.
        against_part: The part that `against` is run in; None for the same.
        measure: A number of each run instead of the score, as in "NLL"; one value a seed, so only seeds are chance.
        less: A contrast whose difference is taken off.
        over: Parts whose differences are averaged with equal weight; `part` is then unused, and `less` has parts to
            average too.
        published: What the paper found, in the units of ours; None where it prints no such numbers.
        doses: Arms of rising strength in equal steps, of which `arm` is the last and `against` the first: the contrast
            is then the least-squares slope over all of them, per step; see `follow_doses`. Empty for two arms.
    """

    arm: str
    against: str
    bins: tuple[int, int] | None = None
    beyond: tuple[int, int] | None = None
    of: str = "operators"
    part: str = ""
    against_part: str | None = None
    measure: str | None = None
    less: Contrast | None = None
    over: tuple[str, ...] = ()
    published: float | None = None
    doses: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The family it is in: "efficacy", "manipulation check" or "cost"."""
        name = (self.measure or "").partition(" of ")[0]
        return MANIPULATION if name in OF_HEADS else COST if name in OF_COST else EFFICACY

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts it is about."""
        if self.over:
            return self.over + (() if self.less is None else self.less.parts)
        own = (self.part, self.part if self.against_part is None else self.against_part)
        return own + (() if self.less is None else self.less.parts)

    @property
    def is_empty(self) -> bool:
        """Whether both sides are one arm, as may happen at a scale with few layers."""
        return self.arm == self.against and (bool(self.over) or len({*self.parts[:2]}) == 1)

    def within(self, known: Collection[str]) -> Contrast:
        """Return it with means over those parts alone that are known."""
        over = tuple(part for part in self.over if part in known)
        return replace(self, over=over, less=None if self.less is None else self.less.within(known))

    def named(self, canonical: Callable[[str, str], str]) -> Contrast:
        """Return it with each arm's name replaced by `canonical(part, name)`."""
        one, other = (self.over[0],) * 2 if self.over else self.parts[:2]
        less = None if self.less is None else self.less.named(canonical)
        doses = tuple(canonical(one, arm) for arm in self.doses)
        arms = canonical(one, self.arm), canonical(other, self.against)
        return replace(self, arm=arms[0], against=arms[1], less=less, doses=doses)

    def __str__(self) -> str:
        if self.over:
            text = f"{self.arm} over {self.against}, mean of {', '.join(self.over)}"
            return text if self.less is None else f"{text}, less that of {', '.join(self.less.over)}"
        one, other = self.parts[:2]
        if self.doses:
            text = f"slope from {self.against} to {self.arm}" + (f" in {one}" if one else "")
        elif one == other:
            text = f"{self.arm} over {self.against}" + (f" in {one}" if one else "")
        else:
            text = f"{self.arm} in {one} over {self.against} in {other}"
        if self.bins is not None:
            text += f" on {self.bins[0]} to {self.bins[1]} {self.of}"
        if self.measure is not None:
            text = f"{self.measure.replace('_', ' ')} of {text}"
        if self.beyond is not None:
            text += f", less its lead on {self.beyond[0]} to {self.beyond[1]}"
        return text if self.less is None else f"{text}, less that of {replace(self.less, measure=None)}"


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, in our words.

    It holds when each of its contrasts is above zero. What no test decides (that two things are equal, what something
    costs) is measured and shown without a verdict.

    Attributes:
        statement: What the paper states, in our words.
        contrasts: What it means for the arms.
        shown: Numbers shown with it.
        tested: Whether the contrasts are tested; False shows them with their intervals alone.
    """

    statement: str
    contrasts: tuple[Contrast, ...] = ()
    shown: tuple[Shown, ...] = ()
    tested: bool = True


def compare_arms(
    arms: str | Sequence[str], against: str | Sequence[str], parts: Collection[str] = ("",), measure: str | None = None
) -> tuple[Contrast, ...]:
    """Return the contrast of every arm with every arm it is set against, in each part.

    >>> [str(contrast) for contrast in compare_arms(("svgd", "em"), "plain", ("base",))]
    ['svgd over plain in base', 'em over plain in base']
    """
    ahead, behind = ((names,) if isinstance(names, str) else names for names in (arms, against))
    return tuple(
        Contrast(one, other, part=part, measure=measure) for part in parts for one in ahead for other in behind
    )


def compare_parts(arm: str, most: str, least: str, measure: str, less: Contrast | None = None) -> Contrast:
    """Return a number of one arm in a part, minus its number in another part."""
    return Contrast(arm, arm, part=most, against_part=least, measure=measure, less=less)


def follow_doses(doses: Sequence[str], part: str = "", measure: str | None = None) -> Contrast:
    """Return the slope of the score, or of a number of each run, over arms of rising strength in equal steps.

    It is sum_k (k - m) s_k / sum_k (k - m)^2 with m the mean of the steps k: one test for all strengths of a method.

    >>> print(follow_doses(("cka:ratio=0.1", "cka", "cka:ratio=1.0"), measure="effective_heads"))
    effective heads of slope from cka:ratio=0.1 to cka:ratio=1.0
    """
    return Contrast(doses[-1], doses[0], part=part, measure=measure, doses=tuple(doses))


def claim_control(statement: str, contrasts: tuple[Contrast, ...]) -> Claim:
    """Return a claim that compares a method with our control."""
    return Claim(f"{statement} (our control; the paper has none).", contrasts)
