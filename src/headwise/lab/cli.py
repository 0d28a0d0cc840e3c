"""The `headwise` command: what a person types, and one clear sentence when it cannot be done.

Owns the options and the exit codes: 0 done, 1 a run failed, 2 bad input, 130 Ctrl-C. Everything slow is imported
inside the commands, so that help comes at once.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from headwise.lab.tasks.task import Scale
    from headwise.lab.workers import Failure

__all__ = ["app", "main"]

DEMO_ARMS = "plain,svgd,output,em,output+em"

app = typer.Typer(
    help="Make attention heads different from one another, and find out whether that helps.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

TaskName = Annotated[str, typer.Argument(help="The task: logic or translation.")]
ScaleName = Annotated[
    str, typer.Option("--scale", help="How large: demo (minutes), cpu (hours), paper (a GPU's days).")
]
DataFolder = Annotated[
    Path | None, typer.Option("--data", help="Folder of the task's files; without it data is generated.")
]
Workers = Annotated[
    int | None, typer.Option("--workers", help="Runs side by side, one thread each; the cores by default.")
]


@app.callback(invoke_without_command=True)
def headwise(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Make attention heads different from one another, and find out whether that helps."""
    if version:
        from headwise import __version__

        typer.echo(f"headwise {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def compare(
    task: TaskName,
    arms: Annotated[str, typer.Option(help="Arms, as in plain,svgd:alpha=0.5,output+em.")] = DEMO_ARMS,
    seeds: Annotated[int, typer.Option(help="Runs an arm; verdicts need five.")] = 3,
    scale: ScaleName = "demo",
    data: DataFolder = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for runs, table and report; runs/TASK-SCALE by default.")
    ] = None,
    workers: Workers = None,
) -> None:
    """Train every arm with every seed, then show the table and write report.html; run again to go on."""
    _require_task(task)
    _end(_compare(task, arms, seeds, scale, data, out or Path("runs") / f"{task}-{scale}", workers))


def _compare(
    task: str, arms: str, seeds: int, scale: str, data: Path | None, out: Path, workers: int | None
) -> Sequence[Failure]:
    from headwise.lab.arm_text import parse_arms
    from headwise.lab.compare import Comparison, default_workers
    from headwise.lab.compare import compare as run

    if seeds < 1:
        raise typer.BadParameter(f"--seeds is {seeds}; expected at least 1.")
    comparison = Comparison(
        task,
        tuple(parse_arms(arms)),
        tuple(range(seeds)),
        _scale(task, scale),
        out,
        data,
        default_workers() if workers is None else workers,
    )
    with _stoppable():
        return run(comparison, _console())


@app.command()
def tune(
    task: TaskName,
    arm: Annotated[str, typer.Argument(help="An arm; settings given in it are kept.")],
    draws: Annotated[int, typer.Option(help="Number of draws; the same for every arm of a folder.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the draws and of the runs.")] = 0,
    scale: ScaleName = "demo",
    data: DataFolder = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the draws; runs/tune-TASK-SCALE by default.")] = None,
    workers: Workers = None,
) -> None:
    """Draw an arm's settings at random, score each draw on dev, and print the best as an arm for --arms."""
    _require_task(task)
    from headwise.lab.compare import default_workers
    from headwise.lab.tune import Tuning
    from headwise.lab.tune import tune as run

    tuning = Tuning(
        task,
        arm,
        draws,
        seed,
        _scale(task, scale),
        out or Path("runs") / f"tune-{task}-{scale}",
        data,
        default_workers() if workers is None else workers,
    )
    with _stoppable():
        tuned = run(tuning, _console())
    typer.echo(f"dev {100 * tuned.dev_score:.1f} with")
    typer.echo(tuned.arm.name)
    _end(tuned.failures)


