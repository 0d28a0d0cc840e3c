"""Options that several commands of the laboratory have; whatever is slow to import is imported inside functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from headwise.cli.options import TextColumn, TrustRemoteCode, require_known
from headwise.texts.tables import Columns
from headwise_lab.experiment.registry import TASKS, named_task
from headwise_lab.experiment.scale import ScaleOptions, with_options

if TYPE_CHECKING:
    from headwise_lab.experiment.run_folder import Failure
    from headwise_lab.experiment.scale import Scale

TaskName = Annotated[str, Argument(help=f"The task: {', '.join(TASKS)}.")]
Beams = Annotated[int | None, Option(help="Number of beams, 1 for greedy search (default: the run's).")]
LengthPenalty = Annotated[float | None, Option(help="p in the score log P / length^p (default: the run's).")]
TunedFolder = Annotated[
    Path | None, Option("--tuned", help="Folder of headwise tune; every arm is run with the settings of its best draw.")
]
Workers = Annotated[int | None, Option(help="Number of parallel workers, one thread each (default: CPU count).")]


@dataclass(frozen=True, kw_only=True)
class Sized:
    """The data of a task and the sizes of its runs."""

    scale: Annotated[
        str,
        Option(
            help="Preset: demo (minutes), cpu (hours), gpu (minutes per run; not every task), paper (days on one GPU)."
        ),
    ] = "demo"
    data: Annotated[
        Path | None,
        Option(
            help="Folder of the task's files; logic generates its own without it. translation: also FOLDER:en-de, or "
            "two files, my.en,my.de. classification and sentence: also one table with labels and texts, my.csv. "
            "pretraining and lm: text or JSON lines, my.txt or my.jsonl.gz. glue: the folder of one of its sets. "
            "probing: the file of one task, past_present.txt; for reproduce the folder of all. graph2text: AGENDA's "
            "folder, or a file of triples."
        ),
    ] = None
    pipeline: Annotated[
        Path | None, Option(help="spaCy pipeline with a parser, for roles that need a parse: a folder or package.")
    ] = None
    embeddings: Annotated[Path | None, Option(help="File of pretrained word vectors, such as GloVe's.")] = None
    pretrained: Annotated[
        Path | None,
        Option(
            "--pretrained",
            "--model",
            help="What runs of glue and lm start from: a Hugging Face folder, or a finished run; glue: also a folder "
            "with a run per arm.",
        ),
    ] = None
    lora: Annotated[
        str | None, Option(metavar="r=RANK[,alpha=ALPHA]", help="Train adapters of a pretrained model (lm) only.")
    ] = None
    trust_remote_code: TrustRemoteCode = False
    out_of_domain: Annotated[
        Path | None, Option(help="File of out-of-domain texts, for the figures of uncertainty.")
    ] = None
    folds: Annotated[
        int | None, Option(help="Number of cross-validation folds, where the data has no test set; 1 for one split.")
    ] = None
    text_column: TextColumn = ()
    label_column: Annotated[str | None, Option(metavar="NAME", help="Column of the labels, likewise.")] = None
    sizes: Annotated[
        tuple[str, ...],
        Option("--set", metavar="SIZE=VALUE", help="Override a preset field, e.g. layers=4; repeatable."),
    ] = ()

    def options(self, task: str) -> ScaleOptions:
        """Return what a task's scale is made with."""
        return ScaleOptions(
            self.scale,
            self.pipeline,
            self.embeddings,
            self.folds,
            (*self.sizes, *parse_lora(task, self.lora)),
            self.out_of_domain,
            self.pretrained,
            self.trust_remote_code,
            Columns(self.text_column, self.label_column),
        )


def require_task(name: str) -> None:
    """Refuse an unknown task."""
    require_known("task", name, TASKS)


def parse_launch_options(given: Iterable[str]) -> dict[str, str | int | float]:
    """Return the options of a launcher, numbers as numbers.

    >>> parse_launch_options(["slurm_partition=gpu", "timeout_min=90"])
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


def parse_lora(task: str, given: str | None) -> tuple[str, ...]:
    """Return the sizes of a task's scale that "r=8,alpha=16" stands for.

    >>> parse_lora("lm", "r=8,alpha=16")
    ('lora=8', 'lora_alpha=16')
    """
    if given is None:
        return ()
    if not any(hasattr(scale, "lora") for scale in named_task(task).scales.values()):
        raise typer.BadParameter(f"task {task} takes no --lora; omit it.")
    names = {"r": "lora", "alpha": "lora_alpha"}
    chosen = {name.strip(): value.strip() for name, _, value in (piece.partition("=") for piece in given.split(","))}
    twice = len(chosen) < given.count("=")
    positive = all(value.isdecimal() and int(value) for value in chosen.values())
    if twice or chosen.keys() - names or "r" not in chosen or not positive:
        raise typer.BadParameter(
            f"--lora is {given!r}; expected r=RANK or r=RANK,alpha=ALPHA, both integers of at least 1, as r=8."
        )
    return tuple(f"{names[name]}={value}" for name, value in chosen.items())


def choose_scale(task: str, options: ScaleOptions) -> Scale:
    """Return the preset of a task, with the options."""
    scales = named_task(task).scales
    require_known("scale", options.scale, scales)
    return with_options(scales[options.scale], options, task)


def end_with(failures: Sequence[Failure]) -> None:
    """Print which runs failed, after all other output, and exit with the code for it."""
    if not failures:
        return
    for failure in failures:
        typer.echo(f"headwise: {failure}", err=True)
    raise typer.Exit(2 if all(failure.refused for failure in failures) else 1)
