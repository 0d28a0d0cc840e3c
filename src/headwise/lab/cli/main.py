"""The `headwise` command: what a person types, and one clear sentence when it cannot be done.

Owns the options and the exit codes: 0 done, 1 a run failed, 2 bad input, 130 Ctrl-C, 141 whoever read the output has
gone. Everything slow is imported inside the commands, so that help comes at once.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from headwise.lab.cli import inspect, probe
from headwise.lab.cli.options import (
    GOES_ON,
    DataFolder,
    Embeddings,
    Folds,
    OutOfDomain,
    Pipeline,
    Pretrained,
    ScaleName,
    Sizes,
    Stopped,
    TaskName,
    Workers,
    launch_options,
    require_known,
    require_task,
    scale_of,
    standard_console,
    stoppable,
)
from headwise.lab.experiment.scale import ScaleOptions
from headwise.lab.tasks.graph2text import rating_commands, writing_commands
from headwise.lab.tasks.translation import commands

if TYPE_CHECKING:
    from headwise.lab.experiment.job import Failure

DEMO_ARMS = "plain,svgd,output,em,output+em"

app = typer.Typer(
    help="Make attention heads different from one another, and find out whether that helps.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
    pipeline: Pipeline = None,
    embeddings: Embeddings = None,
    pretrained: Pretrained = None,
    folds: Folds = None,
    sizes: Sizes = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for runs, table and report; runs/TASK-SCALE by default.")
    ] = None,
    workers: Workers = None,
    launcher: Annotated[str, typer.Option(help="Where runs are done: local, slurm (by submitit) or ray.")] = "local",
    launch: Annotated[
        list[str] | None,
        typer.Option("--launch", metavar="NAME=VALUE", help="An option of the launcher, as slurm_partition=gpu."),
    ] = None,
    redundancy: Annotated[
        bool, typer.Option("--redundancy", help="Then remove each head alone and score the test set without it.")
    ] = False,
    step_time: Annotated[
        bool, typer.Option("--step-time", help="Then time steps of each arm in turn with steps of plain.")
    ] = False,
) -> None:
    """Train every arm with every seed, then show the table and write report.html; run again to go on."""
    require_task(task)
    from headwise.lab.compare import Comparison
    from headwise.lab.compare import compare as run
    from headwise.lab.experiment.arm_text import parse_arms
    from headwise.lab.jobs.launchers import Launcher
    from headwise.lab.jobs.pool import default_workers

    if seeds < 1:
        raise typer.BadParameter(f"--seeds is {seeds}; expected at least 1.")
    options = ScaleOptions(scale, pipeline, embeddings, folds, tuple(sizes or ()), pretrained=pretrained)
    chosen = scale_of(task, options)
    comparison = Comparison(
        task,
        tuple(parse_arms(arms)),
        tuple(range(seeds)),
        chosen,
        out or Path("runs") / f"{task}-{chosen.name}",
        data,
        default_workers() if workers is None else workers,
        options=options,
        launcher=Launcher(launcher, launch_options(launch or ())),
    )
    with stoppable():
        failures = run(comparison, standard_console(), redundancy=redundancy, step_times=step_time)
    _end(failures)


@app.command()
def tune(
    task: TaskName,
    arm: Annotated[str, typer.Argument(help="An arm; settings given in it are kept.")],
    draws: Annotated[int, typer.Option(help="Number of draws; the same for every arm of a folder.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the draws and of the runs.")] = 0,
    scale: ScaleName = "demo",
    data: DataFolder = None,
    pipeline: Pipeline = None,
    embeddings: Embeddings = None,
    pretrained: Pretrained = None,
    sizes: Sizes = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the draws; runs/tune-TASK-SCALE by default.")] = None,
    workers: Workers = None,
) -> None:
    """Draw an arm's settings at random, score each draw on dev, and print the best as an arm for --arms."""
    require_task(task)
    from headwise.lab.jobs.pool import default_workers
    from headwise.lab.tune import Tuning
    from headwise.lab.tune import tune as run

    options = ScaleOptions(scale, pipeline, embeddings, sizes=tuple(sizes or ()), pretrained=pretrained)
    chosen = scale_of(task, options)
    if getattr(chosen, "folds", None) is not None:
        chosen = scale_of(task, replace(options, folds=1))
        typer.echo(
            f"scale {scale} is a cross-validation, and an arm is tuned on one cut: judge it there too (--folds 1); "
            "what is dev in that cut is tested in some fold."
        )
    tuning = Tuning(
        task,
        arm,
        draws,
        seed,
        chosen,
        out or Path("runs") / f"tune-{task}-{chosen.name}",
        data,
        default_workers() if workers is None else workers,
    )
    with stoppable():
        tuned = run(tuning, standard_console())
    typer.echo(f"dev {100 * tuned.dev_score:.1f} with")
    typer.echo(tuned.arm.name)
    _end(tuned.failures)


