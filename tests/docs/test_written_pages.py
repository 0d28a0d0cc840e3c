"""The pages that a program writes are what it writes now."""

from __future__ import annotations

import pytest

from docs.pages import ROOT, generator

GENERATORS = sorted(path.stem for path in (ROOT / "docs").glob("generate_*.py"))


@pytest.mark.parametrize("name", GENERATORS)
def test_a_written_page_is_up_to_date(name: str):
    written = generator(name)
    assert written.PAGE.read_text(encoding="utf-8") == written.render(), "run `make api` and look at the change."


def test_every_generator_is_found_and_run_by_make():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert GENERATORS
    assert all(f"docs/{name}.py" in makefile for name in GENERATORS)
