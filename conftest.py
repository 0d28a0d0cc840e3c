"""One thread a process: test workers share the cores, and sums come out the same on every machine."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from distributed.processes import Processes
from headwise.atomic import STOPS
from headwise.repulsion import optimizers

os.environ.setdefault("MPLBACKEND", "Agg")
torch.set_num_threads(1)

# How long an example takes says how busy the machine is, and nothing of the code. Integration draws the same examples
# every time, so that a red run is the change's; a developer's runs keep looking.
settings.register_profile("development", deadline=None)
settings.register_profile("integration", deadline=None, derandomize=True)
settings.load_profile("integration" if os.environ.get("CI") else "development")


# Collecting imports thousands of modules that stay: garbage would be looked for in all of them, again and again.
@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


# A file of full tests alone is not even imported by a quick run, unless it is named.
def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.suffix != ".py" or "not full" not in config.option.markexpr:
        return None
    named = any(collection_path.name in argument for argument in config.args)
    full = re.search(r"^pytestmark = .*\bpytest\.mark\.full\b", collection_path.read_text(), re.MULTILINE)
    return True if full and not named else None


# An optimizer that a test discards before its first step is not one that the next test replaces.
@pytest.fixture(autouse=True)
def no_watched_optimizers() -> None:
    optimizers._discarded.clear()
    for watch in [*optimizers._watches, optimizers.Watch()]:
        watch.remove()


# A command that refuses ignores signals until it has ended, and run in this process it would leave that to later tests,
# whose processes inherit it.
@pytest.fixture(autouse=True)
def heard_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# Each training collects garbage, and takes longer over all that is imported by now than over a toy.
@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> None:
    gc.collect()
    gc.freeze()


# what is frozen at the end of the process is told as leaked
def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def trained_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `lab.trained_runs` makes, once; a test copies what it changes."""
    # tests of the library alone need nothing of the laboratory
    from lab.trained_runs import make_runs

    return make_runs(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def two() -> Iterator[Processes]:
    """Two processes for all tests of distributed training in one test process."""
    group = Processes(2)
    yield group
    group.end()


@pytest.fixture(scope="session")
def three() -> Iterator[Processes]:
    """Three of them."""
    group = Processes(3)
    yield group
    group.end()
