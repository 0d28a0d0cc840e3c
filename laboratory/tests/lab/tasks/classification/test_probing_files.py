"""Probing files: the format, what is refused, which lines are kept, and how splits are cut where a file lacks one."""

from __future__ import annotations

import dataclasses
import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from headwise.errors import DataError
from headwise_lab.data.probing_files import (
    PROBES,
    choose_layout,
    drop_repeats,
    find_probing_file,
    read_probing,
)
from headwise_lab.tasks.classification.probing_data import ProbingData, load_probing
from headwise_lab.tasks.classification.probing_scales import PROBING_SCALES
from lab.tasks.classification.probing_toy import write_probing

PUBLISHED = Path(os.environ.get("HEADWISE_DATA", "")) / "probing"
needs_published_data = pytest.mark.skipif(
    "HEADWISE_DATA" not in os.environ, reason="HEADWISE_DATA names no folder with the published files"
)
WHOLE = dataclasses.replace(PROBING_SCALES["demo"], train_examples=None)


def sentences(data: ProbingData, split: str) -> list[str]:
    return [" ".join(data.texts.table(number).words).lower() for number in getattr(data, split).numbers.tolist()]


def test_the_ten_tasks_are_those_of_the_paper():
    assert len(PROBES) == 10


def test_partition_label_and_the_last_field_are_read(tmp_path):
    path = tmp_path / "past_present.txt"
    path.write_text("te\tPAST\tx\ty\t He  went .\n\ntr\tPRES\tShe goes .\ntr\tPAST\tShe went .\n")
    found = read_probing(path)
    assert list(found) == ["tr", "te"]
    assert [(one.label, one.text, one.line) for one in found["te"]] == [("PAST", "He went .", 1)]
    assert [one.line for one in found["tr"]] == [3, 4]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tr\tPAST", r"t\.txt, line 2: 2 fields; expected at least 3"),
        ("dev\tPAST\tIt went .", r"t\.txt, line 2: the partition is 'dev'; expected tr, va or te"),
        ("va\t \tIt went .", r"t\.txt, line 2: the label is empty"),
        ("va\tPRES\tIt goes .", r"t\.txt has 1 labels in its lines; expected at least two"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path, line, said):
    (tmp_path / "t.txt").write_text(f"tr\tPRES\tIt goes .\n{line}\n")
    with pytest.raises(DataError, match=said):
        read_probing(tmp_path / "t.txt")


def test_a_file_is_found_plain_or_packed_and_a_folder_says_which_there_are(tmp_path):
    packed = tmp_path / "past_present.txt.gz"
    with gzip.open(packed, "wt") as file:
        file.write("tr\tPAST\tIt went .\n")
    assert find_probing_file(tmp_path / "past_present") == packed
    with pytest.raises(DataError, match=r"name one of its files, as .*past_present"):
        find_probing_file(tmp_path)
    (tmp_path / "past_present.txt").write_text("")
    with pytest.raises(DataError, match=r"there are .* and .*; take one away"):
        find_probing_file(tmp_path / "past_present")
    with pytest.raises(DataError, match=r"tense does not exist"):
        find_probing_file(tmp_path / "tense")


def test_a_sentence_stays_once_in_the_last_partition_and_one_with_two_labels_nowhere(tmp_path):
    path = tmp_path / "t.txt"
    lines = ["tr\tA\tone", "tr\tA\tTwo", "tr\tB\tthree", "va\tA\ttwo", "va\tB\tone", "te\tA\ttwo", "te\tB\tthree"]
    path.write_text("".join(f"{line}\n" for line in [*lines, "te\tB\tfour", "te\tB\tfour"]))
    found = drop_repeats(read_probing(path))
    assert {name: [one.text for one in part] for name, part in found.lines.items()} == {
        "tr": [],
        "va": [],
        "te": ["two", "three", "four"],
    }
    assert (found.repeated, found.contradicted) == (4, 2)


