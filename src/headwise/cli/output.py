"""What a command prints: text for people, nothing with --quiet, or with --json one document on standard output."""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headwise.cli.options import UNWRITTEN, find_name, list_parameters

if TYPE_CHECKING:
    from rich.console import Console


C = TypeVar("C", bound=Callable[..., None])


@dataclass(frozen=True)
class Output:
    """What was asked of the output, and the whole command as it can be typed again."""

    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only; files are written as usual.")] = False
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print each epoch, and tracebacks of refusals.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; text goes to standard error.")] = (
        False
    )
    command: str = ""


_asked: ContextVar[Output] = ContextVar("output")
_with_record: set[Callable[..., None]] = set()


def printing_record(command: C) -> C:
    """Mark a command that calls `print_record` at its end, which gives it the option --json."""
    _with_record.add(command)
    return command


def with_output_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the options --quiet, --verbose and perhaps --json."""
    added = [one for one in list_parameters(Output) if one.name != "as_json" or command in _with_record]
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = {one.name: given.pop(one.name) for one in added}
        _asked.set(Output(**options, command=_write_command(command.__name__, signature, given)))
        command(**given)

    vars(run)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), *added])
    return run


def _write_command(name: str, signature: inspect.Signature, given: Mapping[str, Any]) -> str:
    words = ["headwise", name]
    for parameter in signature.parameters.values():
        value, kinds = given[parameter.name], getattr(parameter.annotation, "__metadata__", ())
        option = [name for name in [find_name(parameter.name, parameter.annotation)] if name.startswith("-")]
        if value is True:
            words += option
        elif value is not None and value is not False and UNWRITTEN not in kinds:
            for one in value if isinstance(value, list) else [value]:
                words += [*option, f"{one:g}" if isinstance(one, float) else str(one)]
    return shlex.join(words)


def forget_output() -> None:
    """Return to the usual output, as a command that a process runs after another one begins with."""
    _asked.set(Output())


def asked_output() -> Output:
    """Return what was asked of the output; the usual outside of a command."""
    return _asked.get(Output())


def standard_console() -> Console:
    """Return the console for text; names of files and arms may hold what rich takes for markup."""
    from rich.console import Console

    asked = asked_output()
    return Console(
        markup=False,
        emoji=False,
        stderr=asked.as_json,
        quiet=asked.quiet,
        force_terminal=False if asked.quiet else None,
    )


def say(text: str) -> None:
    """Print a line of text for people."""
    asked = asked_output()
    if not asked.quiet:
        typer.echo(text, err=asked.as_json)


def warn(sentence: str) -> None:
    """Print what went wrong."""
    # what a file holds must not drive the terminal
    shown = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in " ".join(sentence.split()))
    typer.echo(f"headwise: {shown}", err=True)


def print_record(record: Any) -> None:
    """Print the result of a command as JSON if that was asked for."""
    if asked_output().as_json:
        from headwise.input_files import encode_json

        typer.echo(encode_json(record, indent=1))


def print_file(path: Path) -> None:
    """Print a file of JSON that a command wrote, if that was asked for and the file is there."""
    if asked_output().as_json and path.exists():
        typer.echo(path.read_text(encoding="utf-8").rstrip())