@app.command()
def reproduce(
    identifier: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A paper's table or figure, as in diversify/figure-4.")
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="Show the reproductions there are, with their runs; so does no ID.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs of ID and stop.")] = False,
    parts: Annotated[
        list[str] | None, typer.Option("--part", help="This part of ID alone, as --dry-run names it; one or several.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs an arm; five by default, which verdicts need, and two at scale demo.")
    ] = None,
    scale: Annotated[
        str, typer.Option("--scale", help="How large: demo (minutes), cpu (hours), gpu (minutes a run on one), paper.")
    ] = "cpu",
    data: DataFolder = None,
    pipeline: Pipeline = None,
    embeddings: Embeddings = None,
    pretrained: Pretrained = None,
    out_of_domain: OutOfDomain = None,
    folds: Folds = None,
    sizes: Sizes = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the runs, which reproductions share, and for their pages.")
    ] = Path("runs/reproductions"),
    record: Annotated[
        Path | None, typer.Option(help="Folder of the paper's notes, whose results/ and RESULTS.md are written.")
    ] = None,
    workers: Workers = None,
) -> None:
    """Run what stands behind a paper's table or figure, and say of each of its claims whether it was borne out."""
    from headwise.lab.jobs.pool import default_workers
    from headwise.lab.papers import listing as lists
    from headwise.lab.papers import run as reproducing
    from headwise.lab.papers.data import require_data, with_data
    from headwise.lab.papers.index import REPRODUCTIONS

    if list_all or identifier is None:
        lists.show_list(out, scale, standard_console())
        return
    require_known("reproduction", identifier, REPRODUCTIONS)
    reproduction = REPRODUCTIONS[identifier]
    require_known("scale", scale, reproduction.scales)
    reproduction = with_data(reproduction.only(parts or (), scale), scale, data)
    seeds = reproducing.seeds_at(scale) if seeds is None else seeds
    if seeds < 1:
        raise typer.BadParameter(f"--seeds is {seeds}; expected at least 1.")
    workers = default_workers() if workers is None else workers
    options = ScaleOptions(scale, pipeline, embeddings, folds, tuple(sizes or ()), out_of_domain, pretrained)
    plans = reproducing.make_plans(
        reproduction, scale, seeds=seeds, data=data, out=out, workers=workers, options=options
    )
    if dry_run:
        for plan in (*plans[0].before, *plans):
            require_data(plan.comparison.task, plan.comparison.data, plan.comparison.scale)
        reproducing.require_analysable(reproduction, plans)
        lists.show_plans(reproduction, plans, standard_console())
        return
    command = f"headwise reproduce {identifier} {shlex.join(options.words(for_others=True))} --seeds {seeds}"
    command += "".join(f" --part {shlex.quote(part)}" for part in parts or ())
    # the record is for others, whose folders have other names
    command += "" if data is None else " --data FOLDER"
    with stoppable():
        failures = reproducing.do_plans(reproduction, plans, standard_console())
        if any(plan.finished for plan in plans):
            reproducing.report(reproduction, scale, plans, out, record, standard_console(), command)
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
    from headwise.lab.cli.roles import show

    options = {"--corpus": corpus, "--idf": idf, "--out": out}
    command = shlex.join(
        ["headwise", "roles", sentence, "--pipeline", pipeline]
        + [part for name, value in options.items() if value is not None for part in (name, str(value))]
        + (["--released"] if released else [])
    )
    with stoppable():
        show(sentence, pipeline, corpus, idf, released, out, standard_console(), command)


app.command()(inspect.inspect)
app.command()(probe.probe)
app.command()(rating_commands.rate)
app.command()(rating_commands.ratings)
app.command()(commands.prepare)
app.command()(commands.download)
app.command()(commands.translate)
app.command()(writing_commands.write)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; every refusal is one sentence on stderr and an exit code.

    Of several processes that torchrun or `accelerate launch` started, the first runs it and the others train with it.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        from headwise.lab.jobs import torchrun

        if int(os.environ["RANK"]) > 0:
            torchrun.follow()
            return
        with torchrun.leading():
            _run(arguments)
    _run(arguments)


def _run(arguments: Sequence[str] | None) -> NoReturn:
    try:
        code = app(args=arguments, standalone_mode=False)
    except Stopped as stopped:
        _refuse(str(stopped), 130)
    except (KeyboardInterrupt, typer.Abort):
        _refuse(GOES_ON, 130)
    except Exception as error:
        _refuse(_sentence(error), 2)
    sys.exit(code or 0)


def _sentence(error: Exception) -> str:
    """Return the sentence of an error that is the user's to mend; raise any other again."""
    from headwise.errors import HeadwiseError

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
