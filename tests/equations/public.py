"""The public functions and classes that a module defines."""

from __future__ import annotations

from types import ModuleType


def public_names(module: ModuleType) -> set[str]:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name for name, value in own.items() if getattr(value, "__module__", None) == module.__name__}
