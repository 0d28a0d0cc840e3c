"""Options that several commands have, and the refusal of unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated

import typer

TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python files and kernels that a Hugging Face folder names; without it such a folder is refused.",
    ),
]
TextColumn = Annotated[
    list[str] | None,
    typer.Option(
        "--text-column",
        metavar="NAME",
        help="Column of the texts in a table, or key in JSON Lines, where data.body is a key inside another; twice for "
        "pairs.",
    ),
]


def require_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Refuse an unknown name, and suggest similar ones."""
    names = list(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "choose"
    raise typer.BadParameter(f"there is no {kind} {name!r}; {hint} (all: {', '.join(names)}).")
