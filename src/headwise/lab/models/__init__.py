"""The models the laboratory trains, and the baselines they have to beat."""

from __future__ import annotations

__all__: list[str] = []
