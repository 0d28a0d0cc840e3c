from __future__ import annotations

import ast

import pytest

from architecture.plan import FLOORS, SOURCE, module_name, position, source_files

# `find_heads` looks a model of transformers up in its bridge, and only such a model.
UPWARD = {("layouts.py", "bridges/huggingface.py")}

PATHS = {module_name(path): path for path in source_files()}


def imports(path: str) -> set[str]:
    """Source files that a file imports anywhere in it, in functions and under TYPE_CHECKING too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((SOURCE / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import; write headwise.{node.module}."
            module = node.module or ""
            submodules = {f"{module}.{alias.name}" for alias in node.names} & PATHS.keys()
            # `from headwise import nn` reads the package's own names only where it takes something else than a module
            found |= submodules if len(submodules) == len(node.names) else submodules | {module}
    return {PATHS[name] for name in found if name in PATHS} - {path}


def test_every_source_file_has_a_place_in_the_plan():
    missing = [path for path in source_files() if position(path) is None]
    assert not missing, f"{missing}: add to FLOORS in tests/architecture/plan.py, after what they import."


def test_no_file_stands_twice_in_the_plan():
    files = [path for _, listed in FLOORS for path in listed]
    assert len(files) == len(set(files)), sorted(path for path in set(files) if files.count(path) > 1)


def test_every_file_of_the_plan_exists():
    gone = [path for _, listed in FLOORS for path in listed if path not in source_files()]
    assert not gone, f"{gone}: remove from FLOORS in tests/architecture/plan.py."


@pytest.mark.parametrize("path", source_files())
def test_a_file_imports_only_from_below(path: str):
    own = position(path)
    assert own is not None, f"{path}: add to FLOORS in tests/architecture/plan.py."
    above = sorted(other for other in imports(path) if (position(other) or own) >= own and (path, other) not in UPWARD)
    assert not above, (
        f"{path} ({FLOORS[own[0]][0]}) imports {above}, which the plan puts above it; move what is needed down, or "
        "change the order of FLOORS in tests/architecture/plan.py if it is the plan that is wrong."
    )


@pytest.mark.parametrize(
    "path", [path for path in source_files() if not path.startswith("lab/") and path != "__main__.py"]
)
def test_the_library_never_imports_the_laboratory(path: str):
    assert not [other for other in imports(path) if other.startswith("lab/")]


@pytest.mark.parametrize("path", [path for path in source_files() if path.startswith("reference/")])
def test_the_oracle_shares_no_code_with_what_it_judges(path: str):
    assert not [other for other in imports(path) if not other.startswith("reference/")]


@pytest.mark.parametrize(("path", "other"), sorted(UPWARD))
def test_the_one_import_upwards_is_still_there_and_waits_for_a_model_that_needs_it(path: str, other: str):
    assert other in imports(path)
    top = ast.parse((SOURCE / path).read_text(encoding="utf-8")).body
    assert not [
        node for node in top if "bridges" in ast.unparse(node) and isinstance(node, ast.Import | ast.ImportFrom)
    ]
