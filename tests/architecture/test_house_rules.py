from __future__ import annotations

import importlib
import inspect
import re
import subprocess
from pathlib import Path

from architecture.source import FILES, ROOT, module_name

LONGEST = 800
SHAPELESS = {"base", "common", "helper", "helpers", "misc", "shared", "tools", "util", "utils"}
MACHINE = re.compile(r"(?<![\w.:/-])/(?:work|home|root|Users|tmp|opt)/|\.\./shared\b")
PACKAGES = [importlib.import_module(module_name(path)) for path in FILES if path.endswith("__init__.py")]


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


def test_no_file_or_folder_has_a_name_that_says_nothing():
    assert not [path for path in FILES if SHAPELESS & set(Path(path).with_suffix("").parts)]


def test_no_file_is_long():
    files = [path for path in tracked_files() if path.suffix == ".py"]
    counts = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    long = {path: count for path, count in counts.items() if count > LONGEST}
    assert not long, f"{long}: more than {LONGEST} lines; divide them."


def test_a_package_exports_what_it_names():
    absent = [
        (one.__name__, name) for one in PACKAGES for name in getattr(one, "__all__", ()) if not hasattr(one, name)
    ]
    assert not absent, f"{absent}: named by __all__, and do not exist."


def test_every_public_name_is_explained_where_it_is_written():
    public = {name: getattr(one, name) for one in PACKAGES for name in getattr(one, "__all__", ())}
    # a constant has no docstring; docs/api.md explains it
    explained = {
        name: one.__doc__ or ""
        for name, one in public.items()
        if inspect.isclass(one) or inspect.isfunction(one) or inspect.ismodule(one)
    }
    # a dataclass without a docstring is given its signature for one
    bare = [name for name, written in explained.items() if not written or written.startswith(f"{name}(")]
    assert not bare, f"{bare} have no docstring."


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
