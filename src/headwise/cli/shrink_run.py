"""What `headwise prune` and `headwise merge` do: cut a model, train it again, and write its folder and a page."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from headwise.atomic import name_write_errors, new_folder, seal_folder
from headwise.cli.output import asked_output, standard_console
from headwise.cli.shrink_subject import Subject, open_subject
from headwise.cli.shrink_ways import WAYS, draw_curves, weigh_heads
from headwise.errors import SettingError
from headwise.input_files import encode_json
from headwise.plots.style import to_png
from headwise.plots.sweeps import sweep
from headwise.report.html import Page
from headwise.routing.save import save
from headwise.shrinking.merge import merge
from headwise.shrinking.prune import prune
from headwise.texts.pretrained import quietly
from headwise.texts.progress import make_bars
from headwise.texts.tables import Columns

# The scores of the runs of each way, by the share of heads kept.
Curves = dict[str, dict[float, list[float]]]


@dataclass(frozen=True)
class Shrunk:
    """What was done to a model, in numbers.

    Attributes:
        title: What was done.
        command: The command as it can be typed again.
        score: Name of the score.
        states: The model before, after, and after it was trained again: each a mapping of what was measured.
        details: What was printed of the cut itself.
        loading: How the folder is loaded.
        curves: Scores of ways to choose heads, by the share kept; empty for merging.
        steps: Ways of merging with their scores; empty for pruning.
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

    @property
    def shares(self) -> list[float]:
        """The shares of heads kept in the curves, largest first."""
        return sorted({share for each in self.curves.values() for share in each}, reverse=True)

    def list_states(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of the table of before and after."""
        first, *_, last = self.states.values()
        rows = []
        for what, before in first.items():
            form = ".4f" if what == "score" else ".2f" if what.startswith("ms") else ",.0f"
            cells = [f"{state[what]:{form}}" if what in state else "" for state in self.states.values()]
            compared = what in last and before > 0 and what != "score"
            rows.append([what, *cells, f"{last[what] / before:.2f}x" if compared else ""])
        return ["", *self.states, "after / before"], rows

    def list_curves(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of the table of ways to choose."""
        rows = [
            [way, *(f"{fmean(each[share]):.4f}" if share in each else "" for share in self.shares)]
            for way, each in self.curves.items()
        ]
        return ["chosen by", *(f"{share:.0%} kept" for share in self.shares)], rows

    def list_steps(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of the table of ways to merge."""
        rows = [
            [way, f"{score:.4f}", f"{self.steps[0][1] - score:+.4f}", f"{error:.4f}"]
            for way, score, error in self.steps
        ]
        return ["way", "score", "lost", "error of outputs"], rows

    def show(self, out: Path) -> None:
        """Print the tables of what was written to a folder."""
        from rich.table import Table

        console = standard_console()
        for header, rows in (self.list_states(), self.list_curves(), self.list_steps()):
            if rows:
                table = Table(*header)
                for row in rows:
                    table.add_row(*row)
                console.print(table)
        console.print(self.loading, soft_wrap=True, markup=False)
        console.print(f"written to {out}; the page is {out / PAGE}", soft_wrap=True, markup=False)

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
            page.table(*self.list_curves(), caption=f"{self.score}, before any training")
            figure = sweep(
                self.curves, setting="share of heads kept", measure=self.score, reference="removed one by one"
            )
            figure.axes[0].set_xticks(self.shares[::-1])
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
            page.table(*self.list_steps(), caption=self.score)
            page.paragraph(
                "Averaging as it is with W_O refitted is the control: what the refit saves by itself. The error is of "
                "what attentions put out on the calibration lines, as a share of its square.",
                kind="note",
            )
        page.heading("What was cut")
        page.code(self.details)
        return page


PAGE, RECORD = "shrinking.html", "shrinking.json"
WHOLE, CUT, RECOVERED = "before", "after", "trained again"


@dataclass(frozen=True)
class Request:
    """What both commands are given; see their options."""

    folder: Path
    text: Path
    out: Path
    lines: int
    recover: int
    rate: float
    columns: Columns
    trust_remote_code: bool

    def open(self) -> Subject:
        """Return the model and the text."""
        with quietly():
            return open_subject(
                self.folder, self.text, self.lines, self.columns, trust_remote_code=self.trust_remote_code
            )


def prune_model(request: Request, keep: float, by: str) -> Shrunk:
    """Prune a model to a share of its heads, chosen one way, and compare the ways to choose."""
    with new_folder(request.out) as place, make_bars(console=standard_console()) as bars:
        subject = request.open()
        whole, before = copy.deepcopy(subject.model).eval(), _count(subject)
        bar = bars.add_task("forwards without a head", total=None)
        ways = weigh_heads(subject, lambda done, total: bars.update(bar, completed=done, total=total))
        way = WAYS[by]
        if way not in ways:
            raise SettingError(f"--by {by} needs what each head contributes, which cannot be read in this model.")
        curves = draw_curves(subject, ways, keep)
        pruning = prune(subject.heads, keep=keep, importance=ways[way][0], inputs=subject.held_out[0].inputs)
        states = _compare(subject, whole, before, request, bars)
        kept, held = (int(states[name]["query heads"]) for name in (CUT, WHOLE))
        title = f"{subject.name} with {kept} of its {held} heads"
        return _write(subject, place, request.out, title, states, str(pruning), pruning.stock, curves=curves)


def merge_model(request: Request, groups: int) -> Shrunk:
    """Merge the key/value heads of a model, and tell what each step of that costs."""
    with new_folder(request.out) as place, make_bars(console=standard_console()) as bars:
        subject = request.open()
        whole, before = copy.deepcopy(subject.model).eval(), _count(subject)
        bars.add_task("merging", total=None)
        merging = merge(subject.heads, groups, batches=[batch.inputs for batch in subject.chosen], score=subject.score)
        states = _compare(subject, whole, before, request, bars)
        title = f"{subject.name} with {groups} key/value heads in each attention"
        # the page has a table of the steps
        details = str(replace(merging, steps=()))
        steps = tuple((step.way, float(step.score or 0), float(step.error or 0)) for step in merging.steps)
        return _write(subject, place, request.out, title, states, details, merging.stock, steps=steps)


def _count(subject: Subject) -> dict[str, float]:
    heads, parameters = subject.heads, list(subject.model.parameters())
    # keys and values of one token in all attentions
    cached = sum(
        part.heads * part.head_size * part.parts[0].parameter.element_size()
        for site in heads
        for part in site.slices
        if part.projection in ("key", "value")
    )
    return {
        "query heads": float(sum(site.num_heads for site in heads)),
        "key/value heads": float(sum(site.key_value_heads for site in heads)),
        "parameters": float(sum(parameter.numel() for parameter in parameters)),
        "bytes of parameters": float(sum(parameter.numel() * parameter.element_size() for parameter in parameters)),
        **({"bytes of cache per token": float(cached)} if subject.causal else {}),
        "score": subject.score(),
    }


def _compare(
    subject: Subject, whole: nn.Module, before: dict[str, float], request: Request, bars: Any
) -> dict[str, dict[str, float]]:
    """Return the numbers of the model before and after, and train it again where that is wanted."""
    times = subject.time({WHOLE: whole, CUT: subject.model})
    states = {WHOLE: before, CUT: _count(subject)}
    if request.recover:
        bar = bars.add_task("training", total=request.recover)
        torch.manual_seed(0)
        subject.recover(request.recover, whole, request.rate, partial(bars.advance, bar))
        states[RECOVERED] = states[CUT] | {"score": subject.score()}
    for name, numbers in states.items():
        score = numbers.pop("score")
        numbers |= {f"ms per {what}": value for what, value in times[CUT if name == RECOVERED else name].items()}
        numbers["score"] = score
    return states


def _write(
    subject: Subject,
    place: Path,
    out: Path,
    title: str,
    states: dict[str, dict[str, float]],
    details: str,
    stock: str | None,
    **tables: Any,
) -> Shrunk:
    """Write model, tokenizer, numbers and page into a temporary folder, which becomes `out`."""
    model: Any = subject.model
    kind = "AutoModelForCausalLM" if subject.causal else type(model).__name__
    loading = f"The folder is loaded by transformers alone: {kind}.from_pretrained(folder)."
    if stock is not None:
        loading = f"The folder is loaded by headwise.load(folder); transformers refuses it, as {stock}."
    loading = f"{loading} {subject.blank}".rstrip()
    shrunk = Shrunk(title, asked_output().command, subject.score_name, states, details, loading, **tables)
    page = shrunk.make_page()
    with name_write_errors(out), quietly():
        (model.save_pretrained if hasattr(model, "save_pretrained") else partial(save, model))(place)
        subject.tokenizer.save_pretrained(place)
        (place / RECORD).write_text(encode_json(shrunk.record(), indent=1) + "\n", encoding="utf-8")
        page.write(place / PAGE)
        seal_folder(place)
    return shrunk
