"""Two or three processes for all tests of distributed training in one test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed.processes import Processes


@pytest.fixture(scope="session")
def two() -> Iterator[Processes]:
    group = Processes(2)
    yield group
    group.end()


@pytest.fixture(scope="session")
def three() -> Iterator[Processes]:
    group = Processes(3)
    yield group
    group.end()
