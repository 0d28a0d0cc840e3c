"""Comparisons as files of TOML: `compare` writes run.toml, and --config reads one as if its options were typed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from headwise.errors import DataError
from headwise.input_files import read_whole
from headwise.strict_json import encode_json

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
