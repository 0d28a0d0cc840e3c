"""The commands `headwise compare` and `headwise show`.

Comparisons as files of TOML: `compare` writes run.toml, and --config reads one as if its options were typed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from headwise.atomic import hold
from headwise.cli.commands import RUNS
from headwise.cli.options import Without, command, list_options
from headwise.cli.output import asked_output, print_file, print_record, printing_record, say, standard_console, warn
from headwise.cli.stopping import stoppable
from headwise.errors import DataError
from headwise.input_files import encode_json, read_whole
from headwise_lab.importing import importing
from headwise_lab.options import (
    Sized,
    TaskName,
    TunedFolder,
    Workers,
    choose_scale,
    end_with,
    parse_launch_options,
    require_task,
)

if TYPE_CHECKING:
    from headwise_lab.compare import Comparison
    from headwise_lab.experiment.arm import Arm


# Options that may be given several times.
LISTS = ("set", "launch", "text-column")


def use_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the options of a file the defaults of a command; those that are typed win.

    Raises:
        BadParameter: The file cannot be read, or names an option that the command lacks.
    """
    if path is None:
        return None
    names = {option.lstrip("-"): one.name for one in context.command.params for option in one.opts if one.name}
    given = read_config(path)
    unknown = sorted(given.keys() - names.keys())
    if unknown:
        raise typer.BadParameter(f"{path} names {', '.join(unknown)}; expected options of {context.command_path}.")
    context.default_map = {**(context.default_map or {}), **{str(names[name]): given[name] for name in given}}
    return path


def read_config(path: Path) -> dict[str, Any]:
    """Return the options in a file; raises BadParameter if it cannot be read."""
    try:
        found = tomllib.loads(read_whole(path).decode("utf-8"))
    except DataError as error:
        raise typer.BadParameter(str(error)) from None
    except ValueError as error:
        raise typer.BadParameter(f"{path} is not readable as TOML ({str(error)[:200]}).") from None
    except RecursionError:
        raise typer.BadParameter(f"{path} is not readable as TOML (brackets are nested too deeply).") from None
    for name, value in found.items():
        texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if not texts and (name in LISTS or not isinstance(value, str | int | float)):
            expected = "a list of texts" if name in LISTS else "a text, a number, true, false or a list of texts"
            raise typer.BadParameter(f"{path}: {name[:60]} is {str(value)[:60]}; expected {expected}.")
    return found


def format_config(options: Mapping[str, Any]) -> str:
    """Return options as TOML, without those that were not given.

    >>> print(format_config({"task": "logic", "seeds": 3, "set": ["layers=4"], "data": None}), end="")
    task = "logic"
    seeds = 3
    set = ["layers=4"]
    """
    kept = {name: value for name, value in options.items() if value not in (None, False, [], ())}
    return "".join(f"{name} = {_format_value(value)}\n" for name, value in kept.items())


def merge_sizes(config: Path | None, given: Iterable[str]) -> tuple[str, ...]:
    """Return the sizes of a file with those that are typed, which replace sizes of the same name."""
    old = [] if config is None else read_config(config).get("set", [])
    sizes = {size.partition("=")[0].strip(): size for size in (*old, *given)}
    return tuple(sizes.values())


def _format_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_format_value, value))}]"
    # a string of JSON is one of TOML if no letter is escaped in two halves
    return encode_json(str(value) if isinstance(value, Path) else value, ascii_only=False)


@dataclass(frozen=True, kw_only=True)
class Compare:
    """What `headwise compare` is given."""

    task: TaskName
    arms: Annotated[str, Option(help="Arms, e.g. plain,svgd:alpha=0.5,output+em.")] = "plain,scaled,svgd-span,cka"
    controls: Annotated[
        bool, Option("--controls", help="Also run the controls of these arms, without which they get no verdict.")
    ] = False
    seeds: Annotated[int, Option(help="Number of seeds per arm (at least 5 for a verdict).")] = 5
    sized: Annotated[Sized, Without("out_of_domain")]
    tuned: TunedFolder = None
    out: Annotated[Path | None, Option(help="Folder for runs, table and report (default: runs/TASK-SCALE).")] = None
    workers: Workers = None
    launcher: Annotated[str, Option(help="Where runs execute: local, slurm (via submitit) or ray.")] = "local"
    launch: Annotated[
        tuple[str, ...], Option(metavar="NAME=VALUE", help="Launcher option, e.g. slurm_partition=gpu.")
    ] = ()
    redundancy: Annotated[bool, Option("--redundancy", help="Also score the test set without each head.")] = False
    halve: Annotated[
        bool, Option("--halve", help="Also score trained models with half of their heads, and after a recovery.")
    ] = False
    step_time: Annotated[bool, Option("--step-time", help="Also time training steps of each arm against plain.")] = (
        False
    )
    report_to: Annotated[str, Option(help="Also report each epoch to: wandb, trackio.")] = ""
    config: Annotated[
        Path | None,
        Option(
            callback=use_config,
            is_eager=True,
            help="Options from a file, such as the run.toml of a comparison; those that are typed win.",
        ),
    ] = None


