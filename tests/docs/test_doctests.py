from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest
import torch

import headwise
import headwise_lab
import reference


@pytest.mark.full
@pytest.mark.parametrize("package", [headwise, headwise_lab, reference], ids=lambda package: package.__name__)
def test_the_examples_of_all_modules_run(package: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    inside = (info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
    modules = [importlib.import_module(name) for name in (package.__name__, *inside)]
    monkeypatch.chdir(tmp_path)
    failed, finder = {}, doctest.DocTestFinder(exclude_empty=True)
    for module in modules:
        torch.manual_seed(0)
        failed[module.__name__] = doctest.testmod(module).failed
    assert not any(failed.values()), {name: count for name, count in failed.items() if count}
    assert sum(bool(test.examples) for module in modules for test in finder.find(module)) > len(modules) / 2
