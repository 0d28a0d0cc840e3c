from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from docs.pages import ROOT
from layouts.families import FAMILIES
from layouts.refused import REFUSED


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_any_model", ROOT / "docs" / "generate_any_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_about_models_is_what_the_tables_say(generator: ModuleType):
    assert generator.PAGE.read_text(encoding="utf-8") == generator.render(), "run `make api` and look at the change."


def test_every_family_and_every_refusal_has_a_row(generator: ModuleType):
    lines = generator.render().splitlines()
    for name in [entry.name for entry in (*FAMILIES, *REFUSED)]:
        assert sum(line.startswith(f"| {name} |") for line in lines) == 1


def test_weights_and_biases_are_said_to_be_reached_exactly_where_the_interface_is_used(generator: ModuleType):
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in generator.render().splitlines()}
    for family in FAMILIES:
        assert (rows[family.name][4] == "yes") == (family.interface or family.name == "torch.nn.Transformer")
