"""Methods in trainers: `huggingface.attach`, `lightning.HeadwiseCallback` and `accelerate.attach`.

The module of each trainer attaches the methods, again where it builds its model or optimizer anew, and keeps their
state in its checkpoints. These modules are imported where they are named, as the trainers are optional.
"""

import importlib
from typing import Any

from headwise.errors import warn_renamed

TRAINERS = ("accelerate", "huggingface", "lightning")


# Where the methods are, which were here before.
MOVED = {
    "Aggregate": "headwise",
    "Attached": "headwise.attached",
    "Penalize": "headwise",
    "Repel": "headwise",
}


def __getattr__(name: str) -> Any:
    if name in TRAINERS:
        return importlib.import_module(f"headwise.integrations.{name}")
    if name in MOVED:
        warn_renamed(f"headwise.integrations.{name}", f"{MOVED[name]}.{name}")
        return getattr(importlib.import_module(MOVED[name]), name)
    raise AttributeError(f"module 'headwise.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*TRAINERS]
