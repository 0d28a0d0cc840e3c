"""Probing files: the format, what is refused, which lines are kept, and how splits are cut where a file lacks one."""

from __future__ import annotations

import dataclasses
import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from headwise.errors import DataError
from headwise_lab.data.probing_files import PROBES, drop_repeats, find_probing_file, read_probing
from headwise_lab.tasks.classification.probing import ProbingData, load_probing
from headwise_lab.tasks.classification.scales import PROBING_SCALES
from lab.tasks.classification.probing_toy import write_probing

PUBLISHED = Path(os.environ.get("HEADWISE_DATA", "")) / "probing"
needs_published_data = pytest.mark.skipif(
    "HEADWISE_DATA" not in os.environ, reason="HEADWISE_DATA names no folder with the published files"
)
WHOLE = dataclasses.replace(PROBING_SCALES["demo"], train_examples=None)
SPLITS = ("train", "dev", "test")


def sentences(data: ProbingData, split: str) -> list[str]:
    return [" ".join(words) for words in data.words(getattr(data, split), lower=True)]


def test_partition_label_and_the_last_field_are_read_and_other_lines_refused(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("te\tPAST\tx\ty\t He  went .\n\ntr\tPRES\tShe goes .\ntr\tPAST\tShe went .\n")
    found = read_probing(path)
    assert list(found) == ["tr", "te"]
    assert [(one.label, one.text, one.line) for one in found["te"]] == [("PAST", "He went .", 1)]
    assert [one.line for one in found["tr"]] == [3, 4]
    for line, said in (
        ("tr\tPAST", r"t\.txt, line 2: 2 fields; expected at least 3"),
        ("dev\tPAST\tIt went .", r"t\.txt, line 2: the partition is 'dev'; expected tr, va or te"),
        ("va\t \tIt went .", r"t\.txt, line 2: the label is empty"),
        ("va\tPRES\tIt goes .", r"t\.txt has 1 labels in its lines; expected at least two"),
    ):
        path.write_text(f"tr\tPRES\tIt goes .\n{line}\n")
        with pytest.raises(DataError, match=said):
            read_probing(path)


def test_a_file_is_found_plain_or_packed_and_a_folder_says_which_there_are(tmp_path):
    assert len(PROBES) == 10
    packed = tmp_path / "past_present.txt.gz"
    packed.write_bytes(gzip.compress(b"tr\tPAST\tIt went .\n"))
    assert find_probing_file(tmp_path / "past_present") == packed
    (tmp_path / "past_present.txt").write_text("")
    for place, said in (
        (tmp_path, r"name one of its files, as .*past_present"),
        (tmp_path / "past_present", r"there are .* and .*; take one away"),
        (tmp_path / "tense", r"tense does not exist"),
    ):
        with pytest.raises(DataError, match=said):
            find_probing_file(place)


def test_a_sentence_stays_once_in_the_last_partition_and_one_with_two_labels_nowhere(tmp_path):
    path = tmp_path / "t.txt"
    lines = ["tr\tA\tone", "tr\tA\tTwo", "tr\tB\tthree", "va\tA\ttwo", "va\tB\tone", "te\tA\ttwo", "te\tB\tthree"]
    path.write_text("".join(f"{line}\n" for line in [*lines, "te\tB\tfour", "te\tB\tfour"]))
    found = drop_repeats(read_probing(path))
    kept = {name: [one.text for one in part] for name, part in found.lines.items()}
    assert kept == {"tr": [], "va": [], "te": ["two", "three", "four"]}
    assert (found.repeated, found.contradicted) == (4, 2)


def test_missing_splits_are_cut_by_the_sentences_alone_and_the_files_own_are_kept(tmp_path):
    path, other = write_probing(tmp_path / "a.txt", {"va": 300, "te": 60}), tmp_path / "b.txt"
    other.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    one, two = load_probing(path, WHOLE, None), load_probing(other, WHOLE, None)
    for split in SPLITS:
        assert sorted(sentences(one, split)) == sorted(sentences(two, split))
    assert len(one.dev) == pytest.approx(30, abs=2)
    assert (len(one.train) + len(one.dev), len(one.test)) == (300 - one.repeated, 60)
    assert "training and dev are nine tenths and one of va" in one.summary()
    for partitions in ({"va": 200}, {"tr": 150, "va": 50}):
        data = load_probing(write_probing(path, partitions), WHOLE, None)
        assert [*data.texts.splits] == ["all"]
        assert [round(len(getattr(data, split)) / 20) for split in SPLITS] == [8, 1, 1]
        assert "cut into tenths by a hash of the sentence" in data.summary()
    data = load_probing(write_probing(path, {"tr": 90, "va": 30, "te": 40}), WHOLE, tmp_path / "cache")
    assert ([len(getattr(data, split)) for split in SPLITS], data.cut) == ([90, 30, 40], "")
    assert load_probing(path, WHOLE, tmp_path / "cache").fingerprint == data.fingerprint


def test_a_label_without_a_training_sentence_stays_a_class(tmp_path):
    path = write_probing(tmp_path / "a.txt", {"tr": 30, "va": 20, "te": 20})
    path.write_text(path.read_text() + "te\tFUT\tit will rain\n")
    data = load_probing(path, WHOLE, None)
    assert data.labels == ("FUT", "PAST", "PRES")
    assert data.counts()["labels_untrained"] == 1
    assert "1 labels without a training sentence" in data.summary()
    assert np.bincount(data.test.labels)[0] == 1
    lines = [f"tr\tPRES\tit goes {word}\n" for word in "abcdefghijklmn"]
    for text, said in (
        (
            "".join([*lines, "va\tPAST\tit went\n", "te\tPRES\tit rains\n", "te\tPAST\tit saw\n"]),
            r"a\.txt: all 14 training sentences have the label 'PRES'",
        ),
        ("va\tPRES\tit goes\nva\tPAST\tit went\n", r"a\.txt: 2 different texts cannot be cut into 10 parts"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            load_probing(path, WHOLE, None)


@needs_published_data
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.full) for name in ("sentence_length", "tree_depth", "word_content")),
        "odd_man_out",
    ],
)
def test_no_sentence_of_x_probe_is_in_two_splits_or_twice_in_one(name):
    data = load_probing(PUBLISHED / "xprobe_en" / name, WHOLE, None)
    every = [text for split in SPLITS for text in sentences(data, split)]
    assert len(every) == len(set(every))
    lines = sum(map(len, read_probing(find_probing_file(PUBLISHED / "xprobe_en" / name)).values()))
    assert lines == len(every) + data.repeated + data.contradicted
    assert data.contradicted == (12_876 if name == "odd_man_out" else 0)


@needs_published_data
def test_the_sample_of_the_published_files_is_read():
    for name in PROBES:
        path = PUBLISHED / "senteval_sample" / f"{name}.txt"
        if name == "sentence_length":  # the sample shows one class
            with pytest.raises(DataError, match="has 1 labels"):
                read_probing(path)
            continue
        found = read_probing(path)
        assert sum(map(len, found.values())) == len(path.read_text().splitlines())
        assert set(found) == ({"tr", "te"} if name == "bigram_shift" else {"te"})
