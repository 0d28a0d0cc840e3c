"""Comparisons as files of TOML: `compare` writes run.toml, and --config reads one as if its options were typed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from headwise.strict_json import encode_json


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
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read ({error.strerror}); expected a file of TOML.") from None
    except ValueError as error:
        raise typer.BadParameter(f"{path} is not readable as TOML ({error}).") from None


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
