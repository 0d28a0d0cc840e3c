"""One thread a process: test workers share the cores, and sums come out the same on every machine."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

os.environ.setdefault("MPLBACKEND", "Agg")
torch.set_num_threads(1)

# Integration draws the same examples every time, so that a red run is the change's; a developer's runs keep looking.
settings.register_profile("integration", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("integration")
