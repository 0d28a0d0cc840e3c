"""The source files of headwise and its laboratory, for the tests of its structure."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def module_name(path: str) -> str:
    """Return the dotted name of a source file's module."""
    return ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
