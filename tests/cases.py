"""Many cases of one test: every case runs, and those that fail are told together."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def cases(names: str | Sequence[str], values: Iterable) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run all cases in one test; arguments as for `pytest.mark.parametrize`.

    Each case has its own `tmp_path` and `monkeypatch`. Other fixtures are shared, so that a case must not change them.
    """
    listed = [names] if isinstance(names, str) else list(names)
    every = [value if len(listed) > 1 else (value,) for value in values]
    assert every, "there are no cases"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        def run(**fixtures: Any) -> None:
            failed, folder = [], fixtures.get("tmp_path")
            for number, value in enumerate(every):
                case = dict(zip(listed, value, strict=True))
                if folder is not None:
                    fixtures["tmp_path"] = folder / str(number)
                    fixtures["tmp_path"].mkdir()
                with pytest.MonkeyPatch.context() as monkeypatch:
                    if "monkeypatch" in fixtures:
                        fixtures["monkeypatch"] = monkeypatch
                    try:
                        test(**fixtures, **case)
                    # what `pytest.raises` raises is no Exception, and neither is a group of them
                    except (Exception, pytest.fail.Exception, BaseExceptionGroup) as error:
                        error.add_note(f"the case is {case}"[:1000])
                        failed.append(error)
            if failed:
                raise BaseExceptionGroup(f"{len(failed)} of {len(every)} cases fail", failed)

        run.__name__, run.__module__, run.__doc__ = test.__name__, test.__module__, test.__doc__
        left = [parameter for name, parameter in signature.parameters.items() if name not in listed]
        run.__signature__ = signature.replace(parameters=left)
        run.pytestmark = getattr(test, "pytestmark", [])
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


def tiers(
    names: str | tuple[str, ...], quick: list, full: list, slow: Sequence = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run some cases in one quick test, and the others in a full and a slow one; see `cases`."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(values: list, **fixtures: Any) -> None:
            cases(names, values)(test)(**fixtures)

        run.__name__, run.__module__, run.__doc__ = test.__name__, test.__module__, test.__doc__
        signature = inspect.signature(test)
        given = [one for name, one in signature.parameters.items() if name not in (names if many else [names])]
        values = inspect.Parameter("values", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = signature.replace(parameters=[*given, values])
        run.pytestmark = getattr(test, "pytestmark", [])
        parts = [quick, pytest.param(full, marks=pytest.mark.full), pytest.param([*slow], marks=pytest.mark.slow)]
        ids = ["quick", "full", "slow"][: 3 if slow else 2]
        return pytest.mark.parametrize("values", parts[: len(ids)], ids=ids)(run)

    many = not isinstance(names, str)
    return decorate


def thin(values: Iterable, step: int) -> tuple[list, list]:
    """Every so many of some cases, for a quick test, and the others, for a full one."""
    listed = [*values]
    return listed[::step], [value for number, value in enumerate(listed) if number % step]
