"""Commands whose options are the fields of a frozen dataclass, options that several have, and unknown names refused.

    @dataclass(frozen=True, kw_only=True)
    class Prune:
        model: Annotated[Path, typer.Argument(help="A folder of save_pretrained().")]
        keep: Annotated[float, typer.Option(help="Share of the heads that each attention keeps.")] = 0.5

    @command
    def prune(given: Prune) -> None: ...

A field that holds such a dataclass adds its fields, but for those that `Without` in its annotation names. A tuple is an
option that may be given several times. A field without an option in its annotation is none.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.models import ArgumentInfo, ParameterInfo

TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python files and kernels that a Hugging Face folder names; without it such a folder is refused.",
    ),
]
TextColumn = Annotated[
    tuple[str, ...],
    typer.Option(
        metavar="NAME",
        help="Column of the texts in a table, or key in JSON Lines, where data.body is a key inside another; twice for "
        "pairs.",
    ),
]
# Annotates an option that the command as it can be typed again leaves out.
UNWRITTEN = "unwritten"


@dataclasses.dataclass(frozen=True)
class Without:
    """Names of fields, with spaces between them, that are no options of a command."""

    names: str


def command(run: Callable[[Any], None]) -> Callable[..., None]:
    """Return a function that typer makes a command of, with the fields of the settings that `run` takes."""
    kind = typing.get_type_hints(run)["given"]

    @functools.wraps(run)
    def call(**given: Any) -> None:
        run(_build(kind, given))

    vars(call)["__signature__"] = inspect.Signature(list_parameters(kind))
    return call


def list_parameters(settings: type) -> list[inspect.Parameter]:
    """Return the parameters of the options that settings have as fields, for typer."""
    parameters = []
    for name, hint, default in _list_fields(settings):
        kind, *infos = typing.get_args(hint)
        several = typing.get_origin(kind) is tuple
        parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None if several else default)
        annotation = Annotated[list[typing.get_args(kind)[0]] | None if several else kind, *infos]
        parameters.append(parameter.replace(annotation=annotation))
    return parameters


def list_options(settings: Any) -> dict[str, Any]:
    """Return the value of each option by its name without dashes, of an argument by the name of the field."""
    return {find_name(name, hint).lstrip("-"): value for name, hint, value in _list_fields(settings)}


def find_name(name: str, hint: Any) -> str:
    """Return what the option of a field or parameter is called; of an argument the name itself."""
    infos = [kind for kind in getattr(hint, "__metadata__", ()) if isinstance(kind, ParameterInfo)]
    if any(isinstance(info, ArgumentInfo) for info in infos):
        return name
    # in an annotation the first name is where the default is otherwise
    names = [text for info in infos for text in (info.default, *(info.param_decls or ())) if isinstance(text, str)]
    return (*names, f"--{name.replace('_', '-')}")[0]


def _list_fields(settings: Any, left_out: Iterable[str] = ()) -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields of settings that are options, also those inside, each with its annotation and its value.

    Of a class the values are the defaults.
    """
    hints = typing.get_type_hints(settings if isinstance(settings, type) else type(settings), include_extras=True)
    for name in (field.name for field in dataclasses.fields(settings)):
        hint, value = hints[name], getattr(settings, name, inspect.Parameter.empty)
        inner, *extra = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(inner):
            names = [each for one in extra for each in one.names.split()]
            yield from _list_fields(inner if value is inspect.Parameter.empty else value, names)
        elif extra and name not in left_out:
            yield name, hint, value


def _build(kind: Any, given: Mapping[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            values[name] = _build(hint, given)
        elif name in given:
            values[name] = tuple(given[name] or ()) if typing.get_origin(hint) is tuple else given[name]
    return kind(**values)


def require_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Refuse an unknown name, and suggest similar ones."""
    names = list(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "choose"
    raise typer.BadParameter(f"there is no {kind} {name!r}; {hint} (all: {', '.join(names)}).")
