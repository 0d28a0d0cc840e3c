"""One table of texts, in every form that programs export it in, is the same examples to every reader."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from cases import cases
from headwise.errors import DataError
from headwise.texts.batching import read_sentences
from headwise.texts.labeled_texts import Layout, read_labeled
from headwise.texts.tables import Columns
from headwise_lab.data.probing_files import read_probing
from headwise_lab.tasks.glue.files import read_split
from headwise_lab.texts.sets import read_set

TEXTS = [
    "fine, thanks",
    "no; never | at all",
    'said "so", twice',
    '"quoted" first; and "last"',
    'all "" of it',
    "naïve 数据 😀",
    "plain",
    "5 inches",
    "x" * 140_000,
]
BROKEN = ("in\nthree, perhaps\nlines", "with a\ttab")
# Each reader: the header it knows, where the text and its label are in a row, and what it makes of a file.
Rows = Sequence[Sequence[str]]
Read = Callable[[Path], list[tuple[str, ...]]]


def labeled(path: Path) -> list[tuple[str, ...]]:
    return [(one.text, one.label) for one in read_labeled(Layout("all"), {"all": path})["all"]]


def examples(path: Path) -> list[tuple[str, ...]]:
    return [(*one.texts, one.label) for one in read_set(path).splits["all"]]


def probed(path: Path) -> list[tuple[str, ...]]:
    return [(one.text, one.label) for one in read_probing(path)["te"]]


def fine_tuned(path: Path) -> list[tuple[str, ...]]:
    folder = path.parent / "RTE"
    folder.mkdir(exist_ok=True)
    place = folder / ("train.tsv.gz" if path.suffix == ".gz" else "train.tsv")
    path.rename(place)
    found = [(*one.texts, one.label) for one in read_split(folder, "train")[0]]
    place.unlink()
    return found


def texts(path: Path) -> list[tuple[str, ...]]:
    return [(text,) for text in read_sentences(path)]


READERS: dict[str, tuple[Read, list[str], Callable[[str, str], list[str]], Callable[[str, str], tuple[str, ...]]]] = {
    "labeled": (labeled, ["Text", "Label"], lambda text, label: [text, label], lambda text, label: (text, label)),
    "without a header": (labeled, [], lambda text, label: [label, text], lambda text, label: (text, label)),
    "more columns": (
        labeled,
        ["id", "label", "title", "review"],
        lambda text, label: ["7", label, "a, b", text],
        lambda text, label: (text, label),
    ),
    "texts": (texts, ["label", "text"], lambda text, label: [label, text], lambda text, _label: (text,)),
    "sentence": (examples, ["text", "label"], lambda text, label: [text, label], lambda text, label: (text, label)),
    "pairs": (
        examples,
        ["gold_label", "sentence1", "sentence2"],
        lambda text, label: [label, text, f"not {text}"],
        lambda text, label: (text, f"not {text}", label),
    ),
    "pairs without a header": (
        examples,
        [],
        lambda text, label: [label, text, f"not {text}"],
        lambda text, label: (text, f"not {text}", label),
    ),
    "probing": (probed, [], lambda text, label: ["te", label, text], lambda text, label: (text, label)),
    "glue": (
        fine_tuned,
        ["index", "sentence1", "sentence2", "label"],
        lambda text, label: ["3", text, f"not {text}", label],
        lambda text, label: (text, f"not {text}", label),
    ),
}
LABELS = ("entailment", "not_entailment")


def delimited(rows: Rows, mark: str, quoting: int, end: str) -> str:
    stream = io.StringIO(newline="")
    csv.writer(stream, delimiter=mark, quoting=quoting, lineterminator="\n").writerows(rows)
    return stream.getvalue().replace("\n", end)


def exports(rows: Rows, plain: Rows, *, headed: bool) -> Iterator[tuple[str, Rows, bytes]]:
    """Yield names, rows and contents: comma, semicolon, tab and bar, however quoted and ended, and JSON Lines."""
    forms = itertools.product((",", ";", "\t", "|"), (csv.QUOTE_MINIMAL, csv.QUOTE_ALL), ("\n", "\r\n", "\r"))
    for number, (mark, quoting, end) in enumerate(forms):
        content = delimited(rows, mark, quoting, end)
        # each mark with each suffix, and the other traits of files in turn
        for place, suffix in enumerate((".csv", ".tsv", ".txt")):
            turn = number + place
            text = content.removesuffix(end) if turn % 2 else content
            text = ("\ufeff" if turn % 3 else "") + (f"sep={mark}{end}" if turn % 5 == 0 else "") + text
            raw = text.encode()
            yield f"a{suffix}{'.gz' * (turn % 2)}", rows, gzip.compress(raw) if turn % 2 else raw
    # quotes that are text, as in the published files
    yield "a.tsv", plain, "".join("\t".join(row) + "\n" for row in plain).encode()
    if headed:
        objects = (json.dumps(dict(zip(rows[0], row, strict=True))) + "\n\n" for row in rows[1:])
        yield "a.jsonl", rows, "".join(objects).encode()


@cases("name", READERS)
def test_every_export_of_a_table_is_the_same_examples_to_every_reader(name: str, tmp_path: Path):
    read, header, write, expect = READERS[name]
    made = [(text, LABELS[number % 2]) for number, text in enumerate([*TEXTS, *BROKEN, "", *TEXTS[:2]])]
    head = [header] if header else []
    plain = [*head, *(write(*one) for one in made if one[0] not in BROKEN)]
    for file, rows, raw in exports(
        [*head, *(write(*one) for one in made)], plain, headed=bool(header) and name != "glue"
    ):
        path = tmp_path / file
        path.write_bytes(raw)
        kept = [one for one in made if one[0] not in BROKEN or rows is not plain]
        if name in ("texts", "glue"):
            kept = [one for one in kept if one[0]]
        normal = [tuple(" ".join(field.split()) for field in expect(*one)) for one in kept]
        assert read(path) == normal, (file, raw[:80])


JOINED = (
    (["0", "1.0", "0.0", "01", "1"], ["0", "1", "0", "1", "1"]),
    (["0.0", "1.0", "0.0", "1.0", "1.0"], ["0.0", "1.0", "0.0", "1.0", "1.0"]),
    (["0", "1.0", "0.0", "x", "1"], ["0", "1.0", "0.0", "x", "1"]),
    (["9" * 20, "1" * 20, "9" * 19 + "8", "1", "1"], ["9" * 20, "1" * 20, "9" * 19 + "8", "1", "1"]),
)


@cases("name", sorted(READERS.keys() - {"texts", "glue", "without a header"}))
@cases(("labels", "read_as"), JOINED)
def test_labels_that_are_equal_as_numbers_are_one_where_all_are_numbers(
    name: str, labels: list[str], read_as: list[str], tmp_path: Path
):
    read, header, arrange, _ = READERS[name]
    rows = [arrange(f"text {'abcde'[place]}", label) for place, label in enumerate(labels)]
    path = tmp_path / "a.tsv"
    path.write_text("".join("\t".join(row) + "\n" for row in ([header] if header else []) + rows))
    assert [example[-1] for example in read(path)] == read_as


def test_labels_that_are_equal_as_numbers_are_one_in_all_files_of_a_folder(tmp_path: Path):
    for split, one in (("train", "1"), ("test", "1.0")):
        (tmp_path / f"{split}.csv").write_text(f"label,text\n0,a\n{one},b\n{one},c\n")
        (tmp_path / "pairs").mkdir(exist_ok=True)
        pairs = f"label,premise,hypothesis\n0,a,x\n{one},b,y\n{one},c,z\n"
        (tmp_path / "pairs" / f"{split}.csv").write_text(pairs)
    for folder in (tmp_path, tmp_path / "pairs"):
        splits = read_set(folder).splits
        assert [[one.label for one in splits[name]] for name in ("train", "test")] == [["0", "1", "1"]] * 2


def test_two_keys_that_are_one_when_joined_are_told(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"data": {"body": "inside"}, "data.body": "beside"}\n')
    with pytest.raises(DataError, match=r"line 1: .*two keys are 'data\.body'"):
        read_sentences(path, Columns(("data.body",)))


def test_columns_are_those_that_are_named(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    rows = [{"id": n, "data": {"body": f"text {n}", "tags": ["x"], "of": {"good": n % 2 == 0}}} for n in range(9)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    read = read_labeled(Layout("all"), {"all": path}, Columns(("data.body",), "data.of.good"))["all"]
    assert [(one.text, one.label) for one in read[:2]] == [("text 0", "true"), ("text 1", "false")]
    path = tmp_path / "a.csv"
    path.write_text("Klasse;Kommentar;Antwort;Antwort\n" + "".join(f"{n % 2};eins, {n};zwei;drei\n" for n in range(9)))
    found = read_set(path, Columns(("Kommentar",), "klasse")).splits["all"]
    assert (found[1].label, found[1].texts) == ("1", ("eins, 1",))
    assert read_sentences(path, Columns(("Kommentar",)))[:2] == ["eins, 0", "eins, 1"]
    pairs = Columns(("Kommentar", "Klasse"), "Kommentar")
    assert read_set(path, pairs).splits["all"][1].texts == ("eins, 1", "1")
    for columns, message in (
        (Columns(("body",)), r"no column 'body'; its columns are Klasse, Kommentar, Antwort, Antwort\."),
        (Columns(("Antwort",), "Klasse"), "several columns 'Antwort'; its columns are"),
        (Columns(("Kommentar",)), r"none of its columns .* is known to hold labels; name it: --label-column"),
        (Columns((), "Klasse"), r"none of its columns .* is known to hold texts; name it: --text-column"),
    ):
        for reader in (partial(read_labeled, Layout("all"), {"all": path}, columns), partial(read_set, path, columns)):
            with pytest.raises(DataError, match=rf"a\.csv.* {message}"):
                reader()


@cases("suffix", [".csv", ".tsv", ".txt", ".jsonl", ""])
@cases(
    ("raw", "message"),
    [
        ("a\tb\nc\td\n".encode("utf-16"), "is not UTF-8 but UTF-16, as Excel's"),
        ("a\tb\nc\td\n".encode("utf-16-le"), "line 1: a NUL byte, which no text has"),
        (gzip.compress(b"a\tb\n", mtime=0), r"is packed by gzip; add \.gz to its name"),
        (b"PK\x03\x04\x14\x00", r"is an archive \(\.zip\), perhaps a spreadsheet"),
        (b"PAR1\x15", "is Parquet; write it as JSON Lines or CSV"),
        ("grün\tb\n".encode("latin-1"), "line 1: not UTF-8"),
        (b"", "has no lines|holds no text"),
    ],
)
def test_what_is_no_table_is_named_for_what_it_is(raw: bytes, message: str, suffix: str, tmp_path: Path):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(raw)
    for read in (labeled, examples, texts):
        with pytest.raises(DataError, match=rf"/a{suffix}.* ({message})"):
            read(path)


def test_lines_of_a_text_are_no_columns_whatever_they_all_hold(tmp_path: Path):
    lines = ["Well, he said; it is | so", "No, thanks; not | me", '"Yes, of course; or | not"']
    path = tmp_path / "a.txt"
    path.write_text("\n".join(lines))
    assert texts(path) == [(line,) for line in lines]
    path.write_text("\n".join([*lines, "a\ttab"]))
    assert texts(path) == [(line,) for line in [*lines, "a\ttab"]]
