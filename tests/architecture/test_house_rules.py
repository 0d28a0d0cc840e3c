from __future__ import annotations

import importlib
import inspect
import re
import subprocess
from pathlib import Path

import pytest

import headwise
from architecture.source import FILES, ROOT, module_name

LONGEST = 800
SHAPELESS = {"base", "common", "helper", "helpers", "misc", "shared", "tools", "util", "utils"}
MACHINE = re.compile(r"(?<![\w.:/-])/(?:work|home|root|Users|tmp|opt)/|\.\./shared\b")
PUBLIC = [name for name in getattr(headwise, "__all__", dir(headwise)) if not name.startswith("_")]


def tracked_files() -> list[Path]:
    """Files that git holds or would add; every file but hidden folders' where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        paths = [
            path for path in ROOT.rglob("*") if not any(p.startswith(".venv") for p in path.relative_to(ROOT).parts)
        ]
    return [path for path in paths if path.is_file()]


@pytest.mark.parametrize("path", FILES)
def test_no_file_or_folder_has_a_name_that_says_nothing(path: str):
    assert not SHAPELESS & set(Path(path).with_suffix("").parts)


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples", "src", "tests"])
def test_no_file_is_long(folder: str):
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")}
    long = {str(path.relative_to(ROOT)): count for path, count in counts.items() if count > LONGEST}
    assert not long, f"{long}: more than {LONGEST} lines; divide them."


@pytest.mark.parametrize("path", [path for path in FILES if path.endswith("__init__.py")])
def test_a_package_exports_what_it_names(path: str):
    module = importlib.import_module(module_name(path))
    absent = [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)]
    assert not absent, f"{path}: __all__ names {absent}, which do not exist."


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_explained_where_it_is_written(name: str):
    public = getattr(headwise, name)
    if not (inspect.isclass(public) or inspect.isfunction(public) or inspect.ismodule(public)):
        return  # a constant has no docstring; docs/api.md explains it
    written = public.__doc__ or ""
    # a dataclass without a docstring is given its signature for one
    assert written, f"headwise.{name} has no docstring."
    assert not written.startswith(f"{name}("), f"headwise.{name} has no docstring."


def test_no_file_names_a_path_of_somebodys_machine():
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}"
            for number, line in enumerate(text.splitlines(), start=1)
            if MACHINE.search(line)
        ]
    assert not found, f"{found}: name a relative path, an option or HEADWISE_DATA."
