from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from architecture.source import FILES, ROOT, module_name, read_source

# A folder, or a file that stands alone, imports only from lines above its own; lines of several never import one
# another. Every task is a folder on the line "lab/tasks/*".
LAYERS = """
    errors
    settings
    strength input_files
    atomic stock_folders
    nn masks functional
    heads
    kernels
    repulsion similarity routing gating roles
    attached
    optim
    caching
    shrinking
    metrics
    report
    integrations
    plots testing
    api
    __init__
    texts
    cli
    lab/__init__
    lab/models lab/data
    lab/experiment
    lab/role_masks lab/results lab/packed_text
    lab/training
    lab/analyses lab/frozen
    lab/importing lab/options lab/streams
    lab/texts
    lab/tasks/*
    lab/jobs lab/probing
    lab/compare
    lab/tune
    lab/papers
    lab/cli
    lab/extension
    __main__
    lab/__main__
"""
MOST_FILES, FEWEST_LINES = 12, 80
OPTIONAL = {"accelerate", "jinja2", "matplotlib", "rich", "scipy", "sklearn", "spacy", "transformers", "typer"}
# inherits from matplotlib, which is imported when the first figure is drawn
APART = "headwise/plots/figure.py"
RANK = {room: number for number, line in enumerate(LAYERS.split("\n")) for room in line.split()}
MODULES = {module_name(path): path for path in FILES}


def room(path: str) -> str:
    """Return the folder a source file is in, or its own name where it stands alone."""
    package, *parts = path.removesuffix(".py").split("/")
    if package == "headwise":
        return parts[0]
    return "/".join(["lab", *(parts[:2] if parts[0] == "tasks" else parts[:1])])


def rank(name: str) -> int:
    return RANK["lab/tasks/*" if name.startswith("lab/tasks/") else name]


@cache
def imports(path: str) -> set[str]:
    """Return the source files that a file imports anywhere in it, in functions and under TYPE_CHECKING too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(read_source(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import; write headwise.{node.module}."
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else str(node.module))
    return {MODULES[name] for name in found if name in MODULES}


def test_a_folder_imports_only_from_layers_below_it():
    above = [
        (path, other)
        for path in FILES
        for other in imports(path)
        if room(other) != room(path) and rank(room(other)) >= rank(room(path))
    ]
    assert not above, f"{above}: only layers above a file's own line in LAYERS may be imported."


def test_no_files_import_one_another_in_a_circle():
    # a circle raises CycleError, which names its files; a package face imports the files of its own folder
    TopologicalSorter({path: imports(path) - {path} for path in FILES}).prepare()


def test_nothing_but_the_papers_names_a_task():
    named = [
        (path, other)
        for path in FILES
        for other in imports(path)
        if other.startswith("headwise_lab/tasks/")
        and room(other) != room(path)
        and not path.startswith("headwise_lab/papers/")
    ]
    assert not named, f"{named}: ask the registry for the task instead."


def test_the_reference_shares_no_code_with_what_it_checks():
    files = sorted((ROOT / "tests" / "reference").glob("*.py"))
    imported = {
        (path.name, name)
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert len(files) > 5
    assert not {(path, name) for path, name in imported if name.partition(".")[0].startswith("headwise")}


def test_no_folder_is_crowded_and_no_small_file_serves_one_other():
    counts = Counter(str(Path(path).parent) for path in FILES)
    crowded = {folder: count for folder, count in counts.items() if count > MOST_FILES}
    assert not crowded, f"{crowded}: more than {MOST_FILES} files; divide the folder by ideas."
    used = Counter(other for path in FILES if "/__" not in path for other in imports(path) - {path})
    lines = {path: len(read_source(path).splitlines()) for path in used}
    small = [
        path
        for path, count in used.items()
        if count == 1
        and lines[path] < FEWEST_LINES
        and "tasks/" not in path
        and "__init__" not in path
        and path != APART
    ]
    assert not small, f"{small}: fewer than {FEWEST_LINES} lines and one importer; merge them into it."


@pytest.mark.full
def test_the_base_import_leaves_optional_libraries_and_the_laboratory_alone():
    # all that it brings in beside torch
    script = "import sys, torch; before = {*sys.modules}; import headwise; print(*{*sys.modules} - before)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    brought = done.stdout.split()
    assert "headwise" in brought
    left_alone = OPTIONAL | {"headwise_lab", "numpy.testing"}
    assert not [name for name in brought if name == "numpy.testing" or name.partition(".")[0] in left_alone]
