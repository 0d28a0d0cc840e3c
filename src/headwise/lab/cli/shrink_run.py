"""What `headwise prune` and `headwise merge` do: cut a model, train it again, and write its folder and the page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headwise.atomic import name_write_errors, new_folder
from headwise.digests import seal_folder
from headwise.errors import SettingError
from headwise.lab.cli.shrink_page import Shrunk
from headwise.lab.cli.shrink_subject import Subject, copy_whole, count_bytes, count_cache, open_subject
from headwise.lab.cli.shrink_ways import WAYS, draw_curves, weigh_heads
from headwise.lab.data.progress import make_bars
from headwise.lab.data.tables import USUAL, Columns
from headwise.lab.models.pretrained import quietly
from headwise.routing.save import save
from headwise.shrinking.merge import merge
from headwise.shrinking.prune import prune
from headwise.strict_json import encode_json

if TYPE_CHECKING:
    from rich.console import Console

PAGE, RECORD = "shrinking.html", "shrinking.json"
WHOLE, CUT, RECOVERED = "before", "after", "trained again"


@dataclass(frozen=True)
class Request:
    """What both commands are given.

    Attributes:
        folder: The model's folder.
        text: A file with one text per line.
        out: The folder to write, which must be new.
        lines: Lines to choose and calibrate by.
        recover: Steps of training after the cut.
        rate: Their first learning rate.
        command: The command as typed.
        trust_remote_code: Whether code that the folder names may run.
        columns: The column of the texts, where the file is a table.
    """

    folder: Path
    text: Path
    out: Path
    lines: int
    recover: int
    rate: float
    command: str
    trust_remote_code: bool = False
    columns: Columns = USUAL


def prune_model(request: Request, keep: float, by: str, console: Console) -> Shrunk:
    """Prune a model to a share of its heads, chosen one way, and compare the ways to choose."""
    with new_folder(request.out) as place, make_bars(console=console) as bars:
        subject = _open(request)
        whole, before = copy_whole(subject.model), _Before(subject)
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
        shrunk = Shrunk(
            title,
            request.command,
            subject.score_name,
            states,
            str(pruning),
            _tell(subject, pruning.stock),
            curves=curves,
        )
        _write(subject, shrunk, place, request.out)
    return shrunk


def merge_model(request: Request, groups: int, console: Console) -> Shrunk:
    """Merge the key/value heads of a model, and tell what each step of that costs."""
    with new_folder(request.out) as place, make_bars(console=console) as bars:
        subject = _open(request)
        whole, before = copy_whole(subject.model), _Before(subject)
        bars.add_task("merging", total=None)
        merging = merge(subject.heads, groups, batches=[batch.inputs for batch in subject.chosen], score=subject.score)
        states = _compare(subject, whole, before, request, bars)
        title = f"{subject.name} with {groups} key/value heads in each attention"
        # the page has a table of the steps
        details = str(replace(merging, steps=()))
        steps = tuple((step.way, float(step.score or 0), float(step.error or 0)) for step in merging.steps)
        shrunk = Shrunk(
            title, request.command, subject.score_name, states, details, _tell(subject, merging.stock), steps=steps
        )
        _write(subject, shrunk, place, request.out)
    return shrunk


def _open(request: Request) -> Subject:
    with quietly():
        return open_subject(
            request.folder, request.text, request.lines, request.columns, trust_remote_code=request.trust_remote_code
        )


class _Before:
    """Numbers of the model before it is cut, as it is changed in place."""

    def __init__(self, subject: Subject) -> None:
        self.numbers = _count(subject) | {"score": subject.score()}


def _count(subject: Subject) -> dict[str, float]:
    heads = subject.heads
    return {
        "query heads": float(sum(site.num_heads for site in heads)),
        "key/value heads": float(sum(site.key_value_heads for site in heads)),
        "parameters": float(sum(parameter.numel() for parameter in subject.model.parameters())),
        "bytes of parameters": float(count_bytes(subject.model)),
        **({"bytes of cache per token": float(count_cache(heads))} if subject.causal else {}),
    }


def _compare(
    subject: Subject, whole: nn.Module, before: _Before, request: Request, bars: Any
) -> dict[str, dict[str, float]]:
    """Return the numbers of the model before and after, and train it again where that is wanted."""
    times = subject.time({WHOLE: whole, CUT: subject.model})
    states = {WHOLE: before.numbers, CUT: _count(subject) | {"score": subject.score()}}
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


def _tell(subject: Subject, stock: str | None) -> str:
    blank = f" {subject.blank}" if subject.blank else ""
    if stock is None:
        kind = "AutoModelForCausalLM" if subject.causal else type(subject.model).__name__
        return f"The folder is loaded by transformers alone: {kind}.from_pretrained(folder).{blank}"
    return f"The folder is loaded by headwise.load(folder); transformers refuses it, as {stock}.{blank}"


def _write(subject: Subject, shrunk: Shrunk, place: Path, out: Path) -> None:
    """Write model, tokenizer, numbers and page into a temporary folder, which becomes `out`."""
    model: Any = subject.model
    page = shrunk.make_page()
    with name_write_errors(out), quietly():
        (model.save_pretrained if hasattr(model, "save_pretrained") else partial(save, model))(place)
        subject.tokenizer.save_pretrained(place)
        (place / RECORD).write_text(encode_json(shrunk.record(), indent=1) + "\n", encoding="utf-8")
        page.write(place / PAGE)
        seal_folder(place)


def show_shrunk(shrunk: Shrunk, out: Path, console: Console) -> None:
    """Print the tables of what was written to `out`."""
    from rich.table import Table

    for header, rows in (shrunk.list_states(), shrunk.list_curves(), shrunk.list_steps()):
        if rows:
            table = Table(*header)
            for row in rows:
                table.add_row(*row)
            console.print(table)
    console.print(shrunk.loading, soft_wrap=True, markup=False)
    console.print(f"written to {out}; the page is {out / PAGE}", soft_wrap=True, markup=False)
