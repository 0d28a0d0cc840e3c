"""The reader of labeled texts: what it takes, what it refuses, and the published sets."""

from __future__ import annotations

import csv
import gzip
import os
from collections import Counter
from pathlib import Path

import pytest

from cases import cases
from headwise.errors import DataError
from headwise.texts.labeled_texts import Layout, find_layout, read_labeled

PUBLISHED = Path(os.environ.get("HEADWISE_DATA", "")) / "classification"
needs_published_data = pytest.mark.skipif(
    "HEADWISE_DATA" not in os.environ, reason="HEADWISE_DATA names no folder with the published files"
)


def pairs(path: Path) -> list[tuple[str, str]]:
    return [(one.label, one.text) for one in read_labeled(Layout("all"), {"all": path})["all"]]


def file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@needs_published_data
@pytest.mark.parametrize(
    ("name", "lines", "labels"),
    [
        ("cr", {"all": 3_775}, {"0": 1_368, "1": 2_407}),
        ("mpqa", {"all": 10_606}, {"0": 7_294, "1": 3_312}),
        ("subj", {"all": 10_000}, {"0": 5_000, "1": 5_000}),
        ("mr", {"all": 10_662}, {"0": 5_331, "1": 5_331}),
        ("trec", {"train": 5_452, "test": 500}, {"0": 1162, "1": 1250, "2": 86, "3": 1223, "4": 835, "5": 896}),
        ("sst2", {"train_phrases": 67_349, "dev": 872, "test": 1_821}, {"0": 29_780, "1": 37_569}),
    ],
)
def test_the_published_sets_are_read_whole(name, lines, labels):
    layout, paths = find_layout(PUBLISHED / name)
    read = read_labeled(layout, paths)
    assert {file: len(found) for file, found in read.items()} == lines
    assert Counter(one.label for one in read[layout.train]) == labels


@cases("name", ["a.csv", "a.tsv"])
def test_a_text_may_be_longer_than_pythons_reader_of_tables_takes(tmp_path, name):
    """Python's reader of tables refuses a field of more than 131,072 characters."""
    text, mark = "word " * 100_000, "," if name == "a.csv" else "\t"
    before = csv.field_size_limit()
    path = file(tmp_path, name, f'good{mark}"{text}"\nbad{mark}x\ngood{mark}y\n')
    assert len(pairs(path)[0][1]) >= len(text) - 1
    assert csv.field_size_limit() == before


@pytest.mark.full
def test_a_quote_that_is_not_closed_is_named_where_it_opens(tmp_path):
    path = file(tmp_path, "a.csv", "good,a\nbad,b\n" + 'good,"c\n' + "more\n" * 4_000_000)
    with pytest.raises(DataError, match=r"a\.csv, line 3: .*larger than field limit .*; close each quote"):
        pairs(path)


@needs_published_data
def test_a_folder_above_the_sets_is_refused_with_one_that_would_do():
    with pytest.raises(DataError, match=r"holds no set of texts; .* There are such files in .*classification/cr"):
        find_layout(PUBLISHED)


@cases(
    ("name", "content"),
    [
        ("a.tsv", 'good\tfine , thanks .\nbad\tno "good" .\ngood\tsaid ""\n'),
        ("a.tsv", '\ufefflabel\ttext\ngood\tfine  , thanks .\nbad\tno "good" .\ngood\tsaid ""\n'),
        ("a.txt", 'fine , thanks .\tgood\r\nno "good" .\tbad\r\n\r\nsaid ""\tgood\r\n'),
        ("a.csv", 'text,label\n"fine , thanks .",good\n"no ""good"" .",bad\n"said """"",good\n'),
        ("a.csv", 'id,Review,SENTIMENT\n1,"fine\n, thanks .",good\n2,"no ""good"" .",bad\n3,"said """"",good\n'),
        ("a.tsv", 'good\tfine , thanks .\nbad\t"no ""good"" ."\ngood\tsaid ""\n'),
    ],
)
@cases("packed", [False, True])
def test_a_file_may_have_its_columns_in_any_order_with_a_header_or_without_and_quotes(tmp_path, name, content, packed):
    raw = content.encode()
    path = file(tmp_path, name + ".gz" * packed, gzip.compress(raw) if packed else raw)
    assert pairs(path) == [("good", "fine , thanks ."), ("bad", 'no "good" .'), ("good", 'said ""')]


