from __future__ import annotations

import re

import pytest

import headwise
from docs.pages import ROOT, generator

PUBLIC = [name for name in getattr(headwise, "__all__", dir(headwise)) if not name.startswith("_")]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_on_the_page_with_a_sentence(name: str):
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| `hw\.{name}` \| \S.+ \|$", page, re.MULTILINE)


def test_no_row_of_the_page_is_without_a_sentence():
    assert not [line for line in generator("generate_api").render().splitlines() if line.endswith("|  |")]
