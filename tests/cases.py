"""Many cases of one test: every case runs, and those that fail are told together."""

from __future__ import annotations

import inspect
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