@cases(
    ("name", "content", "message"),
    [
        ("a.tsv", "a\tx y\nb\tz\tq\na\tw\n", r"a\.tsv, line 2: 3 fields; expected 2 as in the first line"),
        ("a.tsv", "a\tx y\nb\n", r"a\.tsv, line 2: 1 field; expected 2"),
        ("a.tsv", "a b c\nb d\n", r"line 1: 1 field; expected 2, a label and a text, or a header that names them"),
        (
            "a.tsv",
            "a\tx y\n\tz\nb\tw\na\tv\nb\tu\nb\tt\n",
            r"a\.tsv, line 2: the label is empty; fill it in or drop the line",
        ),
        ("a.tsv", "a\tx y\na\tz\n", r"one label in 2 lines; expected at least two"),
        (
            "a.tsv",
            "a\tx\nb\ty\nc\tz\n",
            r"3 and 3 different values .* put a first line that names them: label and text",
        ),
        (
            "a.tsv",
            "rating\tbody\n" + "".join(f"{'ab'[number % 2]}\tx {number}\n" for number in range(12)),
            r"a\.tsv, line 1: the label 'rating' is that of no other line; if the line names the columns",
        ),
        ("a.csv", 'label,text\na,"x\nb,y\n', r"a\.csv, line 2: not comma-separated as quotes want it"),
        ("a.csv", 'label,text\na,"x\ny"\nb,z,q\n', r"a\.csv, line 4: 3 fields; expected 2"),
        ("a.json", '[{"label": 1}]', r"a\.json, line 1: expected a JSON object in each line, as pandas writes them"),
        ("a.json", '{"label": 1', r"a\.json, line 1: expected a JSON object in each line, .* \(.*delimiter"),
        ("a.json", '{"label": 1}', r"a\.json: none of its columns label is known to hold texts; name it"),
        ("a.csv", "label;text\na;x\nb;y;z\n", r"a\.csv, line 3: 3 fields; expected 2 as in the first line"),
        ("a.csv", "Klasse;Kommentar\na;x\nb;y;z\n", r"a\.csv, line 3: 3 fields; expected 2 as in the first line"),
        ("a.txt", "label:text\na:x\nb:y\n", r"line 1: 1 field; .* state what separates the columns by a first line"),
        (
            "a.csv",
            "0,5;x\n1,5;y\n0,5;z\n",
            r"a\.csv: both comma and semicolon give all lines as many fields; state what separates the columns by a",
        ),
        ("a.tsv", "", r"has no lines"),
        ("a.tsv", "label\ttext\n", r"has a header and no lines"),
        ("a.tsv", b"a\tx\nb\t\xff\n", r"a\.tsv, line 2: not UTF-8"),
    ],
)
def test_what_does_not_fit_is_refused_by_file_and_line(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        pairs(file(tmp_path, name, content))


def test_the_files_of_a_folder_say_which_split_is_which(tmp_path):
    for name in ("train.csv", "test.tsv.gz"):
        file(tmp_path, name, "")
    layout, paths = find_layout(tmp_path)
    assert (layout.train, layout.dev, layout.test) == ("train", None, "test")
    assert {name: path.name for name, path in paths.items()} == {"train": "train.csv", "test": "test.tsv.gz"}
    file(tmp_path, "dev.tsv", "")
    assert find_layout(tmp_path)[0].dev == "dev"
    file(tmp_path, "train.tsv", "")
    with pytest.raises(DataError, match=r"holds train\.tsv and train\.csv; expected one of them"):
        find_layout(tmp_path)


def test_the_training_file_says_which_column_holds_labels(tmp_path):
    train = file(tmp_path, "train.tsv", "x y\tgood\nz\tbad\nw\tgood\n")
    test = file(tmp_path, "test.csv", "label,text\nbad,v\n")
    dev = file(tmp_path, "dev.tsv", "one\tgood\n")
    read = read_labeled(Layout("train", "dev", "test"), {"train": train, "dev": dev, "test": test})
    assert [(one.label, one.text, one.line) for one in read["dev"]] == [("good", "one", 1)]
    assert [(one.label, one.text, one.line) for one in read["test"]] == [("bad", "v", 2)]


def test_a_place_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist; expected a file of labels and texts, or a folder"):
        find_layout(tmp_path / "nowhere")


@cases(
    ("name", "content", "stated", "expected"),
    [
        ("a.csv", "0,5;x\n1,5;y\n0,5;z\n", "sep=;", [("0,5", "x"), ("1,5", "y"), ("0,5", "z")]),
        ("a.txt", "label:text\na:x\nb:y\n", "sep=:", [("a", "x"), ("b", "y")]),
        ("a.TXT.GZ", "label~text\na~x\nb~y\n", "sep=~", [("a", "x"), ("b", "y")]),
    ],
)
def test_a_first_line_states_what_separates_columns_where_it_cannot_be_told(tmp_path, name, content, stated, expected):
    raw = f"{stated}\n{content}".encode()
    assert pairs(file(tmp_path, name, gzip.compress(raw) if name.endswith("GZ") else raw)) == expected
