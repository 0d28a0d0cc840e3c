"""Cheap cases in one test: a law over many of them, and refusals as a table."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def each(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, in one test that lists all cases that failed; each has its own `tmp_path`."""
    given, rows = [names] if isinstance(names, str) else list(names), list(cases)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failed = []
            for number, row in enumerate(rows):
                values = dict(zip(given, (row,) if isinstance(names, str) else row, strict=True))
                own = dict(fixtures)
                if "tmp_path" in own:
                    own["tmp_path"] = fixtures["tmp_path"] / f"case-{number}"
                    own["tmp_path"].mkdir()
                try:
                    test(**own, **values)
                except (Exception, pytest.fail.Exception) as error:
                    failed.append(f"{values}: {type(error).__name__}: {error}")
            assert not failed, "\n".join(failed)

        signature = inspect.signature(test)
        kept = [one for name, one in signature.parameters.items() if name not in given]
        run.__signature__ = signature.replace(parameters=kept)
        return run

    return decorate


class Made(dict[str, Any]):
    """What is made by name when it is first asked for."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> Any:
        self[name] = self.make(name)
        return self[name]


def find_unrefused(cases: Iterable[tuple[Callable[[], object], type[Exception], str]]) -> list[str]:
    """Return the cases (call, exception, pattern of its message) that ended in another way."""
    missed = []
    for number, (call, kind, pattern) in enumerate(cases):
        try:
            call()
        except kind as error:
            missed += [] if re.search(pattern, str(error)) else [f"{number}, {pattern}: {error}"]
        else:
            missed.append(f"{number}, {pattern}: nothing was raised")
    return missed
