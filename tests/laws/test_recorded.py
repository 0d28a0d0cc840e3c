"""Every public call gives the recorded numbers, printed text and refusals on twelve families."""

from __future__ import annotations

import json

import pytest

from laws.recorded import FAMILIES, RECORD, compute, list_differences


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_public_calls_give_the_recorded_numbers(name: str):
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))[name]
    assert list(list_differences(compute(name), recorded)) == []
