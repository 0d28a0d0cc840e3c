"""The splits and the encoding of classification: what may not be in two places, and what training alone decides."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from headwise.errors import DataError, SettingError
from headwise_lab.data.arrays import stable_key
from headwise_lab.data.splits import split_by_hash
from headwise_lab.tasks.classification.data import (
    PADDING,
    UNKNOWN,
    ClassificationData,
    Sentence,
    collate,
    list_folds,
    load_data,
)
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.tasks.classification.texts import is_tokenized
from lab.sentences import parse_without_spacy, parsed, write_sentences

PUBLISHED = Path(os.environ.get("HEADWISE_DATA", "")) / "classification"
needs_published_data = pytest.mark.skipif(
    "HEADWISE_DATA" not in os.environ, reason="HEADWISE_DATA names no folder with the published files"
)
CPU = CLASSIFICATION_SCALES["cpu"]
SPLITS = ("train", "dev", "test")
# One of the texts t0 to t39 that are test when they are all there is.
TESTED = int(split_by_hash([str(stable_key("text", f"t{i}") >> 1) for i in range(40)])["test"][0])


def scale(**changes: object):
    return dataclasses.replace(CPU, **changes)


def prepare_texts(data: ClassificationData, split: str) -> list[str]:
    return [" ".join(data.texts.table(number).words).lower() for number in getattr(data, split).numbers.tolist()]


def folder(place: Path, **files: list[str]) -> Path:
    for name, lines in files.items():
        (place / f"{name}.tsv").write_text("".join(f"{line}\n" for line in lines))
    return place


@needs_published_data
@pytest.mark.parametrize("name", ["cr", "trec", "subj", "mpqa", "mr", pytest.param("sst2", marks=pytest.mark.slow)])
def test_no_text_of_a_published_set_is_in_two_splits(name):
    data = load_data(PUBLISHED / name, dataclasses.replace(CPU, train_examples=None), None)
    found = {split: set(prepare_texts(data, split)) for split in SPLITS}
    assert not found["train"] & found["dev"]
    assert not found["train"] & found["test"]
    assert not found["dev"] & found["test"]
    whole = sum(len(getattr(data, split)) for split in SPLITS) + data.dropped
    assert whole == len(data.texts.classes)
    if data.texts.layout.test is not None:
        first, last = data.texts.files["test"]
        assert data.test.numbers.tolist() == list(range(first, last))
    else:
        assert len(data.test) == pytest.approx(whole / 10, abs=2)
        assert len(data.dev) == pytest.approx(whole / 10, abs=2)
    assert {label: n for label, n in enumerate(np.bincount(data.train.labels)) if not n} == {}
    assert data.counts()["without_text"] == {"cr": 4, "mpqa": 3}.get(name, 0)


@needs_published_data
def test_each_text_of_a_published_set_is_tested_in_one_fold_and_its_copies_with_it(tmp_path):
    folds = list_folds(PUBLISHED / "mpqa", scale(folds=4), tmp_path)
    parts = [load_data(PUBLISHED / "mpqa", fold, tmp_path) for fold in folds]
    whole = load_data(PUBLISHED / "mpqa", scale(folds=4), tmp_path)
    tested = np.concatenate([part.test.numbers for part in parts])
    assert tested.tolist() == whole.test.numbers.tolist()
    assert sorted(tested.tolist()) == list(range(len(whole.texts.classes)))
    seen = [set(prepare_texts(part, "test")) for part in parts]
    assert all(not one & other for place, one in enumerate(seen) for other in seen[:place])
    for part in parts:
        assert not set(prepare_texts(part, "train")) & set(prepare_texts(part, "test"))


def test_a_set_with_a_test_of_its_own_is_one_training_whatever_the_folds(tmp_path):
    place = folder(tmp_path, train=[f"{i % 2}\ttext {i}" for i in range(40)], test=["0\tx", "1\ty"])
    assert list_folds(place, scale(folds=5), None) == (scale(folds=5),)
    with pytest.raises(SettingError, match="fold is 2 without folds"):
        scale(fold=2)


def test_training_texts_that_stand_in_dev_or_test_too_are_left_out_and_counted(tmp_path):
    train = [f"{i % 2}\ttext {i} of many" for i in range(30)]
    data = load_data(
        folder(tmp_path, train=train, dev=["0\tTEXT 3 of many", "1\tnew"], test=["0\ttext 4 of many"]), CPU, None
    )
    assert (len(data.train), len(data.dev), len(data.test), data.dropped) == (28, 2, 1, 2)
    assert "text 3 of many" not in prepare_texts(data, "train")


def test_the_vocabulary_is_that_of_training_and_an_unknown_word_is_no_padding(tmp_path):
    train = ["0\tgood film", "1\tbad film", "0\tgood once", "1\tbad <pad> <pad>"]
    data = load_data(folder(tmp_path, train=train, dev=["0\tfilm"], test=["1\tGOOD unseen once <pad>"]), CPU, None)
    assert data.vocabulary == ("<pad>", "<unk>", "<start>", "<end>", "bad", "film", "good")
    assert data.test.tokens[0] == [2, 6, UNKNOWN, UNKNOWN, UNKNOWN, 3]
    assert PADDING not in data.train.tokens.values
    every = load_data(tmp_path, scale(min_count=1), None)
    assert every.vocabulary[-1] == "once"


def test_known_vectors_keep_their_words_and_are_found_again(tmp_path):
    train = ["0\tgood film", "1\tbad film", "0\tgood once", "1\tbad film"]
    place = folder(tmp_path, train=train, dev=["0\tfilm"], test=["1\tgood"])
    (tmp_path / "vectors").write_text("Once 9 9\nonce 1 2\nfilm 3 4\nother 5 6\n")
    data = load_data(place, scale(width=2, embeddings=tmp_path / "vectors"), None)
    ids, vectors = data.vectors(2)
    assert {data.vocabulary[i]: vector.tolist() for i, vector in zip(ids, vectors, strict=True)} == {
        "film": [3.0, 4.0],
        "once": [1.0, 2.0],
    }
    (tmp_path / "vectors").write_text("other 5 6\n")
    with pytest.raises(DataError, match="has a vector for none of the 4 words; name another file"):
        load_data(place, scale(width=2, embeddings=tmp_path / "vectors"), None)


def test_text_that_was_cut_into_words_keeps_them_and_other_text_is_cut_at_marks(tmp_path):
    before = ["0\t-LRB- does n't , k-19 -rrb- .", "1\tit 's u.s. film !"]
    data = load_data(folder(tmp_path, train=[*before, "0\tno ."], dev=before[:1], test=["1\tnew ."]), CPU, None)
    assert data.texts.table(0).words == ("(", "does", "n't", ",", "k-19", ")", ".")
    raw = ["0\tWell, no.", "1\tYes, it is!"]
    data = load_data(folder(tmp_path, train=[*raw, "0\tno."], dev=["1\told."], test=["1\tnew."]), CPU, None)
    assert data.texts.table(1).words == ("Yes", ",", "it", "is", "!")
    assert is_tokenized(["no marks at all"])


def test_a_long_text_is_cut_and_counted_and_its_parse_with_it(tmp_path, monkeypatch):
    parse_without_spacy(monkeypatch)
    lines = [f"{i % 2}\t" + " ".join(f"w{i * j % 7}" for j in range(1, 4 + 9 * (i == 5))) for i in range(20)]
    data = load_data(
        folder(tmp_path, train=lines, dev=["0\ta b"], test=["1\tb c"]), scale(max_words=6, pipeline=tmp_path), None
    )
    assert data.counts()["cut_to_the_longest"] == 1
    assert int(data.train.lengths.max()) == 8
    table, whole = data.texts.table(5), parsed(lines[5].partition("\t")[2].split())
    assert table.heads == whole[:6].heads
    assert table.relations == whole.relations[:6]


def test_a_cap_keeps_the_same_texts_whatever_their_order(tmp_path):
    lines = write_sentences(tmp_path / "a.tsv", 90).read_text().splitlines(keepends=True)
    one = load_data(tmp_path / "a.tsv", scale(train_examples=20), None)
    (tmp_path / "b.tsv").write_text("".join(reversed(lines)))
    other = load_data(tmp_path / "b.tsv", scale(train_examples=20), None)
    assert len(one.train) == 20
    assert sorted(prepare_texts(one, "test")) == sorted(prepare_texts(other, "test"))
    # equal texts tie, so that the cap may fall between two of them
    assert len(set(prepare_texts(one, "train")) ^ set(prepare_texts(other, "train"))) <= 1


def test_prepared_texts_are_kept_and_follow_from_the_contents_alone(tmp_path):
    path = write_sentences(tmp_path / "a.tsv", 60)
    one = load_data(path, CPU, tmp_path / "cache")
    kept = list((tmp_path / "cache").glob("*.npz"))
    moved = path.rename(tmp_path / "other.tsv")
    other = load_data(moved, CPU, tmp_path / "cache")
    assert len(kept) == 1
    assert one.fingerprint == other.fingerprint
    assert one.train.tokens.values.tolist() == other.train.tokens.values.tolist()
    moved.write_text(moved.read_text() + "pos\tone more .\n")
    assert load_data(moved, CPU, tmp_path / "cache").fingerprint != one.fingerprint


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["pos\tx", "neg\ty", "pos\tz"], r"3 different texts cannot be cut into 10 parts"),
        ([f"{'odd' if i == TESTED else i % 2}\tt{i}" for i in range(40)], r"no training text has the label 'odd'"),
    ],
)
def test_a_file_of_ones_own_that_cannot_be_used_is_refused(tmp_path, lines, message):
    folder(tmp_path, a=lines)
    with pytest.raises(DataError, match=message):
        load_data(tmp_path / "a.tsv", CPU, None)


def test_a_label_that_one_of_the_folds_would_not_have_is_refused_before_any_is_trained(tmp_path):
    both, scale = [f"{i % 2}\tt{i}" for i in range(60)], dataclasses.replace(CPU, folds=5)
    place = folder(tmp_path, a=both, b=[*both, "odd\tonce"])
    assert len(list_folds(place / "a.tsv", scale, None)) == 5
    # training has it in three of the folds
    with pytest.raises(DataError, match="no training text has the label 'odd'"):
        list_folds(place / "b.tsv", scale, None)


def test_a_label_that_training_does_not_have_is_refused_by_its_line(tmp_path):
    train = ["0\ta b", "1\tc d", "0\te", "1\tf"]
    with pytest.raises(
        DataError, match=r"test\.tsv, line 2: label '7' does not occur in train\.tsv; expected one of 0, 1"
    ):
        load_data(folder(tmp_path, train=train, dev=["0\tx"], test=["1\ty", "7\tz", "1\tw"]), CPU, None)


def test_a_batch_is_padded_on_the_right_and_says_which_sentences_it_has():
    batch = collate([Sentence(tokens=[2, 9, 9, 3], label=1, number=5), Sentence(tokens=[2, 3], label=0, number=8)])
    assert batch["tokens"].tolist() == [[2, 9, 9, 3], [2, 3, 0, 0]]
    assert (batch["labels"].tolist(), batch["numbers"].tolist()) == ([1, 0], [5, 8])
    with pytest.raises(DataError, match="no examples"):
        collate([])
