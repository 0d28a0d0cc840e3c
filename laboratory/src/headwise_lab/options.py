"""Options that several commands have, and the refusal of unknown names.

Whatever is slow to import is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headwise_lab.experiment.run_folder import Failure


from collections.abc import Iterable
from typing import TYPE_CHECKING

from headwise_lab.experiment.registry import TASKS, named_task
from headwise_lab.experiment.scale import ScaleOptions, with_options

if TYPE_CHECKING:
    from headwise_lab.experiment.scale import Scale
from headwise.cli.options import require_known

TaskName = Annotated[str, typer.Argument(help=f"The task: {', '.join(TASKS)}.")]
ScaleName = Annotated[
    str,
    typer.Option(
        "--scale",
        help="Preset: demo (minutes), cpu (hours), gpu (minutes per run; not every task), paper (days on one GPU).",
    ),
]
Beams = Annotated[int | None, typer.Option(help="Number of beams, 1 for greedy search (default: the run's).")]
LengthPenalty = Annotated[float | None, typer.Option(help="p in the score log P / length^p (default: the run's).")]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="Folder of the task's files; logic generates its own without it. translation: also FOLDER:en-de, or two "
        "files, my.en,my.de. classification and sentence: also one table with labels and texts, my.csv. "
        "pretraining and lm: text or JSON lines, my.txt or my.jsonl.gz. glue: the folder of one of its sets. probing: "
        "the file of one task, past_present.txt; for reproduce the folder of all. graph2text: AGENDA's folder, or a "
        "file of triples.",
    ),
]
Pipeline = Annotated[
    Path | None,
    typer.Option("--pipeline", help="spaCy pipeline with a parser, for roles that need a parse: a folder or package."),
]
Embeddings = Annotated[
    Path | None, typer.Option("--embeddings", help="File of pretrained word vectors, such as GloVe's.")
]
Pretrained = Annotated[
    Path | None,
    typer.Option(
        "--pretrained",
        "--model",
        help="What runs of glue and lm start from: a Hugging Face folder, or a finished run; glue: also a folder with "
        "a run per arm.",
    ),
]
Lora = Annotated[
    str | None,
    typer.Option("--lora", metavar="r=RANK[,alpha=ALPHA]", help="Train adapters of a pretrained model (lm) only."),
]
OutOfDomain = Annotated[
    Path | None,
    typer.Option("--out-of-domain", help="File of out-of-domain texts, for the figures of uncertainty."),
]
LabelColumn = Annotated[
    str | None, typer.Option("--label-column", metavar="NAME", help="Column of the labels, likewise.")
]
Folds = Annotated[
    int | None,
    typer.Option("--folds", help="Number of cross-validation folds, where the data has no test set; 1 for one split."),
]
Sizes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SIZE=VALUE", help="Override a preset field, e.g. layers=4; repeatable."),
]
TunedFolder = Annotated[
    Path | None,
    typer.Option("--tuned", help="Folder of headwise tune; every arm is run with the settings of its best draw."),
]
Workers = Annotated[
    int | None, typer.Option("--workers", help="Number of parallel workers, one thread each (default: CPU count).")
]


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


def choose_scale(task: str, options: ScaleOptions | str) -> Scale:
    """Return the preset of a task, with the options."""
    options = ScaleOptions(options) if isinstance(options, str) else options
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
