"""What tests of the laboratory share."""

from __future__ import annotations

import pytest

from lab.inline import do_inline


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Do jobs in this process, and list those that were done."""
    return do_inline(monkeypatch)
