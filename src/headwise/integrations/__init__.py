"""Methods in trainers: `huggingface.attach`, `lightning.HeadwiseCallback` and `accelerate.attach`.

The module of each trainer attaches the methods, again where it builds its model or optimizer anew, and keeps their
state in its checkpoints. These modules are imported where they are named, as the trainers are optional.
"""

import importlib
from types import ModuleType

TRAINERS = ("accelerate", "huggingface", "lightning")


def __getattr__(name: str) -> ModuleType:
    if name in TRAINERS:
        return importlib.import_module(f"headwise.integrations.{name}")
    raise AttributeError(f"module 'headwise.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*TRAINERS]
