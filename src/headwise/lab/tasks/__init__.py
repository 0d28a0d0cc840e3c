"""One file a task: its data, its scales and how a batch is made."""

from __future__ import annotations

__all__: list[str] = []
