"""The table of the page on cost is that of its records, and says what is wanted of each."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_cost", DOCS / "generate_cost.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_its_generator_writes():
    page = load()
    assert page.PAGE.read_text(encoding="utf-8") == page.render()


def test_a_figure_of_the_record_is_in_the_table():
    page = load()
    now = json.loads((page.RECORDS / page.NOW).read_text(encoding="utf-8"))
    table = page.make_table(now, now)
    assert f"{now['python']['microseconds per layer']['svgd']:.0f} us" in table
    now["bytes"]["rows"]["svgd, 54 groups"]["times the floor"] = 123.4
    assert "123.4 times" in page.make_table(now, now)
