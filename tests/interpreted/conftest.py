"""Tests of Triton programs in Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import os

# tests/equations/test_triton.py runs them in a process of their own
collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["*"]
