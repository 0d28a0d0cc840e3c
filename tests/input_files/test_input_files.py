"""What is no file, no text or without end is refused in a sentence; nothing is waited for, and memory stays bounded."""

from __future__ import annotations

import gzip
import itertools
import os
import socket
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw
from fuzz.mutate import read_in_time
from headwise.errors import DataError
from headwise.input_files import describe_place, is_file, open_input, read_numbered_lines, read_whole
from headwise.stock_folders import TooLarge, limit_size
from headwise.texts.batching import read_sentences
from headwise.texts.labeled_texts import find_layout, read_texts
from headwise_lab.data.arrays import digest, find_plain_or_gz, require_files
from headwise_lab.data.documents import find_files, read_lines, read_pieces
from headwise_lab.data.probing_files import find_probing_file, read_probing
from headwise_lab.data.subwords import read_tokenizer
from headwise_lab.data.word_vectors import read_word_vectors
from headwise_lab.experiment.run_folder import read_json
from headwise_lab.probing.request import find_task_files
from headwise_lab.tasks.graph2text.files import read_graphs, read_triples
from headwise_lab.tasks.logic.formulas import read_pairs
from headwise_lab.tasks.translation.files import find_corpus, read_side
from headwise_lab.texts.sets import read_profiles, read_set

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "lines": ("a.txt", lambda path: list(read_numbered_lines(path))),
    "whole": ("a.bin", read_whole),
    "digest": ("a.bin", lambda path: digest("", [path])),
    "conllu": ("a.conllu", hw.roles.read_conllu),
    "idf": ("idf.json", hw.roles.IDF.load),
    "json": ("settings.json", read_json),
    "sentences": ("a.txt", read_sentences),
    "texts": ("a.tsv", read_texts),
    "csv": ("a.csv", read_texts),
    "probing": ("tense.txt", read_probing),
    "tokenizer": ("tokenizer.json", read_tokenizer),
    "vectors": ("glove.txt", lambda path: read_word_vectors(path, ["a"], 2)),
    "triples": ("a.tsv", read_triples),
    "graphs": ("a.tsv", read_graphs),
    "logic": ("train0", lambda path: list(read_pairs(path, 0))),
    "documents": ("a.txt", lambda path: sum(1 for _ in read_pieces(path))),
    "objects": ("a.jsonl", lambda path: sum(1 for _ in read_pieces(path))),
    "set": ("a.csv", read_set),
    "side": ("a.de", lambda path: list(read_side(path))),
    "talks": ("train.tags.de-en.de", lambda path: list(read_side(path))),
    "segments": ("a.sgm", lambda path: list(read_side(path))),
}
FINDERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "plain or packed": ("a.txt", lambda path: find_plain_or_gz(path.parent, path.name)),
    "files": ("a.txt", lambda path: require_files(path.parent, [path.name])),
    "layout": ("train.tsv", lambda path: find_layout(path.parent)),
    "probing file": ("past_present.txt", lambda path: find_probing_file(path.with_suffix(""))),
    "probing files": ("past_present.txt", lambda path: find_task_files(path.parent, ["all"])),
    "graphs": ("train.tsv", lambda path: read_graphs(path.parent)),
    "text": ("a.txt", find_files),
    "texts": ("a.txt", lambda path: find_files(path.parent)),
    "reviews": ("review.json", lambda path: read_set(path.parent)),
    "truth": ("truth.txt", lambda path: read_profiles(path.parent)),
    "two files": ("a.de", lambda path: find_corpus(Path(f"{path},{path.with_suffix('.en')}"))),
}
UNPACKED = {"whole", "digest", "idf", "json", "tokenizer"}


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path):
    for name, (file, read) in (READERS | {f"{name} found": found for name, found in FINDERS.items()}).items():
        place = tmp_path / name
        place.mkdir()
        os.mkfifo(place / file)

        def refused(read: Any = read, path: Path = place / file) -> None:
            with pytest.raises(DataError, match=r"is a pipe; expected a file: save what it gives to one, and name"):
                read(path)

        read_in_time(refused)
    (tmp_path / "truth.txt").write_text("a0:::f:::18-24\n")
    os.mkfifo(tmp_path / "a0.xml")
    with pytest.raises(DataError, match=r"a0\.xml is a pipe"):
        read_profiles(tmp_path)


