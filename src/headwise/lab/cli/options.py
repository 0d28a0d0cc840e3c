"""What the commands share: their arguments, the names they refuse, and how a person stops them.

Owns nothing slow: everything that takes time to import is imported inside.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.lab.experiment.scale import ScaleOptions, with_options

if TYPE_CHECKING:
    from rich.console import Console

    from headwise.lab.experiment.task import Scale

TaskName = Annotated[
    str,
    typer.Argument(
        help="The task: logic, translation, classification, sentence, pretraining, glue, graph2text or probing."
    ),
]
ScaleName = Annotated[
    str, typer.Option("--scale", help="How large: demo (minutes), cpu (hours), paper (a GPU's days).")
]
Beams = Annotated[int | None, typer.Option(help="Beams of the search, 1 for greedy; the run's own by default.")]
LengthPenalty = Annotated[float | None, typer.Option(help="p in the score log P / length^p; the run's own by default.")]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="Folder of the task's files; without it data is generated. For translation also FOLDER:en-de, or two "
        "files: my.en,my.de. For classification and sentence also one file, a label and a text in each line: my.tsv. "
        "For pretraining text or JSON lines: my.txt, my.jsonl.gz. For glue the folder of one of its sets. For probing "
        "the file of one task: past_present.txt; for reproduce the folder of all. For graph2text AGENDA's folder, or a "
        "file of triples.",
    ),
]
Pipeline = Annotated[
    Path | None,
    typer.Option("--pipeline", help="A pipeline of spaCy that parses, for roles of a parse: a folder or a package."),
]
Embeddings = Annotated[
    Path | None, typer.Option("--embeddings", help="File of word vectors to start from, such as GloVe's.")
]
Pretrained = Annotated[
    Path | None,
    typer.Option(
        "--pretrained",
        help="What runs of glue begin with: a folder of Hugging Face, a run of pretraining, or a folder of runs, one "
        "for each arm.",
    ),
]
OutOfDomain = Annotated[
    Path | None,
    typer.Option(
        "--out-of-domain", help="File of other texts, whose predictions the figures of uncertainty are about."
    ),
]
Folds = Annotated[
    int | None,
    typer.Option(
        "--folds", help="Cross-validation in so many parts, where the data has no test of its own; 1 for one cut."
    ),
]
Sizes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SIZE=VALUE", help="Another size than the scale's, as layers=4; one or several."),
]
Workers = Annotated[
    int | None, typer.Option("--workers", help="Runs side by side, one thread each; the cores by default.")
]
GOES_ON = "stopped; every run has saved where it is, give the same command again to go on."


class Stopped(Exception):
    """Ctrl-C, on its way past typer; says what there is to say."""


@contextmanager
def stoppable(sentence: str = GOES_ON) -> Iterator[None]:
    """Turn Ctrl-C into `Stopped`: typer would end the process before a word is said."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(sentence) from None


def require_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is not known, with the ones near to it."""
    names = list(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "choose"
    raise typer.BadParameter(f"there is no {kind} {name!r}; {hint} (all: {', '.join(names)}).")


def require_task(name: str) -> None:
    """Refuse a task that is not known."""
    from headwise.lab.experiment.registry import TASKS

    require_known("task", name, TASKS)


def launch_options(given: Iterable[str]) -> dict[str, str | int | float]:
    """Return the options of a launcher, numbers as numbers.

    >>> launch_options(["slurm_partition=gpu", "timeout_min=90"])
    {'slurm_partition': 'gpu', 'timeout_min': 90}
    """
    options: dict[str, str | int | float] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise typer.BadParameter(f"--launch is {text!r}; expected NAME=VALUE, as slurm_partition=gpu.")
        for kind in (int, float, str):
            try:
                options[name] = kind(value)
                break
            except ValueError:
                continue
    return options


def scale_of(task: str, options: ScaleOptions | str) -> Scale:
    """Return the scale of that name, with the options."""
    from headwise.lab.experiment.registry import named_task

    options = ScaleOptions(options) if isinstance(options, str) else options
    scales = named_task(task).scales
    require_known("scale", options.scale, scales)
    return with_options(scales[options.scale], options, task)


def standard_console() -> Console:
    """Return the console on standard output."""
    from rich.console import Console

    return Console()
