"""Builds the documentation as a site in build/site: `make docs`.

Pages keep the places they have in the repository, so that links between them hold in both.
"""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import generate_api
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.utils.yaml import yaml_load

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "docs" / "mkdocs.yml"
PAGES = ROOT / "build" / "pages"
# What pages are, and what they link to.
SHOWN = (":(glob)*.md", "LICENSE", "docs", "laboratory/papers", "examples", "benchmarks/records")
# The page whose tables need the room of the contents beside it.
WIDE = PAGES / "laboratory" / "papers" / "README.md"


def main() -> None:
    """Collect the pages, write those of the reference, and build."""
    # of tqdm in the notebooks, whose bars a page could not show
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"
    shutil.rmtree(PAGES, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z", *SHOWN], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        target = PAGES / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    WIDE.write_text("---\nhide: [toc]\n---\n\n" + WIDE.read_text(encoding="utf-8"), encoding="utf-8")
    nav: list[Any] = yaml_load(SETTINGS.read_text(encoding="utf-8"))["nav"]
    nav[-1]["Reference"] += write_reference()
    build(load_config(str(SETTINGS), nav=nav))


def write_reference() -> list[dict[str, str]]:
    """Write a page of every documented module, and return their entries in the navigation."""
    entries = []
    for name in ("headwise", *generate_api.MODULES):
        module = importlib.import_module(name)
        # a namespace has a page of its own
        public = [one for one in getattr(module, "__all__", ()) if not inspect.ismodule(getattr(module, one))]
        page = PAGES / "docs" / "reference" / f"{name}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("\n\n".join([f"# {name}", *(f"::: {name}.{member}" for member in public)]) + "\n")
        entries.append({name: f"docs/reference/{name}.md"})
    return entries


if __name__ == "__main__":
    main()
