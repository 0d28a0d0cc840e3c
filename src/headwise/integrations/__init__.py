"""Methods in trainers: `huggingface.attach`, `lightning.HeadwiseCallback` and `accelerate.attach`.

`Aggregate`, `Penalize` and `Repel` say what to attach. The module of each trainer attaches them, again where it builds
its model or optimizer anew, and keeps their state in its checkpoints. These modules are imported where they are named,
as the trainers are optional.
"""

import importlib
from types import ModuleType

from headwise.integrations.attached import Attached
from headwise.integrations.methods import Aggregate, Penalize, Repel

__all__ = ["Aggregate", "Attached", "Penalize", "Repel"]

TRAINERS = ("accelerate", "huggingface", "lightning")


def __getattr__(name: str) -> ModuleType:
    if name in TRAINERS:
        return importlib.import_module(f"headwise.integrations.{name}")
    raise AttributeError(f"module 'headwise.integrations' has no attribute {name!r}")
