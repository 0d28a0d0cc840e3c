"""JSON without NaN and infinity, and nothing else changed: what was written before is read, and written the same."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from architecture.source import ROOT
from cases import cases
from headwise.errors import DataError, HeadwiseError
from headwise.input_files import encode_json, find_not_finite, parse_json
from headwise.report.html import Page
from headwise_lab.experiment.run_folder import read_json, write_json, write_lines

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("aé\n")
VALUES = st.recursive(SCALARS, lambda part: st.lists(part) | st.dictionaries(st.text("ab."), part), max_leaves=8)
RECORDS = sorted(
    path
    for folder in ("laboratory/papers", "benchmarks/records")
    for pattern in ("*.json", "*.jsonl")
    for path in (ROOT / folder).rglob(pattern)
)


@given(value=VALUES)
def test_finite_values_are_written_and_read_as_python_does(value: Any):
    assert encode_json(value) == json.dumps(value)
    assert encode_json(value, indent=1, ascii_only=False) == json.dumps(value, indent=1, ensure_ascii=False)
    assert encode_json(value, compact=True, sort_keys=True) == json.dumps(value, separators=(",", ":"), sort_keys=True)
    assert parse_json(encode_json(value)) == json.loads(json.dumps(value))


@cases("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_not_written_and_its_place_is_named(number: float, tmp_path: Path):
    value = {"score": 0.5, "sites": [{"drops": (1.0, 2.0)}, {"drops": (3.0, number)}]}
    place, found = find_not_finite(value) or ("", 0.0)
    assert place == "sites.1.drops.1"
    assert found is number
    path = tmp_path / "result.json"
    for write in (lambda: write_json(path, value), lambda: write_lines(path, [{"epoch": 1}, value])):
        with pytest.raises(
            HeadwiseError, match=rf"result\.json was not written: sites\.1\.drops\.1 is {number}; .*finite"
        ):
            write()
    assert not list(tmp_path.iterdir())
    with pytest.raises(HeadwiseError, match=f"the value is {number}"):
        encode_json(number)
    with pytest.raises(HeadwiseError, match="the data of heads cannot be written as JSON"):
        Page("heads").view("heads", value, script="")


def test_a_number_that_is_not_finite_is_not_read(tmp_path: Path):
    path = tmp_path / "result.json"
    for text, reason in (
        ('{"a": NaN}', "NaN is no number of JSON"),
        ("[1, Infinity]", "Infinity is no number of JSON"),
        (b"-Infinity", "-Infinity is no number of JSON"),
        ("[1e400]", "1e400 is beyond the range of numbers"),
        ("-1e999", "-1e999 is beyond the range of numbers"),
        ('{"a": ' + "9" * 400 + "}", "9" * 60 + r"\.\.\. is beyond the range of numbers"),
    ):
        with pytest.raises(ValueError, match=f"^{reason}$"):
            parse_json(text)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(DataError, match=rf"result\.json is not readable as JSON \({reason}\); delete it and run"):
            read_json(path)


def test_json_is_read_and_what_is_none_or_no_text_is_refused():
    assert parse_json('{"a": ["\\ud83d\\ude00", "\\\\ud800"]}') == {"a": ["\N{GRINNING FACE}", "\\ud800"]}
    assert parse_json(b'\xef\xbb\xbf{"a": "\\u00e9"}') == {"a": "é"}
    for content in ("[" * 100_000 + "]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000):
        with pytest.raises(ValueError, match="brackets are nested too deeply"):
            parse_json(content)
    for content in ('["\\ud800"]', b'{"\\udfff": 1}'):
        with pytest.raises(ValueError, match="is half of a surrogate pair; take it out"):
            parse_json(content)
    for content in ("", "{", "9" * 5000, b"\xff", b'"\xed\xa0\x80"'):
        with pytest.raises(ValueError, match=r".+"):
            parse_json(content)


def test_every_published_record_is_still_read():
    assert len(RECORDS) > 50
    for path in RECORDS:
        text = path.read_text(encoding="utf-8")
        for part in text.splitlines() if path.suffix == ".jsonl" else [text]:
            assert parse_json(part) == json.loads(part), path


def test_no_other_file_uses_pythons_own_module():
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("src", "laboratory/src", "benchmarks", "examples", "docs")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"^[ \t]*(import|from) json\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    # the second recomputes records without headwise
    assert found == {"src/headwise/input_files.py", "benchmarks/recompute.py"}
