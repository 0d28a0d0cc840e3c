"""How many small faults the tests find: `python benchmarks/mutants.py` changes one operator, comparison, constant or
sign at a time in a copy of the repository and runs the tests named for the file, until the first that fails.

The same seed draws the same changes, so that two commits with the same source can be compared line by line.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "src/headwise/kernels.py": "equations/kernels equations/particles equations/refusals laws/particle_laws",
    "src/headwise/repulsion/rules.py": "equations/particles equations/refusals repulsion/step_forms "
    "repulsion/repulsion_refusals laws/particle_laws",
    "src/headwise/routing/algorithms.py": "equations/routing equations/votes equations/refusals laws/routing_laws "
    "equations/aggregation",
    "src/headwise/similarity/terms.py": "equations/disagreement similarity/penalty similarity/position_recomputed "
    "similarity/invariant_terms similarity/strength laws/similarity_laws",
    "src/headwise/similarity/invariant.py": "equations/similarity similarity/invariant_terms similarity/penalty "
    "similarity/strength",
    "src/headwise/shrinking/alignment.py": "shrinking/alignment shrinking/key_freedom shrinking/merge "
    "shrinking/shrinking_refusals",
    "laboratory/src/headwise_lab/results/statistics.py": "lab/results/statistics",
}
SWAPPED = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Pow: "*", ast.FloorDiv: "*", ast.Mod: "+",
    ast.BitAnd: "|", ast.BitOr: "&",
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.And: "or", ast.Or: "and",
}  # fmt: skip


def changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield what may stand in a node's place: the node and the text."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield node, f"({ast.unparse(node.left)}) {SWAPPED[type(node.op)]} ({ast.unparse(node.right)})"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node, f"{ast.unparse(node.left)} {SWAPPED[type(node.ops[0])]} {ast.unparse(node.comparators[0])}"
    elif isinstance(node, ast.BoolOp):
        yield node, f" {SWAPPED[type(node.op)]} ".join(f"({ast.unparse(value)})" for value in node.values)
    elif isinstance(node, ast.UnaryOp):
        yield node, ast.unparse(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield node, repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.If | ast.IfExp):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass"


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a function's nodes without its annotations and messages, which change nothing or little."""
    yield node
    for name, field in ast.iter_fields(node):
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.JoinedStr):
                yield from walk(child) if name not in {"annotation", "returns"} else ()


def mutants(path: str) -> list[tuple[int, int, str]]:
    """Return all changes of a file's functions: start and end in bytes, and the new text."""
    source = (ROOT / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    nodes = (node for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) for node in walk(one))
    found = (change for node in nodes for change in changes(node))
    return sorted(
        {
            (starts[at.lineno - 1] + at.col_offset, starts[(at.end_lineno or 0) - 1] + (at.end_col_offset or 0), text)
            for at, text in found
        }
    )


def run_tests(copy: Path, tests: list[str]) -> None:
    """Run tests in this process, which is a fork, and end it with their status."""
    import pytest

    os.chdir(copy)
    # benchmarks have names that folders of tests have too
    sys.path.remove(str(ROOT / "benchmarks"))
    with (copy / "tests.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    os._exit(int(pytest.main([*options, f"--basetemp={copy}/pt", *tests])))


def killed(copy: Path, tests: list[str]) -> bool:
    """Return whether a test fails, or takes too long."""
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(copy, tests))
    process.start()
    process.join(timeout=300)
    process.kill()
    process.join()
    return process.exitcode != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=25, help="mutants of a file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the paths to change")
    parser.add_argument("--again", type=Path, help="what an earlier run printed: try what it killed alone")
    given = parser.parse_args()
    earlier = given.again.read_text().splitlines() if given.again else None
    # a fork has imported what takes seconds; it imports headwise itself
    for name in ("hypothesis", "numpy", "pytest", "scipy.stats", "torch", "transformers"):
        importlib.import_module(name)
    os.environ |= {"CI": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    table = []
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "headwise"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "archives"))
        for path, names in TESTS.items():
            if given.only not in path:
                continue
            folder = "laboratory/tests" if path.startswith("laboratory") else "tests"
            tests = [f"{folder}/{'/test_'.join(name.rsplit('/', 1))}.py" for name in names.split()]
            if killed(copy, tests):
                sys.exit(f"{tests} fail without a change:\n{(copy / 'tests.log').read_text()}")
            source, every = (ROOT / path).read_bytes(), mutants(path)
            drawn = sorted(random.Random(given.seed).sample(every, min(given.number, len(every))))
            found = []
            for start, end, text in drawn:
                line, old = source.count(b"\n", 0, start) + 1, " ".join(source[start:end].decode().split())
                name = f"{path}:{line}: {old} -> {text}"
                if earlier is None or f"killed {name}" in earlier:
                    (copy / path).write_bytes(source[:start] + text.encode() + source[end:])
                    found.append(killed(copy, tests))
                    print("killed" if found[-1] else "SURVIVED", name, flush=True)
            (copy / path).write_bytes(source)
            table.append(f"{sum(found):4} of {len(found):3} killed, of {len(every):4} possible  {path}")
    print("", *table, sep="\n")


if __name__ == "__main__":
    main()
