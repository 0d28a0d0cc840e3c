"""Writes docs/api.md from the docstrings of the public names: `make api`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from pathlib import Path

import headwise

PAGE = Path(__file__).parent / "api.md"

# Modules whose names are imported from them, in the order of the page.
MODULES = (
    "headwise.errors",
    "headwise.heads",
    "headwise.heads.layouts",
    "headwise.kernels",
    "headwise.repulsion",
    "headwise.similarity",
    "headwise.routing",
    "headwise.gating",
    "headwise.roles",
    "headwise.masks",
    "headwise.metrics",
    "headwise.report",
    "headwise.shrinking",
    "headwise.plots",
    "headwise.integrations",
    "headwise.nn",
    "headwise.optim",
)
# What has no docstring of its own.
CONSTANTS = {
    "KINDS": "The kinds of attention, in order.",
    "GROUPINGS": "How query heads that share keys and values are grouped: within a group, or groups as wholes.",
    "Aggregator": "Any module that `aggregate` puts in the place of an output projection.",
    "ROLE_MASK": "The name of the entry of a batch that holds the role mask.",
    "RoleSetting": "Any role that `Roles` takes.",
    "Sentence": "A row of an encoding: a `WordTable`, or a tuple of those that are encoded as one.",
    "BINS": "The number of bins of confidence that calibration takes unless told.",
    "LAYOUTS": "The rows that `find_heads` tries, in order.",
    "PROJECTIONS": "The projections of a site, in order: query, key, value.",
    "BiasFunction": "A function that returns the bias of a call of an attention.",
    "GateSetting": "Any setting of `gate_heads`: `SigmoidGate` or `MixtureOfHeads`.",
    "Setting": "Any setting of `aggregate`: a routing, `Residual` of one, or `Gate`.",
    "Routing": "Any routing setting: `SimpleRouting`, `EMRouting` or `Trunk`.",
}


def render() -> str:
    """Return the page."""
    public = [name for name in headwise.__all__ if not name.startswith("_")]
    parts = [
        "# Every public name",
        "Written by `make api` from the docstrings. `help(name)` shows each whole: equation, shapes, ranges, example.",
        "## `import headwise as hw`",
        _table((name, f"hw.{name}", getattr(headwise, name)) for name in public),
    ]
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        space = module_name.rpartition(".")[2]
        parts += [
            f"## `hw.{space}`" if space in public else f"## `{module_name}`",
            _first_paragraph(module),
            _table((name, name, getattr(module, name)) for name in getattr(module, "__all__", None) or dir(module)),
        ]
    return "\n\n".join(parts) + "\n"


def _table(rows: Iterable[tuple[str, str, object]]) -> str:
    lines = ["| name | what it is |", "|---|---|"]
    for name, shown, value in sorted(rows, key=lambda row: row[0].lower()):
        text = CONSTANTS[name] if name in CONSTANTS else _first_paragraph(value)
        if name not in CONSTANTS and not (
            inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)
        ):
            raise SystemExit(f"{name} is no function and no class, and has no docstring; say in CONSTANTS what it is.")
        lines.append(f"| `{shown}` | {_cell(text)} |")
    return "\n".join(lines)


def _first_paragraph(value: object) -> str:
    written = inspect.getdoc(value) or ""
    return " ".join(written.partition("\n\n")[0].split())


def _cell(text: str) -> str:
    # a bar would end the cell, and stars or underscores in an equation would turn into emphasis
    for character in ("\\", "|", "*", "_", "<"):
        text = text.replace(character, f"\\{character}")
    # inside backticks nothing needs an escape but the bar
    pieces = text.split("`")
    pieces[1::2] = [piece.replace("\\*", "*").replace("\\_", "_").replace("\\<", "<") for piece in pieces[1::2]]
    return "`".join(pieces)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
