"""The pages of a reproduction about texts: what two arms wrote under the first seed, and a form for raters.

Owns which runs are shown. The pages themselves are `rating`'s. Records hold nothing of them: the texts are others'.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headwise.lab.experiment.arm import escape_arm_name
from headwise.lab.experiment.arm_text import parse_arm
from headwise.lab.results.evidence import Evidence
from headwise.lab.tasks.graph2text.rating_form import make_outputs_page, read_items, write_rating

READ, RATED = 10, 50
OUTPUTS = "outputs.html"


@dataclass(frozen=True)
class OutputPages:
    """A page of texts of two arms beside graph and reference, and perhaps a form on which raters compare them.

    Attributes:
        arms: The arm that is judged and the one it is judged against.
        form: Whether the form is written too.
    """

    arms: tuple[str, str]
    form: bool = False

    def __call__(self, place: Path, folder: Path, data: Path | None, evidence: Evidence) -> tuple[Path, ...]:
        """Write the pages of the runs that are there; see `reproduction.Writes`."""
        one, other = (parse_arm(text).name for text in self.arms)
        seeds = {arm: {run.seed for run in evidence.results.runs if run.arm == arm} for arm in (one, other)}
        shared = sorted(seeds[one] & seeds[other])
        if data is None or not shared:
            return ()
        first, second = (folder / escape_arm_name(arm) / f"seed-{shared[0]}" for arm in (one, other))
        items = read_items(first, second, data)
        pages = [place / OUTPUTS]
        make_outputs_page(items[:READ], (one, other), title=f"Texts of {one} and {other}").write(pages[0])
        if self.form:
            pages += write_rating(place, items, (first, second), (one, other), count=RATED, seed=0)
        return tuple(pages)
