from __future__ import annotations

import os
import subprocess
import sys

import pytest

from architecture.source import ROOT

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
    assert not [module for module in beyond_torch if module.startswith("headwise_lab")]
