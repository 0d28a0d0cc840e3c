"""Parallel text: what --data may name, the readers of files, and finding the files of a corpus."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import re
import shlex
import shutil
from html import escape
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cases import cases
from fuzz.mutate import read_in_time
from headwise.cli import main
from headwise.errors import DataError, SettingError
from headwise_lab.compare import require_fits
from headwise_lab.experiment import run_folder
from headwise_lab.experiment.arm_text import parse_arm, parse_arms
from headwise_lab.experiment.settings import RunSettings
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
from headwise_lab.tasks.translation.data import prepare_translation
from headwise_lab.tasks.translation.files import (
    Line,
    find_corpus,
    make_custom_corpus,
    make_folder_corpus,
    read_pairs,
    read_side,
)
from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES
from headwise_lab.tasks.translation.task import TranslationTask
from headwise_lab.training.train import train_run
from lab.published import DATA, needs
from lab.stopping import stop_after
from lab.tasks.translation.translation_text import SOURCE_WORDS, TARGET_WORDS, lines, write, write_corpus

PUBLISHED = DATA / "mt"


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
@needs("mt")
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


@needs("mt")
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


@needs("mt")
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


SCALE = dataclasses.replace(TRANSLATION_SCALES["demo"], vocabulary_size=300, train_examples=250)


def load(place: Path | str, cache: Path, **options):
    return TranslationTask().load(Path(place), SCALE, cache, **options)


def test_a_folder_of_ones_own_is_read_in_the_direction_asked_for(tmp_path):
    folder = write_corpus(tmp_path / "my,corpus:x")
    for place, source, target in ((f"{folder}:de-en", "de", "en"), (f"{folder}:en-de", "en", "de")):
        data = load(place, tmp_path / "cache")
        assert (data.whole.source_language, data.whole.target_language) == (source, target)
        assert data.sources("test") == (folder / f"test.{source}").read_text().splitlines()
        assert data.references("dev") == (folder / f"dev.{target}").read_text().splitlines()
        title, *splits, cut = data.summary().splitlines()
        assert title.startswith(f"own, {source} to {target}, ")
        assert title.endswith(" subwords")
        assert [line.partition(" pairs")[0] for line in splits] == ["train: 300 of 300", "dev: 20", "test: 30"]
        assert cut == "scale demo takes the first 250 of train"


def test_dev_and_test_may_be_segments_and_none_is_passed_over(tmp_path):
    folder = write_corpus(tmp_path / "own")
    whole = load(f"{folder}:de-en", tmp_path / "whole")

    def write_segments(name: str, text: list[str], *, times: int = 1) -> Path:
        segments = [f'<seg id="{number}"> {escape(line)} </seg>' for number, line in enumerate(text, start=1)]
        return write(folder / name, ['<refset trglang="any">', *['<doc docid="a">', *segments, "</doc>"] * times])

    for name, ending in (("dev.de", ".sgm"), ("dev.en", ".sgm.gz"), ("test.de", ".xml"), ("test.en", ".sgm")):
        write_segments(name + ending, (folder / name).read_text().splitlines())
        (folder / name).unlink()
    data = load(f"{folder}:de-en", tmp_path / "cache")
    for split in ("dev", "test"):
        assert (data.sources(split), data.references(split)) == (whole.sources(split), whole.references(split))
    corpus, _ = find_corpus(Path(f"{folder / 'dev.de.sgm'},{folder / 'dev.en.sgm.gz'}"))
    assert (corpus.source_language, corpus.target_language) == ("de", "en")
    write_segments("test.en.sgm", whole.references("test"), times=2)
    with pytest.raises(DataError, match=r"has 30 lines .* has 60; .* Where a file holds several references, or source"):
        load(f"{folder}:de-en", tmp_path / "cache")
    (folder / "test.en.sgm").rename(folder / "newstest2014-ende-ref.en.sgm")
    with pytest.raises(DataError, match=r"own has test\.de\.xml but no test\.en"):
        load(f"{folder}:de-en", tmp_path / "cache")
    (folder / "test.de.xml").unlink()
    with pytest.raises(
        DataError, match=r"newstest2014-ende-ref\.en\.sgm and no test split, .*; call .* test\.de\.sgm and"
    ):
        load(f"{folder}:de-en", tmp_path / "cache")


def test_a_language_may_have_a_hyphen(tmp_path):
    for side in ("pt-BR", "en"):
        write(tmp_path / f"train.{side}", lines(200, 3, TARGET_WORDS))
    for direction, expected in (("pt-BR-en", ("pt-BR", "en")), ("en-pt-BR", ("en", "pt-BR"))):
        corpus, folder = find_corpus(Path(f"{tmp_path}:{direction}"))
        assert (corpus.source_language, corpus.target_language) == expected
        assert folder == tmp_path


@pytest.mark.full
@cases("packed", ["", ".gz"])
def test_two_files_are_a_corpus_whose_dev_and_test_are_cut_the_same_every_time(tmp_path, monkeypatch, packed):
    write(tmp_path / "a" / f"my.en{packed}", lines(2_000, 5, SOURCE_WORDS))
    write(tmp_path / "b" / f"my.de{packed}", lines(2_000, 5, TARGET_WORDS))
    # a file of the same name beside the other is another file
    write(tmp_path / "a" / "my.de", ["x"])
    monkeypatch.chdir(tmp_path)
    data = load("a/my.en,b/my.de", tmp_path / "cache")
    assert (data.whole.source_language, data.whole.target_language) == ("en", "de")
    title = data.summary().splitlines()[0]
    assert title.startswith("own, en to de, ")
    assert title.endswith("; dev and test cut from train")
    sizes = {name: len(split) for name, split in data.whole.splits.items()}
    assert sum(sizes.values()) == 2_000
    assert 60 < sizes["dev"] < 140
    assert 60 < sizes["test"] < 140
    longer = tmp_path / "longer"
    for name, words in (("my.en", SOURCE_WORDS), ("my.de", TARGET_WORDS)):
        write(longer / name, ["new.", *lines(2_000, 5, words), "new too."])
    again = load(f"{longer}/my.en,{longer}/my.de", tmp_path / "cache")
    # a line more or less moves no other pair out of its split, but for the size of the cut
    assert len(set(data.sources("test")) ^ set(again.sources("test"))) <= 3


def test_pairs_with_a_blank_side_are_dropped_and_in_no_split_that_is_cut(tmp_path):
    for name, words, turn in (("my.en", SOURCE_WORDS, 0), ("my.de", TARGET_WORDS, 3)):
        text = lines(2_000, 4, words)
        write(tmp_path / name, [" " if number % 7 == turn else line for number, line in enumerate(text)])
    data = load(f"{tmp_path}/my.en,{tmp_path}/my.de", tmp_path / "cache")
    sizes = {name: len(split) for name, split in data.whole.splits.items()}
    assert data.whole.record["splits"]["train"]["dropped"]["blank"] == 2 * 286
    assert sum(sizes.values()) + 2 * 286 == 2_000
    assert sizes["dev"] > 40 < sizes["test"]
    for split in ("dev", "test"):
        assert all(data.sources(split))
        assert all(data.references(split))


def test_two_files_with_one_ending_are_told_apart_by_their_names(tmp_path):
    for name in ("source.txt", "target.txt"):
        write(tmp_path / name, lines(200, 3, TARGET_WORDS))
    corpus, _ = find_corpus(Path(f"{tmp_path}/source.txt, {tmp_path}/target.txt"))
    assert (corpus.source_language, corpus.target_language) == ("source.txt", "target.txt")


def test_what_names_no_corpus_is_refused_with_what_would(tmp_path):
    folder = write_corpus(tmp_path / "own")
    one, other = folder / "train.de", folder / "train.en"

    def refused(place: Path | str) -> str:
        with pytest.raises((DataError, SettingError)) as refusal:
            load(place, tmp_path / "cache")
        assert not (tmp_path / "cache").exists()
        return str(refusal.value)

    assert f"say which is translated into which: {folder}:de-en or {folder}:en-de." in refused(folder)
    assert "nowhere does not exist; expected a folder with the files of multi30k, iwslt14" in refused("nowhere")
    assert "nowhere does not exist; expected" in refused("nowhere:en-de")
    assert f"{one} is a file; expected a folder" in refused(one)
    assert "has train.de but no train.fr" in refused(f"{folder}:fr-de")
    assert "lacks train.fr and train.it" in refused(f"{folder}:fr-it")
    assert "both 'de'" in refused(f"{folder}:de-de")
    for bad in ("de", "", "de-", "-de", "de--en"):
        assert "is no direction; expected source-target, such as" in refused(f"{folder}:{bad}")
    assert f"{one},{other},{one} are 3 files, 2 of them different; expected two: source" in refused(
        f"{one},{other},{one}"
    )
    assert "are 2 files, 1 of them different" in refused(f"{one},{one}")
    assert f"{folder}/none.en does not exist; expected a text file" in refused(f"{one},{folder}/none.en")
    assert f"{folder} is a folder; expected a text file" in refused(f"{one},{folder}")
    (tmp_path / "empty").mkdir()
    assert "empty holds no corpus that is known; expected a folder with the files of multi30k" in refused(
        tmp_path / "empty"
    )


def test_what_is_wrong_in_two_files_is_named_by_file_and_line(tmp_path):
    source, target = tmp_path / "my.en", tmp_path / "my.de"
    place = f"{source},{target}"
    write(source, lines(200, 5, SOURCE_WORDS))
    write(target, lines(199, 5, TARGET_WORDS))
    with pytest.raises(DataError, match=rf"{source} has 200 lines of text and {target} has 199; expected as many"):
        load(place, tmp_path / "cache")
    text = "".join(f"{line}\n" for line in lines(200, 5, TARGET_WORDS)).encode().split(b"\n")
    target.write_bytes(b"\n".join([*text[:70], b"gr\xfcn", *text[71:]]))
    with pytest.raises(DataError, match=rf"{target}, line 71: not UTF-8 \(invalid start byte\)"):
        load(place, tmp_path / "cache")
    for path in (source, target):
        write(path, ["ein hund", "eine wiese"])
    with pytest.raises(DataError, match="the dev split, cut from 2 training pairs, holds no pair"):
        load(place, tmp_path / "cache")


@pytest.mark.full
@needs("mt")
def test_two_published_files_are_trained_on_as_they_are(tmp_path):
    for side in ("en", "de"):
        shutil.copy(PUBLISHED / "multi30k" / f"train.{side}.gz", tmp_path / f"corpus.{side}.gz")
    data = load(f"{tmp_path}/corpus.en.gz,{tmp_path}/corpus.de.gz", tmp_path / "cache")
    with gzip.open(tmp_path / "corpus.en.gz", "rt", encoding="utf-8") as stream:
        text = {line.strip() for line in stream}
    sizes = {name: len(split) for name, split in data.whole.splits.items()}
    assert sum(sizes.values()) == 29_000
    assert sizes["dev"] == pytest.approx(1_450, abs=150)
    assert sizes["test"] == pytest.approx(1_450, abs=150)
    assert set(data.whole.sources("dev")) <= text
    assert set(data.whole.sources("dev")).isdisjoint(data.whole.sources("test"))


@pytest.mark.slow
@needs("mt")
def test_published_files_under_ones_own_names_give_the_arrays_of_the_corpus(tmp_path):
    names = {"train": "train", "val": "valid", "test_2016_flickr": "test"}
    for given, own in names.items():
        for side in ("en", "de"):
            shutil.copy(PUBLISHED / "multi30k" / f"{given}.{side}.gz", tmp_path / f"{own}.{side}.gz")
    mine = load(f"{tmp_path}:en-de", tmp_path / "cache").whole
    known = load(PUBLISHED / "multi30k", tmp_path / "cache").whole
    assert (mine.record["corpus"], known.record["corpus"]) == ("own", "multi30k")
    for split in ("train", "dev", "test"):
        assert (mine.splits[split].sources.values == known.splits[split].sources.values).all()
        assert (mine.splits[split].targets.values == known.splits[split].targets.values).all()


ROOT = Path(__file__).parents[5]
GPU = TRANSLATION_SCALES["gpu"]


@pytest.mark.full
def test_the_documented_command_compares_arms_that_fit_the_model(tmp_path):
    page = (ROOT / "docs" / "translation.md").read_text(encoding="utf-8")
    command = next(
        block for block in page.split("```console\n$ ") if block.startswith("headwise compare translation --scale gpu")
    ).partition("```")[0]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["headwise", "compare", "translation"]
    arms = parse_arms(words[words.index("--arms") + 1])
    assert [arm.name for arm in arms] == [
        *("plain", "smooth", "svgd", "svgd-relative", "output"),
        *(f"{arm}:layers=0/1,kinds=self" for arm in ("trunk", "em", "output+em")),
    ]
    assert {arm.control for arm in arms} <= {None, "scaled", *(arm.name for arm in arms)}
    corpus, folder = find_corpus(Path(f"{write_corpus(tmp_path / 'own')}:de-en"))
    prepare_translation(corpus, folder, tmp_path / "prepared", vocabulary_size=GPU.vocabulary_size)
    data = TranslationTask().load(tmp_path / "prepared", GPU, None)
    for arm in arms:
        require_fits(arm, TranslationTask(), data, GPU)


@pytest.mark.full
@pytest.mark.slow
@needs("mt")
def test_the_recipe_starts_on_the_whole_of_multi30k_stops_and_goes_on_to_the_same_bits(tmp_path):
    place = tmp_path / "prepared"
    data = str(PUBLISHED / "multi30k")
    with pytest.raises(SystemExit) as ended:
        main.main(["prepare", "translation", "--data", data, "--scale", "gpu", "--out", str(place)])
    assert ended.value.code == 0
    settings = RunSettings("translation", GPU, parse_arm("svgd+output"), seed=1, data=place)

    def stopped(folder: Path, steps: int) -> Path:
        train_run(settings, folder, stop_after(steps))
        checkpoint = run_folder.latest_checkpoint(folder)
        assert not run_folder.is_finished(folder)
        return checkpoint

    whole = stopped(tmp_path / "whole", 2)
    assert stopped(tmp_path / "parts", 1).name == "checkpoint-2"
    parts = stopped(tmp_path / "parts", 0)
    assert whole.name == parts.name == "checkpoint-3"
    progress = run_folder.read_progress(tmp_path / "parts")
    assert (progress.step, progress.steps) == (3, 40 * len(TranslationTask().batches(*_loaded(place), 0)))
    one, other = (load_file(checkpoint / run_folder.WEIGHTS) for checkpoint in (whole, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def _loaded(place: Path):
    return TranslationTask().load(place, GPU, None), GPU
