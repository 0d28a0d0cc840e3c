"""The reader of the published files: what it takes, what it refuses, and that all of them agree with us."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from headwise.errors import DataError
from headwise_lab.data.arrays import require_files
from headwise_lab.tasks.logic.files import read_pairs
from headwise_lab.tasks.logic.formulas import Pair, operators, relation, worlds

PUBLISHED = Path(os.environ.get("HEADWISE_DATA", "")) / "logical_inference" / "propositionallogic"


@pytest.mark.skipif("HEADWISE_DATA" not in os.environ, reason="HEADWISE_DATA names no folder with the published files")
@pytest.mark.parametrize("operator_bin", range(13))
def test_every_published_line_has_our_relation_and_bin(operator_bin):
    lines = 0
    for path in require_files(PUBLISHED, [f"train{operator_bin}", f"test{operator_bin}"]).values():
        for pair in read_pairs(path, operator_bin):
            assert relation(worlds(pair.premise), worlds(pair.hypothesis)) == pair.relation, pair
            assert min(12, max(operators(pair.premise), operators(pair.hypothesis))) == operator_bin, pair
            lines += 1
    assert lines > 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_is_read_plain_or_gzipped_whatever_its_words_and_line_ends(tmp_path, packed):
    content = "<\t( x ( xor y ) )\tz\r\n#\tété\t( no  x )\n".encode()
    path = tmp_path / ("train2.gz" if packed else "train2")
    path.write_bytes(gzip.compress(content) if packed else content)
    assert list(read_pairs(path, 2)) == [
        Pair("<", "( x ( xor y ) )", "z", 2),
        Pair("#", "été", "( no x )", 2),
    ]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("=\ta", "2 tab-separated fields; expected 3"),
        ("= a b", "1 tab-separated fields; expected 3"),
        ("", "1 tab-separated fields; expected 3"),
        ("=\ta\tb\tc", "4 tab-separated fields; expected 3"),
        ("~\ta\tb", "relation '~'; expected one of = < > ^ | v #"),
        ("=\t \tb", "premise ' ': it is empty"),
        ("=\ta\t", "hypothesis '': it is empty"),
        ("=\t( a ( and b )\tb", "premise '( a ( and b )': 1 bracket is not closed"),
        ("=\ta\tb )", "hypothesis 'b )': the bracket closed at token 2 was never opened"),
    ],
)
def test_a_malformed_line_is_refused_by_file_number_and_fault(tmp_path, line, fault):
    path = tmp_path / "train1"
    path.write_text(f"#\ta\tb\n{line}\n")
    with pytest.raises(DataError) as refusal:
        list(read_pairs(path, 1))
    assert f"{path}, line 2: " in str(refusal.value)
    assert fault in str(refusal.value)


def test_a_file_that_is_not_text_is_refused_at_its_line(tmp_path):
    path = tmp_path / "train1"
    path.write_bytes(b"#\ta\tb\n#\t\xff\tb\n")
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        list(read_pairs(path, 1))


@pytest.mark.parametrize("damage", ["cut", "plain"])
def test_a_damaged_gzip_file_is_refused(tmp_path, damage):
    content = gzip.compress(b"#\ta\tb\n" * 1000)
    path = tmp_path / "train1.gz"
    path.write_bytes(content[:-9] if damage == "cut" else b"#\ta\tb\n")
    with pytest.raises(DataError, match="cannot be read"):
        list(read_pairs(path, 1))
