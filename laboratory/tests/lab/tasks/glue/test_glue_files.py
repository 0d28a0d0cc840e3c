"""The files of GLUE's sets: what is read, what is refused, and the answers for the server."""

from __future__ import annotations

import dataclasses

import pytest

from headwise.errors import DataError
from headwise_lab.tasks.glue.files import GLUE, find_missing_file, find_set, format_submission, read_split
from headwise_lab.training.start import find_start
from lab.tasks.glue.glue_toy import PUBLISHED, TASK, toy, write_glue


def test_every_set_is_read_in_its_published_form(tmp_path):
    forms = {
        "CoLA": ["gj04\t1\t\tA sentence.", "gj04\t0\t*\tAnother sentence the."],
        "SST-2": ["sentence\tlabel", "fine\t1", "poor\t0"],
        "MRPC": ["\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", '1\t5\t6\tone "word\ttwo', "0\t5\t6\ta\tb"],
        "STS-B": ["index\tsentence1\tsentence2\tscore", "0\ta\tb\t2.500", "1\ta\tb\t5"],
        "QQP": [
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
            "7\t1\t2\ta\tb\t1",
            "8\t1\t2\tbroken",
            "9\t1\t2\ta\tb\t0",
        ],
        "MNLI": ["index\tsentence1\tsentence2\tgold_label", "0\ta\tb\tneutral", "1\ta\tb\tcontradiction"],
        "QNLI": ["index\tquestion\tsentence\tlabel", "0\ta\tb\tentailment", "1\ta\tb\tnot_entailment"],
        "RTE": ["index\tsentence1\tsentence2\tlabel", "0\ta\tb\tentailment", "1\ta\tb\tnot_entailment"],
    }
    assert set(forms) == set(GLUE)
    for name, lines in forms.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        found, left_out = read_split(tmp_path / name, "train")
        assert len(found) == 2, name
        assert left_out == (name == "QQP")
        assert all(len(example.texts) == len(GLUE[name].texts) for example in found)
    assert read_split(tmp_path / "MRPC", "train")[0][0].texts == ('one "word', "two")
    assert [example.label for example in read_split(tmp_path / "MRPC", "train")[0]] == ["1", "0"]


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("RTE", "9\ta\tb\tmaybe", r"line 3: the label is 'maybe'; expected entailment or not_entailment"),
        ("RTE", "9\ta", r"line 3: a text is missing or empty; expected sentence1, sentence2"),
        ("STS-B", "9\ta\tb\t5.1", r"line 3: the score is '5\.1'; expected a number from 0 to 5"),
        ("STS-B", "9\ta\tb", r"line 3: the score is ''"),
    ],
)
def test_a_bad_line_is_named(name, line, said, tmp_path):
    column = "label" if name == "RTE" else "score"
    good = "entailment" if name == "RTE" else "1"
    (tmp_path / name).mkdir()
    lines = [f"index\tsentence1\tsentence2\t{column}", f"0\ta\tb\t{good}", line]
    (tmp_path / name / "train.tsv").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=rf"train\.tsv, {said}"):
        read_split(tmp_path / name, "train")


def test_folders_that_are_no_set_or_lack_a_file_are_refused(glue, model, tmp_path):
    with pytest.raises(DataError, match="is none of GLUE's sets; expected a folder named CoLA, SST-2"):
        find_set(tmp_path)
    (tmp_path / "QNLI").mkdir()
    (tmp_path / "QNLI" / "dev.tsv").touch()
    assert find_missing_file(tmp_path / "QNLI") == "train.tsv"
    with pytest.raises(DataError, match=r"lacks train\.tsv, plain or \.gz; QNLI cannot be fine-tuned"):
        TASK.load(tmp_path / "QNLI", toy(model), None)
    with pytest.raises(DataError, match="glue needs --data: the folder of one of GLUE's sets"):
        TASK.load(None, toy(model), None)
    with pytest.raises(DataError, match="glue needs --pretrained: a folder of Hugging Face"):
        TASK.load(glue / "RTE", dataclasses.replace(toy(model), pretrained=None), None)
    with pytest.raises(DataError, match="holds no model; expected a folder of Hugging Face"):
        find_start(tmp_path)


def test_a_test_file_is_read_before_anything_is_trained_and_says_nothing_of_the_data(model, tmp_path):
    glue = write_glue(tmp_path)
    known = TASK.load(glue / "RTE", toy(model), None).fingerprint
    path = glue / "RTE" / "test.tsv"
    good = path.read_text()
    path.write_text(good + "9\tonly one\n")
    with pytest.raises(DataError, match=r"test\.tsv, line 8: a text is missing or empty"):
        TASK.load(glue / "RTE", toy(model), None)
    path.write_text(good + "9\tone\ttwo\n")
    assert TASK.load(glue / "RTE", toy(model), None).fingerprint == known
    path.write_text(good + "9\tone\t\ttwo\n")
    with pytest.raises(DataError, match=r"test\.tsv, line 8: 4 fields, and 3 columns; a text holds a tab"):
        TASK.load(glue / "RTE", toy(model), None)
    path.write_text(good)
    path.with_name("test.tsv.gz").touch()
    with pytest.raises(DataError, match=r"holds both test\.tsv and test\.tsv\.gz"):
        TASK.load(glue / "RTE", toy(model), None)


def test_every_line_of_a_test_file_is_answered(tmp_path):
    (tmp_path / "QQP").mkdir()
    lines = ["id\tquestion1\tquestion2", "4\ta\tb", "5\t\tb", "6\ta", "7\ta\tb"]
    (tmp_path / "QQP" / "test.tsv").write_text("\n".join(lines) + "\n")
    found, left_out = read_split(tmp_path / "QQP", "test")
    assert ([example.index for example in found], left_out) == (["4", "5", "6", "7"], 0)
    assert format_submission(GLUE["QQP"], found, [1, 0, 1, 0]).splitlines()[2:4] == ["5\t0", "6\t1"]


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="HEADWISE_DATA has no GLUE")
def test_the_published_files_are_read_whole():
    sizes = {
        "CoLA": (8551, 1043, 1063),
        "MRPC": (3668, 408, 1725),
        "STS-B": (5749, 1500, 1379),
        "RTE": (2490, 277, 3000),
    }
    for name, counts in sizes.items():
        found = [len(read_split(PUBLISHED / name, split)[0]) for split in ("train", "dev", "test")]
        assert tuple(found) == counts
        assert not find_missing_file(PUBLISHED / name)
    assert find_missing_file(PUBLISHED / "QNLI") == "train.tsv"