@printing_record
@command
def compare(given: Compare) -> None:
    """Train every arm with every seed, show the table and write report.html; run again to resume."""
    require_task(given.task)
    with importing():
        from headwise_lab.compare import RESULTS, Comparison
        from headwise_lab.compare import compare as run
        from headwise_lab.experiment.arm_text import parse_arms
        from headwise_lab.jobs.launchers import Launcher
        from headwise_lab.jobs.pool import count_workers

    if given.seeds < 1:
        raise typer.BadParameter(f"--seeds is {given.seeds}; expected at least 1.")
    options = given.sized.options(given.task)
    options = replace(options, sizes=merge_sizes(given.config, options.sizes))
    chosen = choose_scale(given.task, options)
    asked = tuple(parse_arms(given.arms))
    missing = find_missing_controls(asked)
    arms = (*asked, *missing) if given.controls else asked
    if given.tuned is not None:
        from headwise_lab.tune import read_tuned

        arms, _ = read_tuned(given.tuned, arms, given.task, chosen)
    comparison = Comparison(
        given.task,
        arms,
        tuple(range(given.seeds)),
        chosen,
        given.out or RUNS / f"{given.task}-{chosen.name}",
        given.sized.data,
        count_workers() if given.workers is None else given.workers,
        options=options,
        launcher=Launcher(given.launcher, parse_launch_options(given.launch)),
        report_to=tuple(filter(None, given.report_to.split(","))),
        tuned=given.tuned,
    )
    if missing and not given.controls:
        say(describe_missing(comparison, missing))
    with stoppable(folders=[comparison.out]), hold(comparison.out):
        failures = run(
            comparison,
            standard_console(),
            redundancy=given.redundancy,
            halve=given.halve,
            step_times=given.step_time,
            config=format_config(list_kept(given, options.sizes)),
        )
    print_file(comparison.out / RESULTS)
    end_with(failures)


def list_kept(given: Compare, sizes: tuple[str, ...]) -> dict[str, Any]:
    """Return the options that run.toml keeps: all that another call needs for the same comparison."""
    first = dict.fromkeys(("task", "arms", "controls", "seeds", "scale", "set"))
    options = first | list_options(given) | {"set": sizes, "report-to": given.report_to or None}
    return {name: value for name, value in options.items() if name not in ("lora", "workers", "config")}


@printing_record
def show(
    folders: Annotated[list[Path], Argument(metavar="FOLDER...", help="Folders of comparisons, or above them.")],
    as_csv: Annotated[bool, Option("--csv", help="Print the rows as CSV, with all digits.")] = False,
    as_latex: Annotated[bool, Option("--latex", help="Print a table for LaTeX, with booktabs.")] = False,
    as_markdown: Annotated[bool, Option("--markdown", help="Print a table for Markdown.")] = False,
    page: Annotated[
        Path | None, Option("--page", metavar="FILE", help="Also write an HTML page that sorts and filters.")
    ] = None,
) -> None:
    """Show finished comparisons again, side by side if there are several; nothing is trained."""
    if as_csv + as_latex + as_markdown + asked_output().as_json > 1:
        raise typer.BadParameter("expected one of --csv, --latex, --markdown and --json.")
    from headwise_lab.results.grids import render_terminal
    from headwise_lab.results.pages import SIDE_BY_SIDE_NOTE, format_csv, list_rows, make_grid, read_comparisons

    tables = read_comparisons(folders, tell=warn)
    if page is not None:
        from headwise_lab.results.pages import make_side_by_side_page

        make_side_by_side_page(tables).write(page)
        if not as_csv + as_latex + as_markdown:
            say(f"page: {page}")
    if as_csv:
        typer.echo(format_csv(tables), nl=False)
    elif as_latex:
        typer.echo(make_grid(tables).to_latex())
    elif as_markdown:
        typer.echo(make_grid(tables).to_markdown())
    elif asked_output().as_json:
        print_record(list_rows(tables))
    elif len(tables) == 1:
        standard_console().print(*map(render_terminal, tables.values()))
    else:
        standard_console().print(make_grid(tables), SIDE_BY_SIDE_NOTE)


def find_missing_controls(arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
    """Return the controls of arms that are not among them; a control of other arms needs none of its own."""
    from headwise_lab.experiment.arm_text import parse_arm

    names = {arm.name for arm in arms}
    serving = {arm.control for arm in arms}
    wanted = dict.fromkeys(arm.control for arm in arms if arm.control not in names and arm.name not in serving)
    return tuple(parse_arm(name) for name in wanted if name is not None)


def describe_missing(comparison: Comparison, missing: tuple[Arm, ...]) -> str:
    """Return which arms will have no verdict, what --controls would add and, if runs here tell, how long it takes."""
    from headwise_lab.compare import estimate_minutes

    names = {arm.name for arm in missing}
    without = [f"{arm.name} (needs {arm.control})" for arm in comparison.arms if arm.control in names]
    runs = len(missing) * len(comparison.seeds)
    minutes = estimate_minutes(comparison, missing)
    time = f" or about {minutes:.0f} min" if minutes is not None else ""
    return (
        f"no verdict without its control: {', '.join(without)}. --controls adds {', '.join(sorted(names))}: "
        f"{runs} more run{'s' * (runs > 1)} to these {len(comparison.arms) * len(comparison.seeds)}{time}."
    )


@printing_record
def arms() -> None:
    """List the named arms: what each does, and the arm that it is judged against."""
    from headwise_lab.experiment.arm import describe_arms, named_arms

    about, console = describe_arms(), standard_console()
    controls = {name: arm.control for name, arm in named_arms().items()}
    width = max(map(len, controls))
    for control in dict.fromkeys(controls.values()):
        if control is not None:
            console.print(f"\njudged against {control}", style="bold", highlight=False, markup=False)
        for name in (name for name, other in controls.items() if other == control):
            console.print(f"{name:<{width}}  {about[name]}", highlight=False, markup=False)
    console.print("\n`+` combines arms, `:` changes their settings: svgd:alpha=0.5,layers=0/1+output.", style="dim")
    print_record({name: {"about": about[name], "control": arm.control} for name, arm in named_arms().items()})


COMMANDS = (compare, arms, show)