def test_a_cut_follows_from_the_sentences_alone(tmp_path):
    path = write_probing(tmp_path / "a.txt", {"va": 300, "te": 60})
    other = tmp_path / "b.txt"
    other.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    one, two = load_probing(path, WHOLE, None), load_probing(other, WHOLE, None)
    for split in ("train", "dev", "test"):
        assert sorted(sentences(one, split)) == sorted(sentences(two, split))
    assert len(one.dev) == pytest.approx(30, abs=2)
    assert len(one.train) + len(one.dev) == 300 - one.repeated
    assert len(one.test) == 60
    assert "training and dev are nine tenths and one of va" in one.summary()


@pytest.mark.parametrize("partitions", [{"va": 200}, {"tr": 150, "va": 50}])
def test_without_a_test_partition_all_is_cut_into_tenths(tmp_path, partitions):
    data = load_probing(write_probing(tmp_path / "a.txt", partitions), WHOLE, None)
    assert data.texts.layout == choose_layout(["va"])
    assert [round(len(getattr(data, split)) / 20) for split in ("train", "dev", "test")] == [8, 1, 1]
    assert "cut into tenths by a hash of the sentence" in data.summary()


def test_the_files_own_splits_are_kept(tmp_path):
    data = load_probing(write_probing(tmp_path / "a.txt", {"tr": 90, "va": 30, "te": 40}), WHOLE, tmp_path / "cache")
    assert (len(data.train), len(data.dev), len(data.test)) == (90, 30, 40)
    assert data.cut == ""
    again = load_probing(tmp_path / "a.txt", WHOLE, tmp_path / "cache")
    assert again.fingerprint == data.fingerprint


def test_a_label_without_a_training_sentence_stays_a_class(tmp_path):
    path = write_probing(tmp_path / "a.txt", {"tr": 30, "va": 20, "te": 20})
    with path.open("a") as file:
        file.write("te\tFUT\tit will rain\n")
    data = load_probing(path, WHOLE, None)
    assert data.labels == ("FUT", "PAST", "PRES")
    assert data.counts()["labels_untrained"] == 1
    assert "1 labels without a training sentence" in data.summary()
    assert np.bincount(data.test.labels)[0] == 1


def test_training_sentences_of_one_label_are_refused_by_file_and_label(tmp_path):
    path = tmp_path / "tree_depth.txt"
    lines = [f"tr\tPRES\tit goes {word}\n" for word in "abcdefghijklmn"]
    path.write_text("".join([*lines, "va\tPAST\tit went\n", "te\tPRES\tit rains\n", "te\tPAST\tit saw\n"]))
    with pytest.raises(DataError, match=r"tree_depth\.txt: all 14 training sentences have the label 'PRES'"):
        load_probing(path, WHOLE, None)


def test_too_few_sentences_to_cut_are_refused_by_file(tmp_path):
    path = tmp_path / "tree_depth.txt"
    path.write_text("va\tPRES\tit goes\nva\tPAST\tit went\n")
    with pytest.raises(DataError, match=r"tree_depth\.txt: 2 different texts cannot be cut into 10 parts"):
        load_probing(path, WHOLE, None)


@needs_published_data
@pytest.mark.parametrize("name", ["sentence_length", "tree_depth", "odd_man_out", "word_content"])
def test_no_sentence_of_x_probe_is_in_two_splits_or_twice_in_one(name):
    data = load_probing(PUBLISHED / "xprobe_en" / name, WHOLE, None)
    found = {split: sentences(data, split) for split in ("train", "dev", "test")}
    every = [text for texts in found.values() for text in texts]
    assert len(every) == len(set(every))
    lines = sum(map(len, read_probing(find_probing_file(PUBLISHED / "xprobe_en" / name)).values()))
    assert lines == len(every) + data.repeated + data.contradicted
    assert data.contradicted == (12_876 if name == "odd_man_out" else 0)


@needs_published_data
@pytest.mark.parametrize("name", sorted(PROBES))
def test_the_sample_of_the_published_files_is_read(name):
    path = PUBLISHED / "senteval_sample" / f"{name}.txt"
    if name == "sentence_length":  # the sample shows one class
        with pytest.raises(DataError, match="has 1 labels"):
            read_probing(path)
        return
    found = read_probing(path)
    assert sum(map(len, found.values())) == len(path.read_text().splitlines())
    assert set(found) == ({"tr", "te"} if name == "bigram_shift" else {"te"})
