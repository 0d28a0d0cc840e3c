"""Files of documents, found by the endings of their names."""

from __future__ import annotations

from pathlib import Path

from headwise_lab.data.documents import find_files, read_pieces


def test_endings_in_capitals_are_read_as_others(tmp_path: Path):
    (tmp_path / "A.TXT").write_text("one\n\ntwo\n")
    (tmp_path / "B.JSONL").write_text('{"text": "three"}\n')
    found = find_files(tmp_path)
    assert [find_files(path) for path in found] == [(path,) for path in found]
    assert [piece.text for path in found for piece in read_pieces(path)] == ["one", "two", "three"]
