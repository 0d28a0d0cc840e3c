"""The `headwise` command as a person calls it, in this process."""

from __future__ import annotations

import pytest

from headwise.cli import main


def call(*arguments: str) -> int:
    """The exit code of a call."""
    with pytest.raises(SystemExit) as caught:
        main.main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence on stderr of a call that must end with code 2."""
    assert call(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("headwise: "), error
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error