def test_what_is_at_a_place_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    assert [describe_place(tmp_path / name) for name in ("", "file", "none")] == [
        "is a folder",
        "is a file",
        "does not exist",
    ]
    assert [is_file(tmp_path / name) for name in ("", "file", "none", "file/none", "a\0")] == [
        False,
        True,
        *[False] * 3,
    ]
    with pytest.raises(DataError, match=r"null is a device; expected a file"):
        is_file(Path(os.devnull))
    with pytest.raises(DataError, match=r"null is a device; expected a file"), open_input(Path(os.devnull)):
        pass
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with pytest.raises(DataError, match=r"socket is a socket; expected a file"):
            is_file(tmp_path / "socket")
    with pytest.raises(DataError, match=r"cannot be read \(File name too long\); name another file or folder"):
        is_file(tmp_path / ("x" * 300))


def test_what_cannot_be_opened_is_refused(tmp_path: Path):
    for name in ("", "none", "a\0b", "x" * 300):
        with pytest.raises(DataError, match=r"cannot be read \(.+\); expected a file"):
            list(read_numbered_lines(tmp_path / name))


def test_lines_end_as_they_may_and_a_mark_of_the_byte_order_is_no_text(tmp_path: Path):
    content = "\ufeffone\r\n\n\ufefftwo\u2028\x0b\nthree".encode()
    for name, written in (("a.txt", content), ("a.txt.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(written)
        found = list(read_numbered_lines(tmp_path / name))
        assert found == [(1, "one"), (2, ""), (3, "\ufefftwo\u2028\x0b"), (4, "three")]


def test_a_file_whose_lines_end_in_cr_alone_is_read_by_lines_and_as_documents(tmp_path: Path):
    path = tmp_path / "a.txt"
    for longest, last in itertools.product((7, 8, 9, 100), ("", "\r")):
        path.write_bytes(f"\ufeffé\r\rtwo\rrow{last}".encode())
        assert list(read_numbered_lines(path, longest)) == [(1, "é"), (2, ""), (3, "two"), (4, "row")]
        pieces = "".join(piece.text + "\n" * piece.ends for piece in read_lines(path, longest))
        assert pieces.split() == ["é", "two", "row"]
        assert [piece.text for piece in read_pieces(path)] == ["é", "two\nrow"]
        path.write_bytes(f"one\rof\nthree{last}".encode())
        assert list(read_numbered_lines(path)) == [(1, "one\rof"), (2, "three")]
    path.write_bytes(b"one\r" + b"y" * 101)
    with pytest.raises(DataError, match=r"a\.txt, line 2: longer than 100 bytes"):
        list(read_numbered_lines(path, 100))


def test_a_line_may_be_as_long_as_the_bound_and_no_longer(tmp_path: Path):
    path = tmp_path / "a.txt"
    for end in ("", "\n"):
        path.write_text(f"x\n{'y' * 100}{end}")
        assert list(read_numbered_lines(path, 100)) == [(1, "x"), (2, "y" * 100)]
        path.write_text(f"x\n{'y' * 101}{end}")
        with pytest.raises(DataError, match=r"a\.txt, line 2: longer than 100 bytes; expected .* break the line"):
            list(read_numbered_lines(path, 100))


@pytest.mark.parametrize(
    "names", [["lines"], pytest.param(sorted(READERS.keys() - UNPACKED), marks=pytest.mark.full)], ids=["lines", "all"]
)
def test_a_small_packed_file_of_one_endless_line_does_not_fill_the_memory(names: list[str], tmp_path: Path):
    endless = tmp_path / "endless.gz"
    with gzip.open(endless, "wb", compresslevel=1) as stream:
        for _ in range(150):
            stream.write(b"a" * (1 << 20))
    for name in names:
        file, read = READERS[name]
        (tmp_path / name).mkdir()
        path = tmp_path / name / f"{file}.gz"
        path.hardlink_to(endless)
        tracemalloc.start()
        try:
            if name == "documents":
                read(path)
            else:
                with pytest.raises(DataError, match=r"line 1: longer than [\d,]+ bytes; expected .*: break the line"):
                    read(path)
            assert tracemalloc.get_traced_memory()[1] < (140 << 20), name
        finally:
            tracemalloc.stop()


def make_large(module: nn.Linear, times: int = 1) -> None:
    for _ in range(times):
        module.weight = nn.Parameter(torch.empty(1 << 13, 1 << 10, device="meta"))


def test_a_model_is_counted_in_the_thread_that_builds_it_and_what_is_replaced_once():
    module = nn.Linear(1, 1, device="meta")
    with limit_size(1, 8):
        make_large(module, times=9)
        thread = threading.Thread(target=lambda: [make_large(nn.Linear(1, 1, device="meta")) for _ in range(9)])
        thread.start()
        thread.join()
        # the bound is that of the thread of the block
        modules = [nn.Linear(1, 1, device="meta") for _ in range(9)]
        with pytest.raises(TooLarge):
            [make_large(each) for each in modules]
