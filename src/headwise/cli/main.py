"""The `headwise` command: its entry point and exit codes; a refusal is one sentence.

Exit codes: 0 done, 1 a run failed, 2 bad input, 129 the terminal was closed, 130 Ctrl-C, 141 nobody reads the output
any more, 143 asked to end.
"""

import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, NoReturn

import typer

from headwise.cli.commands import COMMANDS
from headwise.cli.extensions import find_extensions
from headwise.cli.output import asked_output, forget_output, warn, with_output_options
from headwise.cli.stopping import Stopped, ignore_stops
from headwise.input_files import refuse_panics

# How typer begins the message of a `BadParameter` that names no parameter, as those of our commands.
OURS = "Invalid value: "

app = typer.Typer(
    help="Make attention heads different from one another, and find out whether that helps.",
    context_settings={"help_option_names": ["--help", "-h"]},
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


for command in (*COMMANDS, *(one for extension in find_extensions() for one in extension.list_commands())):
    app.command()(with_output_options(command))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; every refusal is one sentence on stderr and an exit code."""
    command = partial(_run, arguments)
    for extension in find_extensions():
        command = partial(extension.run, command)
    command()


def _run(arguments: Sequence[str] | None) -> NoReturn:
    forget_output()
    try:
        with refuse_panics("a file cannot be used", "choose another one."):
            code = app(args=arguments, prog_name="headwise", standalone_mode=False)
    except Stopped as stopped:
        _refuse(str(stopped), stopped.code)
    except (KeyboardInterrupt, typer.Abort):
        _refuse("stopped.", 130)
    except Exception as error:
        sentence = _explain(error)
        if asked_output().verbose:
            traceback.print_exc()
        _refuse(sentence, 2)
    sys.exit(code or 0)


def _explain(error: Exception) -> str:
    """Return the sentence of an error that the user can correct; raise any other again."""
    from headwise.errors import HeadwiseError

    if isinstance(error, HeadwiseError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'} cannot be used: {error.strerror}."
    # what typer's usage errors have in common, whether they come from click or from typer's own copy of it
    message = getattr(error, "format_message", None)
    if callable(message):
        return _describe_usage(str(message()), getattr(error, "ctx", None))
    raise error


def _describe_usage(message: str, context: typer.Context | None) -> str:
    """Return a usage error in the form of all others; where the parser found it, with the place of more."""
    if message.startswith(OURS):
        return message.removeprefix(OURS)
    if message.startswith("No such command") and not find_extensions():
        return f"{message[:1].lower()}{message[1:].rstrip('.')}; those of the laboratory need the package headwise-lab."
    place = "headwise" if context is None else context.command_path
    return f"{message[:1].lower()}{message[1:].rstrip('.')}; see {place} --help."


def _refuse(sentence: str, code: int) -> NoReturn:
    ignore_stops()
    # a terminal that was closed takes no message
    with suppress(OSError):
        warn(sentence)
    sys.exit(code)


if __name__ == "__main__":
    main()
