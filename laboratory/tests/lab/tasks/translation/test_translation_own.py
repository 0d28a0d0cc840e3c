"""What `--data` may name: a known corpus, a folder of one's own, or two files; and what is said of the rest."""

from __future__ import annotations

import dataclasses
import gzip
import os
import shutil
from html import escape
from pathlib import Path

import pytest

from cases import cases
from headwise.errors import DataError, SettingError
from headwise_lab.tasks.translation.files import find_corpus
from headwise_lab.tasks.translation.scales import TRANSLATION_SCALES
from headwise_lab.tasks.translation.task import TranslationTask
from lab.tasks.translation.translation_text import SOURCE_WORDS, TARGET_WORDS, lines, write, write_corpus

PUBLISHED = Path(os.environ.get("HEADWISE_DATA", "")) / "mt"
SCALE = dataclasses.replace(TRANSLATION_SCALES["demo"], vocabulary_size=300, train_examples=250)
needs_published_data = pytest.mark.skipif(
    "HEADWISE_DATA" not in os.environ, reason="HEADWISE_DATA names no folder with the published files"
)


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
    with pytest.raises(DataError, match=r"translation needs --data: a folder with the files of multi30k"):
        TranslationTask().load(None, SCALE, tmp_path)


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
@needs_published_data
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
@needs_published_data
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
