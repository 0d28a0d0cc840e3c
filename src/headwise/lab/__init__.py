"""The laboratory: tasks, models and comparisons on top of the library, which never imports it."""

from __future__ import annotations

__all__: list[str] = []
