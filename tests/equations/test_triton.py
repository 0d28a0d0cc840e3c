"""The Triton programs: run in Triton's interpreter, and compiled for a GPU that is not here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "interpreted"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is for Linux alone")


def test_the_programs_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(FOLDER)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


COMPILED = """
import warnings
warnings.simplefilter("ignore")
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headwise.routing import em_triton

shared = {"votes_at": "*bf16", "token_stride": "i32", "head_stride": "i32", "beta_a_at": "*fp32", "beta_mu_at": "*fp32"}
shared |= dict.fromkeys(("tokens", "heads", "capsules", "size"), "i32")
shared |= dict.fromkeys(("first", "step", "floor"), "fp32")
own = {
    em_triton._forward: {"capsules_at": "*bf16"},
    em_triton._backward: {"grad_at": "*bf16", "into_at": "*bf16", "into_token_stride": "i32", "into_head_stride": "i32",
                          "sums_at": "*fp32", "sums_stride": "i32"},
}
constants = {"ITERATIONS": 3, "ACTIVE": True, "DTYPE": tl.float32, "HEADS": 8, "CAPSULES": 512, "SIZE": 1}
for program, more in own.items():
    signature = shared | more | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=program, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert len(made.asm["cubin"]) > 10_000
    # votes that do not stay on chip would be written to local memory
    assert made.asm["ptx"].count("ld.local") == 0
"""


def test_the_programs_compile_for_a_gpu_that_is_not_here(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", COMPILED], env=environment, check=True, timeout=300)
