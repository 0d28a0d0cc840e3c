"""The readers of parallel text, and finding the files of a corpus: what they take and what they refuse."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
from pathlib import Path

import pytest

from cases import cases
from fuzz.mutate import read_in_time
from headwise.errors import DataError, SettingError
from headwise_lab.tasks.translation.corpora import (
    CORPORA,
    Cleaning,
    Corpus,
    Layout,
    Part,
    Sieve,
    fetch_corpus,
    find_files,
)
from headwise_lab.tasks.translation.files import Line, make_custom_corpus, make_folder_corpus, read_pairs, read_side
from lab.tasks.translation.translation_text import write, write_corpus

PUBLISHED = Path(os.environ.get("HEADWISE_DATA", "")) / "mt"
needs_published_data = pytest.mark.skipif(
    "HEADWISE_DATA" not in os.environ, reason="HEADWISE_DATA names no folder with the published files"
)


def texts(path):
    return [line.text for line in read_side(path)]


@cases("packed", [False, True])
def test_plain_lines_are_read_whatever_their_ends_and_strange_separators(tmp_path, packed):
    content = "\ufeff eins \r\n\nzwei\u2028drei\x0b\x1cvier\r\n  fünf".encode()
    path = tmp_path / ("text.de.gz" if packed else "text.de")
    path.write_bytes(gzip.compress(content) if packed else content)
    assert list(read_side(path)) == [
        Line(1, "eins"),
        Line(2, ""),
        Line(3, "zwei\u2028drei\x0b\x1cvier"),
        Line(4, "fünf"),
    ]


def test_segments_are_read_with_their_ids_and_characters(tmp_path):
    write(
        tmp_path / "dev.de.xml.gz",
        [
            '<?xml version="1.0" encoding="UTF-8"?>',
            "<title>Kein Text</title>",
            '<seg id="1"> Sie &amp; er: AT&T &lt;3 &#x201e;&#228;&quot; &copy &#xD800; </seg>',
            '<hl><SEG type="x" id="2a">zwei</SEG></hl>',
            '<seg id="3"></seg>',
        ],
    )
    assert list(read_side(tmp_path / "dev.de.xml.gz")) == [
        Line(3, 'Sie & er: AT&T <3 \u201eä" &copy &#xD800;', "1"),
        Line(4, "zwei", "2a"),
        Line(5, "", "3"),
    ]
    write(tmp_path / "dev.sgm", ['<seg id="1">whole</seg>', '<seg id="2">in two', "lines</seg>"])
    with pytest.raises(DataError, match=r"dev\.sgm, line 2: expected <seg id"):
        texts(tmp_path / "dev.sgm")


@cases("part", ['<seg id="', "<seg ", '<seg id="1">', " id=", '<seg id="1" '])
def test_a_broken_segment_of_any_length_is_refused_in_time(part, tmp_path):
    """A line of 200 kB took over a minute."""
    write(tmp_path / "a.sgm", ['<seg id="1">one</seg>', "<seg" + part * (200_000 // len(part))])

    def refused():
        with pytest.raises(DataError, match=r'a\.sgm, line 2: expected <seg id="\.\.\."> text </seg> on one line'):
            texts(tmp_path / "a.sgm")

    read_in_time(refused)


def test_each_of_several_segments_in_a_line_is_read(tmp_path):
    write(tmp_path / "a.xml", ['<p><seg id="1">one</seg> <seg id="2"> 2 < 3 </SEG></p>', "<segment>"])
    with pytest.raises(DataError, match="line 2"):
        texts(tmp_path / "a.xml")
    write(tmp_path / "a.xml", ['<p><seg id="1">one</seg> <seg id="2"> 2 < 3 </SEG></p>', "</doc>"])
    assert list(read_side(tmp_path / "a.xml")) == [Line(1, "one", "1"), Line(1, "2 < 3", "2")]
    inside = '<seg id="1">one<seg id="2">two</seg></seg>'
    for broken in (inside, "</seg>", "<seg>one</seg>", '<seg id="1">one</seg><seg'):
        write(tmp_path / "a.xml", [broken])
        with pytest.raises(DataError, match="line 1: expected <seg id"):
            texts(tmp_path / "a.xml")


def test_tagged_talks_keep_title_and_description_and_drop_what_nobody_said(tmp_path):
    tagged = ["<url>http://x</url>", "<keywords>a, b</keywords>", "<speaker>Wade</speaker>", "<talkid>69</talkid>"]
    text = ["<title>Der Titel</title>", "<description>Worum es geht.</description>", " <i>Wissen</i> Sie, 1 < 2. "]
    write(tmp_path / "train.tags.de-en.de", [*tagged, *text, '<reviewer href="y">Z</reviewer>', "</transcript>"])
    assert texts(tmp_path / "train.tags.de-en.de") == [
        "Der Titel",
        "Worum es geht.",
        "<i>Wissen</i> Sie, 1 < 2.",
        "</transcript>",
    ]


@cases(("left", "right"), [(3, 5), (5, 3), (0, 1)])
def test_files_of_unequal_length_are_refused_with_both_numbers(tmp_path, left, right):
    write(tmp_path / "a.de", ["x"] * left)
    write(tmp_path / "a.en", ["y"] * right)
    with pytest.raises(DataError, match=rf"a\.de has {left} lines of text and \S+a\.en has {right}; expected as many"):
        list(read_pairs(tmp_path / "a.de", tmp_path / "a.en"))


def test_segments_of_another_order_are_refused(tmp_path):
    write(tmp_path / "a.de.sgm", ['<seg id="1">x</seg>', '<seg id="2">y</seg>'])
    write(tmp_path / "a.en.sgm", ["<doc>", '<seg id="1">x</seg>', '<seg id="3">y</seg>'])
    with pytest.raises(DataError, match=r"line 2 is segment '2' but \S+, line 3 is segment '3'"):
        list(read_pairs(tmp_path / "a.de.sgm", tmp_path / "a.en.sgm"))


@cases("name", ["a.de", "a.de.sgm", "train.tags.de-en.de"])
def test_text_that_is_not_utf_8_is_refused_at_its_line(tmp_path, name):
    (tmp_path / name).write_bytes(b'<seg id="1">a</seg>\n<seg id="2">gr\xfcn</seg>\n')
    with pytest.raises(DataError, match=rf"{re.escape(name)}, line 2: not UTF-8"):
        texts(tmp_path / name)


def test_each_rule_drops_what_it_names_and_the_first_reason_counts():
    sieve = Sieve(Cleaning(longest=10, ratio=2.5, once=True))
    pairs = [
        ("a", "b", 4, 10),
        ("a", "b", 4, 10),
        ("a", "c", 4, 10),
        ("a", "d", 11, 1),
        ("", "", 0, 0),
        ("e", "f", 3, 8),
    ]
    assert [sieve.keeps(*pair) for pair in pairs] == [True, False, True, False, False, False]
    assert (sieve.read, dict(sieve.dropped)) == (6, {"repeated": 1, "too long": 1, "blank": 1, "ratio": 1})
    assert Sieve(Cleaning(longest=10)).keeps("a", "b", 1, 10)
    for setting, message in (({"longest": 0}, "longest is 0"), ({"ratio": 0.5}, r"ratio is 0\.5")):
        with pytest.raises(SettingError, match=message):
            Cleaning(**setting)


@pytest.mark.full
@needs_published_data
@cases(
    ("name", "folder", "layout", "pairs"),
    [
        ("multi30k", "multi30k", "official", {"train": 29_000, "dev": 1_014, "test": 1_000, "test_2017_mscoco": 461}),
        ("iwslt14", "iwslt14.de-en", "partial", {"train": 40_523, "dev": 6_969, "test": 6_750}),
        ("wmt14", "wmt.en-de", "partial", {"train": 20_000, "dev": 3_000, "test": 1_000}),
        ("wmt16", "wmt.en-de", "partial", {"train": 20_000, "dev": 3_000, "test": 1_000}),
    ],
)
def test_the_published_files_are_found_and_hold_as_many_pairs_as_they_say(name, folder, layout, pairs):
    found, files = find_files(CORPORA[name], PUBLISHED / folder)
    assert found.name == layout
    assert {split: sum(1 for p in files[split] for _ in read_pairs(*p)) for split in pairs} == pairs


@needs_published_data
def test_the_official_segments_are_the_published_test_set_line_for_line():
    folder = PUBLISHED / "iwslt14.de-en"
    test = CORPORA["iwslt14"].layouts[0].test
    raw = [line for part in test for line in texts(folder / f"{part.target}.gz")]
    assert len(raw) == 6_750
    prepared = texts(folder / "test.en")

    def letters(text):
        return re.sub(r"[^a-z]", "", re.sub(r"&\w+;", "", text.lower()))

    agreeing = sum(letters(first) == letters(second) for first, second in zip(raw, prepared, strict=True))
    # a handful were edited on one side
    assert agreeing > 6_700


@needs_published_data
def test_the_recipes_of_multi30k_have_the_checksums_of_the_published_files():
    for download in CORPORA["multi30k"].downloads:
        content = (PUBLISHED / "multi30k" / download.name).read_bytes()
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (download.sha256, download.size)


@cases("name", ["multi30k", "wmt14", "wmt16", "wmt17"])
def test_recipes_fetch_exactly_the_files_of_the_first_layout(tmp_path, name):
    corpus = CORPORA[name]
    for download in corpus.downloads:
        for kept in [kept for _, kept in download.members] or [download.name]:
            write(tmp_path / kept, ["text"])
    layout, files = find_files(corpus, tmp_path)
    assert layout is corpus.layouts[0]
    used = {path for pairs in files.values() for pair in pairs for path in pair}
    assert used == set(tmp_path.iterdir())
    # what is there is not fetched again: nothing here asks the network
    if name != "multi30k":
        fetch_corpus(corpus, tmp_path)


def test_chinese_and_english_books_stay_paired():
    train = CORPORA["wmt17"].layouts[0].train
    assert len(train) == 2 + sum(len(download.members) for download in CORPORA["wmt17"].downloads[2:-1]) / 2
    for part in train[2:]:
        assert re.sub("_(ch|cn)[.]", "_en.", part.source) == part.target
    assert Part("datum2017/Book12_cn.txt", "datum2017/Book12_en.txt") in train


def test_a_corpus_without_a_recipe_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"^iwslt14: IWSLT14 has no published checksum.*de-en\.tgz yourself"):
        fetch_corpus(CORPORA["iwslt14"], tmp_path)
    with pytest.raises(DataError, match=r"lacks train\.tags\.de-en\.de, .* \(layout official\); or .*yourself"):
        find_files(CORPORA["iwslt14"], tmp_path)


TWO = Corpus(
    "two",
    "de",
    "en",
    (
        Layout("whole", (Part("deep/a.de", "deep/a.en"), Part("b.de", "b.en")), (Part("d.de", "d.en"),)),
        Layout("part", (Part("a.de", "a.en"),), further=(("more", (Part("m.de", "m.en"),)),)),
    ),
)


def test_the_first_complete_layout_is_taken_with_what_else_is_there(tmp_path):
    for name in ("a.de", "a.en.gz", "m.de", "m.en"):
        write(tmp_path / name, ["x"])
    write(tmp_path / "d.de", ["x"])
    with pytest.raises(DataError, match=r"some files of the train split \(two, layout whole\) but lacks b.de, b.en"):
        find_files(TWO, tmp_path)
    for name in ("b.de", "b.en"):
        write(tmp_path / name, ["x"])
    with pytest.raises(DataError, match=r"some files of the dev split .* lacks d\.en"):
        find_files(TWO, tmp_path)
    write(tmp_path / "d.en", ["x"])
    layout, files = find_files(TWO, tmp_path)
    assert layout.name == "whole"
    assert files["train"] == ((tmp_path / "a.de", tmp_path / "a.en.gz"), (tmp_path / "b.de", tmp_path / "b.en"))
    only = Corpus("only", "de", "en", TWO.layouts[1:])
    assert set(find_files(only, tmp_path)[1]) == {"train", "more"}
    for side in ("de", "en"):
        (tmp_path / f"m.{side}").unlink()
    assert set(find_files(only, tmp_path)[1]) == {"train"}
    write(tmp_path / "deep" / "a.de", ["x"])
    with pytest.raises(DataError, match=r"deep/a\.de and \S+a\.de are both there"):
        find_files(TWO, tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist; expected a folder with the files of multi30k"):
        find_files(CORPORA["multi30k"], tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        find_files(CORPORA["multi30k"], tmp_path / "file")


def test_an_own_folder_is_described_by_what_is_there(tmp_path):
    folder = write_corpus(tmp_path / "own")
    whole = make_folder_corpus(folder, "de", "en")
    assert (whole.source_language, whole.target_language) == ("de", "en")
    assert whole.layouts[0] == Layout(
        "own", (Part("train.de", "train.en"),), (Part("dev.de", "dev.en"),), (Part("test.de", "test.en"),)
    )
    for side in ("de", "en"):
        (folder / f"dev.{side}").rename(folder / f"valid.{side}")
        (folder / f"test.{side}").unlink()
    assert make_folder_corpus(folder, "en", "de").layouts[0] == Layout(
        "own", (Part("train.en", "train.de"),), (Part("valid.en", "valid.de"),)
    )
    write(folder / "test.en", ["x"])
    with pytest.raises(DataError, match=r"has test\.en but no test\.de"):
        make_folder_corpus(folder, "de", "en")
    write_corpus(folder)
    with pytest.raises(DataError, match=r"both dev\.de and valid\.de"):
        make_folder_corpus(folder, "de", "en")
    with pytest.raises(DataError, match=r"lacks train\.fr and train\.it"):
        make_folder_corpus(folder, "fr", "it")
    with pytest.raises(SettingError, match="both 'de'"):
        make_folder_corpus(folder, "de", "de")


def test_own_files_may_lie_anywhere(tmp_path):
    for name in ("x/my.de", "y/my.en.gz"):
        write(tmp_path / name, ["text"])
    corpus = make_custom_corpus(Part(str(tmp_path / "x" / "my.de"), str(tmp_path / "y" / "my.en")), "de", "en")
    _, files = find_files(corpus, tmp_path)
    assert files == {"train": ((tmp_path / "x/my.de", tmp_path / "y/my.en.gz"),)}