@app.command()
def reproduce(
    identifier: Annotated[str, typer.Argument(metavar="ID", help="A paper's table or figure: diversify/figure-4.")],
    seeds: Annotated[int, typer.Option(help="Runs an arm; verdicts need five.")] = 5,
    scale: ScaleName = "cpu",
    data: DataFolder = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs; runs/ID-SCALE by default.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="Folder of the paper's notes, whose results/ and RESULTS.md are written.")
    ] = None,
    workers: Workers = None,
) -> None:
    """Run what stands behind a paper's table or figure, and say of each of its claims whether it was borne out."""
    from headwise.lab.reproduce import REPRODUCTIONS, report

    require_known("reproduction", identifier, REPRODUCTIONS)
    reproduction = REPRODUCTIONS[identifier]
    out = out or Path("runs") / f"{identifier.replace('/', '-')}-{scale}"
    failures = _compare(reproduction.task, reproduction.arms, seeds, scale, data, out, workers)
    command = f"headwise reproduce {identifier} --scale {scale} --seeds {seeds}"
    if data is not None:
        # the record is for others, whose folder has another name
        command += " --data FOLDER"
    with _stoppable():
        report(reproduction, out, record, _console(), command)
    _end(failures)


@app.command()
def roles(
    sentence: Annotated[str, typer.Argument(help="A sentence.")],
    pipeline: Annotated[str, typer.Option(help="A pipeline of spaCy that parses: a folder or an installed package.")],
    corpus: Annotated[
        Path | None, typer.Option(help="Training text, one text a line: which words are rare is counted there.")
    ] = None,
    idf: Annotated[Path | None, typer.Option("--idf", help="The counts of IDF.save, in place of --corpus.")] = None,
    released: Annotated[bool, typer.Option("--released", help="The roles as in the paper's code.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for picture and page; runs/roles/... by default.")] = None,
) -> None:
    """Show where each role lets the words of a sentence attend, in the terminal, as a picture and as a page."""
    from headwise.lab.roles_command import show

    options = {"--corpus": corpus, "--idf": idf, "--out": out}
    command = shlex.join(
        ["headwise", "roles", sentence, "--pipeline", pipeline]
        + [part for name, value in options.items() if value is not None for part in (name, str(value))]
        + (["--released"] if released else [])
    )
    with _stoppable():
        show(sentence, pipeline, corpus, idf, released, out, _console(), command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; every refusal is one sentence on stderr and an exit code."""
    try:
        code = app(args=arguments, standalone_mode=False)
    except (_Stopped, KeyboardInterrupt, typer.Abort):
        _refuse("stopped; every run has saved where it is, give the same command again to go on.", 130)
    except Exception as error:
        _refuse(_sentence(error), 2)
    sys.exit(code or 0)


class _Stopped(Exception):
    """Ctrl-C, on its way past typer."""


@contextmanager
def _stoppable() -> Iterator[None]:
    # typer would end the process on a KeyboardInterrupt before a word is said
    try:
        yield
    except KeyboardInterrupt:
        raise _Stopped from None


def require_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is not known, with the ones near to it."""
    names = list(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "choose"
    raise typer.BadParameter(f"there is no {kind} {name!r}; {hint} (all: {', '.join(names)}).")


def _require_task(name: str) -> None:
    from headwise.lab.tasks.named import TASKS

    require_known("task", name, TASKS)


def _scale(task: str, name: str) -> Scale:
    from headwise.lab.tasks.named import named_task

    scales = named_task(task).scales
    require_known("scale", name, scales)
    return scales[name]


def _console() -> Console:
    from rich.console import Console

    return Console()


def _sentence(error: Exception) -> str:
    """Return the sentence of an error that is the user's to mend; raise any other again."""
    from headwise.checks import HeadwiseError

    if isinstance(error, HeadwiseError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'} cannot be used: {error.strerror}."
    # what typer's usage errors have in common, whether they come from click or from typer's own copy of it
    message = getattr(error, "format_message", None)
    if callable(message):
        return str(message())
    raise error


def _refuse(sentence: str, code: int) -> NoReturn:
    typer.echo(f"headwise: {sentence}", err=True)
    sys.exit(code)


def _end(failures: Sequence[Failure]) -> None:
    """Say which runs failed, after everything else was shown, and leave with the code for it."""
    if not failures:
        return
    for failure in failures:
        typer.echo(f"headwise: {failure}", err=True)
    raise typer.Exit(2 if all(failure.refused for failure in failures) else 1)


if __name__ == "__main__":
    main()
