from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

import headwise
from docs.pages import ROOT

PUBLIC = [name for name in getattr(headwise, "__all__", dir(headwise)) if not name.startswith("_")]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_api", ROOT / "docs" / "generate_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_public_names_is_up_to_date(generator: ModuleType):
    assert generator.PAGE.read_text(encoding="utf-8") == generator.render(), "run `make api` and look at the change."


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_on_the_page_with_a_sentence(name: str):
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| `hw\.{name}` \| \S.+ \|$", page, re.MULTILINE)


def test_no_row_of_the_page_is_without_a_sentence(generator: ModuleType):
    assert not [line for line in generator.render().splitlines() if line.endswith("|  |")]
