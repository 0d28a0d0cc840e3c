"""Loading the data of the translation task: splits, ids, references, the cache, refusals and batches."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cases import cases
from headwise.atomic import seal
from headwise.errors import DataError, SettingError
from headwise_lab.data.arrays import RaggedWriter, open_ragged
from headwise_lab.data.subwords import END, learn_subwords
from headwise_lab.tasks.translation import data as translation_data
from headwise_lab.tasks.translation.corpora import CORPORA, Cleaning, Corpus, Layout, Part
from headwise_lab.tasks.translation.data import Preparation, collate, load_translation, open_prepared
from headwise_lab.tasks.translation.files import make_custom_corpus, make_folder_corpus
from lab.published import DATA, needs
from lab.tasks.translation.translation_text import SOURCE_WORDS, TARGET_WORDS, lines, write, write_corpus

PUBLISHED = DATA / "mt"
SIDES = "source", "target"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("own"))


@pytest.fixture
def copy(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "own"))


def load(folder, cache, **changes):
    return load_translation(
        make_folder_corpus(folder, "de", "en"), folder, cache=cache, **{"vocabulary_size": 300} | changes
    )


def read(path):
    return path.read_text().splitlines()


def decode_sources(data, split):
    return [tuple(data.tokenizer.decode(example[side]) for side in SIDES) for example in data.splits[split]]


def test_every_split_decodes_to_its_files_in_order(folder, tmp_path):
    data = load(folder, tmp_path)
    assert list(data.splits) == ["train", "dev", "test"]
    for split in data.splits:
        expected = list(zip(read(folder / f"{split}.de"), read(folder / f"{split}.en"), strict=True))
        assert decode_sources(data, split) == expected
        if split != "train":
            assert list(zip(data.sources(split), data.references(split), strict=True)) == expected
    for example in (data.train[0], data.dev[-1], data.test[3]):
        assert all(example[side].count(END) == 1 and example[side][-1] == END for side in SIDES)
        assert all(type(token) is int for side in SIDES for token in example[side])
    assert (data.source_language, data.target_language) == ("de", "en")
    assert data.train.sources.values.dtype == np.uint16


def test_lengths_are_those_of_the_examples(folder, tmp_path):
    data = load(folder, tmp_path)
    assert data.train.lengths.tolist() == [[len(example[side]) for side in SIDES] for example in data.train]


def test_references_are_the_raw_lines_though_ids_are_normalized(copy, tmp_path):
    odd = "  cafe\u0301 \u2028 &amp; </s> x "
    write(copy / "test.en", [odd, *read(copy / "test.en")[1:]])
    data = load(copy, tmp_path)
    assert data.references("test")[0] == odd.strip()
    assert decode_sources(data, "test")[0][1] == odd.strip().replace("e\u0301", "\u00e9")
    assert len(data.references("test")) == len(data.test) == 30
    for bad in ("train", "other"):
        with pytest.raises(SettingError, match=f"split is '{bad}'; expected one of dev, test"):
            data.sources(bad)


def test_subwords_are_learned_from_training_alone(copy, tmp_path):
    before = load(copy, tmp_path / "a").tokenizer.to_json()
    write(copy / "dev.en", ["zyzzyva zyzzyva zyzzyva"] * 20)
    assert load(copy, tmp_path / "b").tokenizer.to_json() == before
    text = [side for pair in zip(read(copy / "train.de"), read(copy / "train.en"), strict=True) for side in pair]
    assert learn_subwords(text, 300).to_json() == before


def test_only_training_is_cleaned_and_what_was_dropped_is_counted(copy, tmp_path):
    train = list(zip(read(copy / "train.de"), read(copy / "train.en"), strict=True))
    added = [("", "a dog"), ("ein hund", " \t "), ("ein " * 99, "a dog " * 99), ("ein", "a dog " * 10), train[0]]
    for index, side in enumerate(("de", "en")):
        write(copy / f"train.{side}", [pair[index] for pair in [*train, *added]])
        write(copy / f"test.{side}", [added[index + 2][index], *read(copy / f"test.{side}")])
    data = load(copy, tmp_path, cleaning=Cleaning(longest=90, ratio=6.0, once=True))
    counts = data.record["splits"]["train"]
    distinct = list(dict.fromkeys(train))
    assert decode_sources(data, "train") == distinct
    assert counts["dropped"] == {"blank": 2, "ratio": 1, "repeated": 1 + len(train) - len(distinct), "too long": 1}
    assert (counts["read"], counts["pairs"]) == (305, len(distinct))
    assert len(data.test) == 31
    assert "of 305 pairs" in data.summary()
    assert "2 blank, 1 ratio" in data.summary()


def test_pairs_of_dev_and_test_with_a_blank_side_are_left_out_and_counted(copy, tmp_path):
    whole = load(copy, tmp_path / "whole")
    text = read(copy / "dev.en")
    write(copy / "dev.en", [*text[:6], "  ", *text[7:]])
    data = load(copy, tmp_path / "cache")
    assert "dev: 19 of 20 pairs, " in data.summary()
    assert data.summary().count("; dropped 1 blank") == 1
    for found, kept in ((data.sources, whole.sources("dev")), (data.references, whole.references("dev"))):
        assert found("dev") == [*kept[:6], *kept[7:]]
    assert data.sources("test") == whole.sources("test")


@pytest.mark.full
@cases(
    ("mark", "cut"),
    [
        ("@@", lambda text: re.sub(r"(\w)(\w+)", r"\1@@ \2", text)),
        ("▁", lambda text: re.sub(r"(^|\s)(\w)", r" ▁\2", text).strip()),
        ("##", lambda text: re.sub(r"(\w)(\w+)", r"\1 ##\2", text)),
        ("￭", lambda text: re.sub(r"(\w)(\w+)", r"\1￭ \2", text)),
    ],
)
@cases("name", ["train.de", "dev.en", "test.de"])
def test_text_that_was_cut_into_subwords_is_refused_with_what_joins_it(mark, cut, name, copy, tmp_path):
    raw, train = read(copy / name), read(copy / "train.de")
    write(copy / name, [cut(line) for line in raw])
    with pytest.raises(DataError, match=rf"{name}, line 1: {mark} marks pieces of words, .* with sed ") as refusal:
        load(copy, tmp_path / "cache")
    command = str(refusal.value).rpartition(" with ")[2].removesuffix(".")
    joined = subprocess.run(f"{command} {copy / name}", shell=True, check=True, capture_output=True, text=True)
    assert [line.strip() for line in joined.stdout.splitlines()] == raw
    write(copy / name, raw)
    write(copy / "train.de", [cut("some words"), *read(copy / "train.de")[1:]])
    assert load(copy, tmp_path / "cache").train, "one such line is text about something else"
    write(copy / "train.de", train)


def test_bad_text_is_refused_before_anything_is_made(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(translation_data, "learn_subwords", None)
    (copy / "test.de").write_bytes(b"gr\xfcn\n")
    with pytest.raises(DataError, match=r"test\.de, line 1: not UTF-8"):
        load(copy, tmp_path)


@pytest.mark.full
def test_two_files_alone_are_cut_by_their_source_lines(tmp_path):
    source, target = lines(3_000, 5, SOURCE_WORDS), lines(3_000, 5, TARGET_WORDS)
    # every source line stands twice, each time with another translation
    write(tmp_path / "my.de", source + source)
    write(tmp_path / "my.en", target + target[::-1])
    corpus = make_custom_corpus(Part("my.de", "my.en"), "de", "en")
    data = load_translation(corpus, tmp_path, cache=tmp_path / "cache", vocabulary_size=300)
    splits = {split: decode_sources(data, split) for split in data.splits}
    assert sorted(pair for pairs in splits.values() for pair in pairs) == sorted(
        zip(source + source, target + target[::-1], strict=True)
    )
    for split in ("dev", "test"):
        assert len(splits[split]) / 6_000 == pytest.approx(0.05, abs=0.012)
        assert {first for first, _ in splits[split]}.isdisjoint(first for first, _ in splits["train"])
        assert data.references(split) == [second for _, second in splits[split]]
    assert {first for first, _ in splits["dev"]}.isdisjoint(first for first, _ in splits["test"])


def test_a_given_test_set_leaves_only_dev_to_be_cut(tmp_path):
    write_corpus(tmp_path, train=2_000)
    corpus = make_custom_corpus(Part("train.de", "train.en"), "de", "en", test=Part("test.de", "test.en"))
    data = load_translation(corpus, tmp_path, cache=tmp_path / "cache", vocabulary_size=300)
    assert len(data.test) == 30
    assert len(data.train) + len(data.dev) == 2_000
    assert len(data.dev) / 2_000 == pytest.approx(0.05, abs=0.02)


def test_a_large_corpus_gives_at_most_two_thousand_pairs_to_a_cut_split(tmp_path, monkeypatch):
    monkeypatch.setattr(translation_data, "CUT_PAIRS", 40)
    write_corpus(tmp_path, train=2_000)
    data = load_translation(
        make_custom_corpus(Part("train.de", "train.en"), "de", "en"),
        tmp_path,
        cache=tmp_path / "cache",
        vocabulary_size=300,
    )
    assert 20 < len(data.dev) < 65
    assert 20 < len(data.test) < 65


def test_every_twenty_third_talk_line_is_the_dev_split(tmp_path):
    write_corpus(tmp_path, train=230)
    layout = Layout("talks", (Part("train.de", "train.en"),), (), (Part("test.de", "test.en"),), dev_every=23)
    corpus = Corpus("talks", "de", "en", (layout,))
    data = load_translation(corpus, tmp_path, cache=tmp_path / "cache", vocabulary_size=300)
    assert data.sources("dev") == read(tmp_path / "train.de")[22::23]
    assert [first for first, _ in decode_sources(data, "train")] == [
        line for number, line in enumerate(read(tmp_path / "train.de"), start=1) if number % 23
    ]


def test_subwords_of_a_large_corpus_are_learned_from_evenly_spaced_pairs(folder, tmp_path, monkeypatch):
    seen = []

    def spy(text, size, **options):
        seen.extend(text)
        return learn_subwords(seen, size, **options)

    monkeypatch.setattr(translation_data, "learn_subwords", spy)
    monkeypatch.setattr(
        translation_data,
        "Preparation",
        lambda *arguments: Preparation(*arguments, learned_from=100),
    )
    load(folder, tmp_path)
    assert seen[::2] == read(folder / "train.de")[::3]
    assert seen[1::2] == read(folder / "train.en")[::3]


def test_a_given_tokenizer_is_used_and_kept(folder, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(learn_subwords(["nur ein anderer text"] * 3, 280).to_json(), encoding="utf-8")
    data = load(folder, tmp_path / "cache", tokenizer=path)
    assert data.tokenizer.to_json() == path.read_text(encoding="utf-8")
    assert decode_sources(data, "dev")[0][0] == read(folder / "dev.de")[0]
    assert data.record["preparation"]["tokenizer"] == "given"
    assert data.fingerprint != load(folder, tmp_path / "cache").fingerprint
    path.write_text(learn_subwords(["und noch ein anderer"] * 3, 280).to_json(), encoding="utf-8")
    assert load(folder, tmp_path / "cache", tokenizer=path).fingerprint != data.fingerprint


def test_a_second_load_opens_what_the_first_prepared(folder, tmp_path, monkeypatch):
    first = load(folder, tmp_path)
    monkeypatch.setattr(translation_data, "prepare", None)
    second = load(folder, tmp_path)
    assert second.record == first.record
    assert [list(second.splits[name]) for name in second.splits] == [list(first.splits[name]) for name in first.splits]
    assert [path.name for path in tmp_path.iterdir()] == [f"translation-{first.fingerprint}"]


def test_a_prepared_folder_opens_without_its_files_on_another_machine(folder, tmp_path):
    first = load(folder, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(first.folder, elsewhere)
    data = open_prepared(elsewhere)
    assert data.references("test") == read(folder / "test.en")
    assert decode_sources(data, "train")[7] == (read(folder / "train.de")[7], read(folder / "train.en")[7])
    assert str(folder) not in (elsewhere / "record.json").read_text()


@pytest.mark.full
@cases("name", ["train.source.ids.npy", "dev.target.offsets.npy", "tokenizer.json", "record.json"])
@cases("damage", ["gone", "cut", "other"])
def test_damaged_prepared_data_is_refused_and_a_cache_is_made_anew(folder, tmp_path, name, damage):
    data = load(folder, tmp_path)
    path = data.folder / name
    before, whole = list(data.dev), path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"{}")
    with pytest.raises(DataError):
        open_prepared(data.folder)
    assert list(load(folder, tmp_path).dev) == before
    assert path.read_bytes() == whole


@cases(
    ("name", "value"),
    [
        ("splits", {}),
        ("splits", []),
        ("splits", {"../x": {}}),
        ("fingerprint", 3),
        ("files", None),
        ("source_language", []),
    ],
)
def test_a_record_that_does_not_describe_the_data_is_refused(folder, tmp_path, name, value):
    path = load(folder, tmp_path).folder / "record.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(seal(record | {name: value}, path.parent, record["file_digests"])))
    with pytest.raises(DataError, match=r"record\.json does not describe the data.*; prepare the data again"):
        open_prepared(path.parent)


def test_arrays_of_another_preparation_are_refused(folder, tmp_path):
    one, other = load(folder, tmp_path), load(folder, tmp_path, vocabulary_size=310)
    for side in SIDES:
        for part in ("ids", "offsets"):
            shutil.copy(other.folder / f"dev.{side}.{part}.npy", one.folder)
    with pytest.raises(DataError, match=r"dev\.source\.ids\.npy was changed since it was written"):
        open_prepared(one.folder)
    sealed = seal(one.record, one.folder, one.record["file_digests"])
    (one.folder / "record.json").write_text(json.dumps(sealed))
    with pytest.raises(DataError, match=r"split dev is not what record\.json says"):
        open_prepared(one.folder)


def test_an_interrupted_preparation_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(RaggedWriter, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(folder, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_whoever_is_second_to_prepare_takes_the_first_ones(folder, tmp_path, monkeypatch):
    first = load(folder, tmp_path)
    marked = first.folder / ".mark"
    marked.touch()
    real = open_prepared
    answers = iter([DataError("not yet there")])

    def late(place):
        for error in answers:
            raise error
        return real(place)

    monkeypatch.setattr(translation_data, "open_prepared", late)
    monkeypatch.setattr(translation_data.shutil, "rmtree", lambda *_arguments, **_options: None)
    assert load(folder, tmp_path).fingerprint == first.fingerprint
    assert marked.exists()


def test_a_cache_that_cannot_be_written_is_refused(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written .*; choose a folder that can"):
        load(folder, tmp_path / "file")


def test_the_fingerprint_changes_with_what_the_data_follows_from(copy, tmp_path):
    cache = tmp_path / "cache"
    base = load(copy, cache).fingerprint
    assert load(copy, cache).fingerprint == base
    changed = [
        load(copy, cache, vocabulary_size=310).fingerprint,
        load(copy, cache, cleaning=Cleaning(longest=30)).fingerprint,
        load(copy, cache, cleaning=Cleaning(once=True)).fingerprint,
        load_translation(make_folder_corpus(copy, "en", "de"), copy, cache=cache, vocabulary_size=300).fingerprint,
    ]
    french = replace(make_folder_corpus(copy, "de", "en"), source_language="fr")
    changed.append(load_translation(french, copy, cache=cache, vocabulary_size=300).fingerprint)
    write(copy / "test.de", ["anders", *read(copy / "test.de")[1:]])
    changed.append(load(copy, cache).fingerprint)
    assert len({base, *changed}) == 7


def test_a_split_without_pairs_is_refused(copy, tmp_path):
    with pytest.raises(DataError, match=r"the train split holds no pair \(\{'too long': 300\} dropped\)"):
        load(copy, tmp_path, cleaning=Cleaning(longest=1))
    for side in ("de", "en"):
        write(copy / f"dev.{side}", [])
    with pytest.raises(DataError, match="the dev split holds no pair"):
        load(copy, tmp_path)


def test_a_batch_is_padded_with_zeros_and_with_what_the_loss_ignores(folder, tmp_path):
    data = load(folder, tmp_path)
    examples = [data.train[index] for index in (0, 3, 7, -1)]
    batch = collate(examples)
    for name, side, padding in (("input_ids", "source", 0), ("labels", "target", -100)):
        assert batch[name].shape == (4, max(len(example[side]) for example in examples))
        for row, example in zip(batch[name].tolist(), examples, strict=True):
            assert row == example[side] + [padding] * (len(row) - len(example[side]))
    with pytest.raises(DataError, match="no examples"):
        collate([])
    with pytest.raises(DataError, match="target 0 of the batch has no tokens"):
        collate([{"source": [2], "target": []}])


def test_sequences_written_piece_by_piece_read_back_as_one(tmp_path):
    pieces = [[[1, 2], [3]], [], [[65_535], [], [4, 5, 6]]]
    with RaggedWriter(tmp_path, "x", np.dtype(np.uint16)) as writer:
        for piece in pieces:
            writer.write(piece)
    packed = open_ragged(tmp_path, "x")
    assert [packed[index] for index in range(len(packed))] == [sequence for piece in pieces for sequence in piece]
    assert (writer.sequences, writer.tokens) == (5, 7)
    # a mapped file, not a copy of it
    assert isinstance(packed.values.base, np.memmap)
    for wrong in (np.zeros(7, np.float32), np.zeros((7, 1), np.uint16)):
        np.save(tmp_path / "x.ids.npy", wrong)
        with pytest.raises(DataError, match="expected ids and int64 offsets"):
            open_ragged(tmp_path, "x")


@pytest.mark.full
def test_a_prepared_corpus_is_the_same_byte_for_byte_from_another_process(folder, tmp_path):
    program = (
        "import sys; sys.path[:0] = sys.argv[3:]\n"
        "from pathlib import Path\n"
        "from lab.tasks.translation.test_translation_data import load\n"
        "load(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, str(folder), str(tmp_path / "b"), *sys.path]
    subprocess.run(command, env={"RAYON_NUM_THREADS": "3", "PYTHONHASHSEED": "5"}, check=True)
    (here, there) = (load(folder, tmp_path / name).folder for name in ("a", "b"))
    assert sorted(path.name for path in here.iterdir()) == sorted(path.name for path in there.iterdir())
    for path in here.iterdir():
        assert path.read_bytes() == (there / path.name).read_bytes(), path.name


@pytest.mark.full
@needs("mt")
def test_the_whole_of_multi30k_is_prepared_and_comes_back(tmp_path):
    data = load_translation(CORPORA["multi30k"], PUBLISHED / "multi30k", cache=tmp_path)
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 29_000,
        "dev": 1_014,
        "test": 1_000,
        "test_2017_flickr": 1_000,
        "test_2017_mscoco": 461,
        "test_2018_flickr": 1_071,
    }
    assert data.tokenizer.vocabulary_size == 10_000
    for split in ("dev", "test_2018_flickr"):
        raw = list(zip(data.sources(split), data.references(split), strict=True))
        normalize = data.tokenizer.tokenizer.normalizer.normalize_str
        assert decode_sources(data, split) == [tuple(normalize(side) for side in pair) for pair in raw]
    assert json.loads((data.folder / "record.json").read_text())["files"]["dev"] == [["val.en.gz", "val.de.gz"]]
    assert sum(path.stat().st_size for path in data.folder.iterdir()) < 5 * 2**20
