"""One thread a process: test workers share the cores, and sums come out the same on every machine."""

from __future__ import annotations

import os

import torch

os.environ.setdefault("MPLBACKEND", "Agg")
torch.set_num_threads(1)
