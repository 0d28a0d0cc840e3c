"""The page of `headwise prune` and `headwise merge`: before and after, and what other ways would have cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headwise.plots.style import to_png
from headwise.plots.sweeps import sweep
from headwise.report.html import Page

# The scores of the runs of each way, by the share of heads kept.
Curves = dict[str, dict[float, list[float]]]


@dataclass(frozen=True)
class Shrunk:
    """What was done to a model, in numbers.

    Attributes:
        title: What was done.
        command: The command as typed.
        score: Name of the score.
        states: The model before, after, and after it was trained again: each a mapping of what was measured.
        details: What was printed of the cut itself.
        curves: Scores of ways to choose heads, by the share kept; empty for merging.
        steps: Ways of merging with their scores; empty for pruning.
        loading: How the folder is loaded.
    """

    title: str
    command: str
    score: str
    states: dict[str, dict[str, float]]
    details: str
    loading: str
    curves: Curves = field(default_factory=dict)
    steps: tuple[tuple[str, float, float], ...] = ()

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "title": self.title,
            "command": self.command,
            "score": self.score,
            "states": self.states,
            "curves": {way: {f"{share:g}": runs for share, runs in each.items()} for way, each in self.curves.items()},
            "steps": [{"way": way, "score": score, "error of outputs": error} for way, score, error in self.steps],
            "loading": self.loading,
        }

    def list_states(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of the table of before and after."""
        names = list(self.states)
        first = self.states[names[0]]
        rows = []
        for what, before in first.items():
            cells = [_show(what, self.states[name].get(what)) for name in names]
            after = self.states[names[-1]].get(what)
            ratio = f"{after / before:.2f}x" if after is not None and before > 0 and what != "score" else ""
            rows.append([what, *cells, ratio])
        return ["", *names, "after / before"], rows

    def list_curves(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of the table of ways to choose."""
        shares = sorted({share for each in self.curves.values() for share in each}, reverse=True)
        rows = [
            [way, *(f"{sum(each[share]) / len(each[share]):.4f}" if share in each else "" for share in shares)]
            for way, each in self.curves.items()
        ]
        return ["chosen by", *(f"{share:.0%} kept" for share in shares)], rows

    def list_steps(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of the table of ways to merge."""
        whole = self.steps[0][1] if self.steps else 0.0
        rows = [[way, f"{score:.4f}", f"{whole - score:+.4f}", f"{error:.4f}"] for way, score, error in self.steps]
        return ["way", "score", "lost", "error of outputs"], rows

    def make_page(self) -> Page:
        """Make the page."""
        page = Page(self.title)
        page.code(f"$ {self.command}")
        page.heading("Before and after")
        header, rows = self.list_states()
        page.table(header, rows)
        cache = "; the cache is of one token in all layers" if any("cache" in what for what, *_ in rows) else ""
        page.paragraph(
            f"Heads are those of all layers. The score is the {self.score}, on held-out lines; the larger the better. "
            f"Milliseconds are medians of rounds in which the models took turns on this machine{cache}.",
            kind="note",
        )
        page.paragraph(self.loading)
        if self.curves:
            page.heading("Ways to choose the heads")
            header, rows = self.list_curves()
            page.table(header, rows, caption=f"{self.score}, before any training")
            figure = sweep(
                self.curves, setting="share of heads kept", measure=self.score, reference="removed one by one"
            )
            figure.axes[0].set_xticks(sorted({share for each in self.curves.values() for share in each}))
            page.figure(
                to_png(figure),
                caption="Score over the share of heads kept, for each way to choose them; of random choices each draw.",
                alt="Curves of the score over the share of heads kept, one for each way to choose heads.",
            )
            page.paragraph(
                "Removed one by one: the exact cost of each head alone. First order: the mean absolute derivative of "
                "each line's loss (of random directions of the states, where no loss is known). Redundancy: how "
                "much a head's contribution is like others', by debiased CKA; of two alike the one more like the rest "
                "goes.",
                kind="note",
            )
        if self.steps:
            page.heading("Ways to merge")
            header, rows = self.list_steps()
            page.table(header, rows, caption=self.score)
            page.paragraph(
                "Averaging as it is with W_O refitted is the control: what the refit saves by itself. The error is of "
                "what attentions put out on the calibration lines, as a share of its square.",
                kind="note",
            )
        page.heading("What was cut")
        page.code(self.details)
        return page


def _show(what: str, value: float | None) -> str:
    if value is None:
        return ""
    if what == "score":
        return f"{value:.4f}"
    return f"{value:.2f}" if what.startswith("ms") else f"{value:,.0f}"
