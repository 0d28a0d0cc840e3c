"""Tables of texts in every form that programs export them in: what each reader takes, leaves out and refuses."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from cases import cases, thin, tiers
from headwise.errors import DataError
from headwise.texts.batching import read_sentences
from headwise.texts.labeled_texts import Layout, describe_blank, find_layout, read_labeled
from headwise.texts.tables import Columns
from headwise_lab.data.probing_files import read_probing
from headwise_lab.tasks.classification.probing import load_probing
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.tasks.classification.task import load_data
from headwise_lab.tasks.glue.files import read_split
from headwise_lab.tasks.lm.scales import LM_SCALES
from headwise_lab.tasks.lm.task import LmTask
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES
from headwise_lab.tasks.sentence.task import load_sentences
from headwise_lab.texts.sets import read_set
from lab.published import DATA, needs
from lab.tasks.sentence.sentence_sets import sentence

PUBLISHED = DATA / "classification"


def pairs(path: Path) -> list[tuple[str, str]]:
    return [(one.label, one.text) for one in read_labeled(Layout("all"), {"all": path})["all"]]


def file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@needs("classification")
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


@pytest.mark.slow
def test_a_quote_that_is_not_closed_is_named_where_it_opens(tmp_path):
    path = file(tmp_path, "a.csv", "good,a\nbad,b\n" + 'good,"c\n' + "more\n" * 4_000_000)
    with pytest.raises(DataError, match=r"a\.csv, line 3: .*larger than field limit .*; close each quote"):
        pairs(path)


@needs("classification")
def test_a_folder_above_the_sets_is_refused_with_one_that_would_do():
    with pytest.raises(DataError, match=r"holds no set of texts; .* There are such files in .*classification/cr"):
        find_layout(PUBLISHED)


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
    "text first": (labeled, [], lambda text, label: [text, label], lambda text, label: (text, label)),
    "more columns": (
        labeled,
        ["id", "LABEL", "title", "Review"],
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


@tiers("name", *thin(READERS, 4))
def test_every_export_of_a_table_is_the_same_examples_to_every_reader(name: str, tmp_path: Path):
    read, header, write, expect = READERS[name]
    limit = csv.field_size_limit()
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
    assert csv.field_size_limit() == limit, "Python's reader of tables refuses longer fields"


JOINED = (
    (["0", "1.0", "0.0", "01", "1"], ["0", "1", "0", "1", "1"]),
    (["0.0", "1.0", "0.0", "1.0", "1.0"], ["0.0", "1.0", "0.0", "1.0", "1.0"]),
    (["0", "1.0", "0.0", "x", "1"], ["0", "1.0", "0.0", "x", "1"]),
    (["9" * 20, "1" * 20, "9" * 19 + "8", "1", "1"], ["9" * 20, "1" * 20, "9" * 19 + "8", "1", "1"]),
)


@cases("name", sorted(READERS.keys() - {"texts", "glue", "without a header", "text first"}))
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


CLASSIFICATION = dataclasses.replace(CLASSIFICATION_SCALES["demo"], train_examples=None)
SENTENCE = dataclasses.replace(SENTENCE_SCALES["demo"], train_examples=None)
LM = dataclasses.replace(LM_SCALES["demo"], vocabulary_size=300, length=16)
BLANK = ("", "  ", "\u3000")
ROWS = [(str(number % 2), sentence(number, str(number % 2))) for number in range(80)]
# A blank text has any label, or none.
MIXED = [*ROWS[:30], ("1", BLANK[0]), *ROWS[30:], ("0", BLANK[1]), ("", BLANK[2])]


def classified(place: Path) -> str:
    return load_data(place, CLASSIFICATION, None).summary()


def summarize_sentences(place: Path) -> str:
    return load_sentences(place, SENTENCE, None).summary()


def summarize_probes(place: Path) -> str:
    return load_probing(place, CLASSIFICATION, None).summary()


def show_examples(place: Path) -> str:
    found, left_out = read_split(place, "train")
    return f"{[one.texts for one in found]}" + (f"; {left_out} left out" if left_out else "")


def show_lines(place: Path) -> str:
    found = read_sentences(place)
    return f"{describe_blank(found)} {list(found)}"


def modeled(place: Path) -> str:
    return LmTask().load(place, LM, place.parent / "cache").summary()


def write_lines(rows: list[tuple[str, str]], line: Callable[[str, str], str]) -> str:
    return "".join(f"{line(*row)}\n" for row in rows)


def as_table(label: str, text: str) -> str:
    return f'{label},"{text}"'


def as_tabs(label: str, text: str) -> str:
    return f"{label}\t{text}"


def as_object(label: str, text: str) -> str:
    return json.dumps({"label": label or None, "text": text or None})


def as_pair(label: str, text: str) -> str:
    # either side of a pair may be blank
    return f"{label}\t{text}\tand so on" if label == "1" else f"{label}\tand so on {len(text)}\t{text}"


def as_probe(label: str, text: str) -> str:
    return f"{'tr' if len(text) % 2 else 'te'}\t{label}\t{text}"


def as_entailment(label: str, text: str) -> str:
    return f"0\t{text}\tand so on\t{'not_' * (label == '1')}entailment"


BLANK_CASES: dict[str, tuple[Callable[[Path], str], str, str, Callable[[str, str], str]]] = {
    "a table": (classified, "a.csv", "label,text\n", as_table),
    "a folder of tables": (classified, "set/all.tsv", "", as_tabs),
    "objects": (classified, "a.jsonl", "", as_object),
    "a table of texts": (summarize_sentences, "a.csv", "label,text\n", as_table),
    "a folder of texts": (summarize_sentences, "set/all.tsv", "", as_tabs),
    "objects of texts": (summarize_sentences, "a.jsonl", "", as_object),
    "pairs": (summarize_sentences, "a.tsv", "label\tpremise\thypothesis\n", as_pair),
    "probes": (summarize_probes, "a.txt", "", as_probe),
    "glue": (show_examples, "RTE/train.tsv", "index\tsentence1\tsentence2\tlabel\n", as_entailment),
    "a column of summarize_sentences": (show_lines, "a.csv", "label,text\n", as_table),
    "summarize_sentences": (show_lines, "a.txt", "", lambda _label, text: text),
    "documents": (modeled, "a.jsonl", "", as_object),
}
SAID = {
    classified: "; {} without a text left out",
    summarize_sentences: "; {} without a word left out",
    summarize_probes: "; {} without a text left out",
    show_examples: "; {} left out",
    show_lines: "Texts without a word that were left out: {}.",
    modeled: ", {} blank ones left out",
}


@cases("name", BLANK_CASES)
def test_blank_texts_are_left_out_and_counted(name: str, tmp_path: Path):
    read, file, header, line = BLANK_CASES[name]
    said = []
    for folder, rows in (("whole", ROWS), ("mixed", MIXED)):
        path = tmp_path / folder / file
        path.parent.mkdir(parents=True)
        path.write_text(header + write_lines(rows, line), encoding="utf-8")
        said.append(read(path.parent if path.parent.name in ("set", "RTE") else path))
    whole, mixed = said
    # of a file of show_lines, an end of line after another is no text
    words = SAID[read].format(2 if name == "summarize_sentences" else len(BLANK))
    assert words in mixed
    assert mixed.replace(words, "") == whole
