from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch

import headwise
import headwise_lab
import reference

PACKAGES = (headwise, headwise_lab, reference)
MODULES = sorted(
    name
    for package in PACKAGES
    for name in (
        package.__name__,
        *(info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")),
    )
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    failed = doctest.testmod(module).failed
    assert failed == 0, f"{failed} examples of {name} fail; they are shown above."


def test_examples_are_found():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) > len(MODULES) / 2
