"""The source files of headwise and its laboratory, for the tests of its structure."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"headwise": ROOT / "src", "headwise_lab": ROOT / "laboratory" / "src"}
FILES = sorted(
    path.relative_to(place).as_posix() for name, place in PACKAGES.items() for path in (place / name).rglob("*.py")
)


def read_source(path: str) -> str:
    """Return the text of one of `FILES`."""
    return (PACKAGES[path.partition("/")[0]] / path).read_text(encoding="utf-8")


def module_name(path: str) -> str:
    """Return the dotted name of a source file's module."""
    return ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
