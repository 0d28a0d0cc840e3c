"""The Triton programs: run in Triton's interpreter, and compiled for a GPU that is not here."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "interpreted"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is for Linux alone"),
]


@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_programs_in_the_interpreter(chosen: str):
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", chosen]
    command = [sys.executable, "-m", "pytest", *options, str(FOLDER)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


COMPILED = """
import subprocess, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from headwise.routing import em_triton, simple_triton
from headwise.routing.triton_tiles import choose_tile

whole, settings = ["token_stride", "head_stride"], ["tokens", "heads", "capsules", "size"]
scratch = {"scratch_at": "*fp32", "scratch_size": "i32"}
strides = dict.fromkeys(["into_token_stride", "into_head_stride"], "i32")
shared = {"votes_at": "*bf16", **dict.fromkeys(whole, "i32")}
betas = {"beta_a_at": "*fp32", "beta_mu_at": "*fp32"}
numbers = dict.fromkeys(["first", "step", "floor"], "fp32")
arguments = {
    em_triton: {**shared, **betas, **dict.fromkeys(settings, "i32"), **numbers, **scratch},
    simple_triton: {**shared, **dict.fromkeys(settings, "i32"), "floor": "fp32", **scratch},
}
forward, backward = {"capsules_at": "*bf16"}, {"grad_at": "*bf16", "into_at": "*bf16", **strides}
sums = {"sums_at": "*fp32", "sums_stride": "i32"}
name, heads, width, size = sys.argv[1], *map(int, sys.argv[2:])
kind, own, constants = {
    "em forward": (em_triton, forward, {"ITERATIONS": 3, "ACTIVE": True}),
    "em backward": (em_triton, backward | sums, {"ITERATIONS": 3, "ACTIVE": True}),
    "simple forward": (simple_triton, forward, {"ITERATIONS": 3, "OVER_CAPSULES": True}),
    "simple backward": (simple_triton, backward, {"ITERATIONS": 3, "OVER_CAPSULES": True}),
}[name]
tile = choose_tile(torch.empty(1, heads, width // size, size, dtype=torch.bfloat16))
warps = tile.pop("num_warps")
constants |= tile
program = getattr(kind, "_" + name.split()[1])
signature = arguments[kind] | own | dict.fromkeys(constants, "constexpr")
source = ASTSource(fn=program, signature=signature, constexprs=constants)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
text = Path("program.ptx")
text.write_text(made.asm["ptx"])
command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(text), "-o", "program.cubin"]
print(subprocess.run(command, capture_output=True, text=True, check=True).stderr)
"""
PROGRAMS = ["em forward", "simple forward", "em backward", "simple backward"]
SHAPES = [(12, 768, 1), (8, 512, 1), (16, 1024, 1), (32, 1024, 1), (8, 512, 4), (16, 1024, 64)]
# a backward program contains what the forward one does
FAST = [(PROGRAMS[2], SHAPES[0])]


@pytest.mark.parametrize(
    ("program", "shape"),
    [
        pytest.param(program, shape, marks=[] if (program, shape) in FAST else pytest.mark.slow)
        for program in PROGRAMS
        for shape in SHAPES
    ],
)
def test_the_programs_compile_for_a_gpu_that_is_not_here_and_spill_nothing(program, shape, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", COMPILED, program, *map(str, shape)]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (stack, stores, loads) = map(int, re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", done.stdout))
    assert (stack, stores, loads) == (0, 0, 0)
    (registers,) = map(int, re.findall(r"Used (\d+) registers", done.stdout))
    assert registers <= 255
