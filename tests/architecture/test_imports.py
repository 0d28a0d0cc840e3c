from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

from architecture.documented import DOCUMENTED
from architecture.source import ROOT
from headwise.moved import MOVED

OPTIONAL = ("accelerate", "matplotlib", "numpy.testing", "rich", "scipy", "sklearn", "spacy", "transformers", "typer")


def modules_after(statement: str) -> set[str]:
    """Names of all modules a fresh process holds after a statement."""
    finished = subprocess.run(
        [sys.executable, "-c", f"import sys\n{statement}\nprint(*sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(finished.stdout.split())


@pytest.fixture(scope="module")
def beyond_torch() -> set[str]:
    """What `import headwise` brings in that `import torch` does not."""
    return modules_after("import headwise") - modules_after("import torch")


@pytest.mark.parametrize("name", OPTIONAL)
def test_the_base_import_leaves_optional_libraries_alone(beyond_torch: set[str], name: str):
    assert "headwise" in beyond_torch
    assert not [module for module in beyond_torch if module == name or module.startswith(f"{name}.")]


def test_the_base_import_leaves_the_laboratory_alone(beyond_torch: set[str]):
    assert not [module for module in beyond_torch if module.startswith("headwise.lab")]


@pytest.mark.parametrize("old", sorted(MOVED))
def test_a_module_of_version_0_1_still_imports_from_its_old_path(old: str):
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}"):
        module = importlib.import_module(old)
    new = vars(importlib.import_module(MOVED[old]))
    assert all(vars(module)[name] is value for name, value in new.items() if not name.startswith("__"))


@pytest.mark.parametrize("module", DOCUMENTED)
@pytest.mark.filterwarnings("ignore:headwise.* is now:DeprecationWarning")
def test_every_name_that_version_0_1_documented_is_still_there(module: str):
    present = dir(importlib.import_module(module))
    assert not [name for name in DOCUMENTED[module].split() if name not in present]
