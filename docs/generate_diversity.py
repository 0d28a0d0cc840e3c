"""Writes the tables of docs/diversity.md from those of benchmarks/blind_spots.py: `make api`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
sys.path[:0] = [path for path in (str(ROOT / "src"),) if path not in sys.path]
BLIND_SPOTS = ROOT / "benchmarks" / "blind_spots.py"
PAGE = Path(__file__).parent / "diversity.md"


def render() -> str:
    """Return the page as it is, with its tables made anew."""
    blind_spots = load_blind_spots()
    page = PAGE.read_text(encoding="utf-8")
    for name, table in (("tricks", blind_spots.render()), ("attention", blind_spots.render_attention())):
        start, end = f"<!-- {name}: written by make api -->", "<!-- end -->"
        before, _, rest = page.partition(start)
        page = f"{before}{start}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return page


def load_blind_spots() -> ModuleType:
    """Return the benchmark as a module; its folder holds names that the tests have too, and is not put on the path."""
    spec = importlib.util.spec_from_file_location("blind_spots", BLIND_SPOTS)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["blind_spots"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
