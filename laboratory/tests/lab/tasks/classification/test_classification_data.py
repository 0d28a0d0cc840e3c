"""The splits and the encoding of classification and probing: what may not be in two places, and what is refused."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import numpy as np
import pytest

from headwise.errors import DataError, SettingError
from headwise_lab.data.arrays import stable_key
from headwise_lab.data.probing_files import PROBES, drop_repeats, find_probing_file, read_probing
from headwise_lab.data.splits import split_by_hash
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.tasks.classification import task as classification
from headwise_lab.tasks.classification.probing import ProbingData, load_probing
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES, PROBING_SCALES
from headwise_lab.tasks.classification.task import ClassificationTask, list_folds, load_data
from headwise_lab.texts.data import PADDING, UNKNOWN, Encoded, TextData, collate
from headwise_lab.texts.words import is_tokenized
from headwise_lab.training.attach import attach_arm
from lab.published import DATA, needs
from lab.sentences import parse_without_spacy, parsed, write_sentences
from lab.tasks.classification.probing_toy import write_probing

PUBLISHED, PIPELINE = DATA / "classification", DATA.parent / "models" / "en_ewt_parser"
needs_a_parser = pytest.mark.skipif(not PIPELINE.is_dir(), reason="no trained pipeline stands beside HEADWISE_DATA")
CPU = CLASSIFICATION_SCALES["cpu"]
SPLITS = ("train", "dev", "test")
# One of the texts t0 to t39 that are test when they are all there is.
TESTED = int(split_by_hash([str(stable_key("text", f"t{i}") >> 1) for i in range(40)])["test"][0])


def scale(**changes: object):
    return dataclasses.replace(CPU, **changes)


def texts_of(data: TextData, split: str) -> list[str]:
    return [" ".join(words) for words in data.words(getattr(data, split), lower=True)]


def folder(place: Path, **files: list[str]) -> Path:
    for name, lines in files.items():
        (place / f"{name}.tsv").write_text("".join(f"{line}\n" for line in lines))
    return place


@needs("classification")
@pytest.mark.parametrize(
    "name",
    [
        "cr",
        "trec",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("subj", "mpqa", "mr")),
        pytest.param("sst2", marks=pytest.mark.slow),
    ],
)
def test_no_text_of_a_published_set_is_in_two_splits(name):
    data = load_data(PUBLISHED / name, scale(train_examples=None), None)
    found = {split: set(texts_of(data, split)) for split in SPLITS}
    assert not found["train"] & (found["dev"] | found["test"])
    assert not found["dev"] & found["test"]
    whole = sum(len(getattr(data, split)) for split in SPLITS) + data.dropped
    assert whole == len(data.texts.classes)
    if "test" in data.texts.splits:
        assert data.test.numbers.tolist() == list(range(*data.texts.splits["test"]))
    else:
        assert [len(data.test), len(data.dev)] == pytest.approx([whole / 10] * 2, abs=2)
    assert np.bincount(data.train.labels, minlength=len(data.labels)).all()
    assert data.counts()["without_text"] == {"cr": 4, "mpqa": 3}.get(name, 0)


@needs("classification")
@pytest.mark.full
def test_each_text_of_a_published_set_is_tested_in_one_fold_and_its_copies_with_it(tmp_path):
    parts = [
        load_data(PUBLISHED / "mpqa", fold, tmp_path)
        for fold in list_folds(PUBLISHED / "mpqa", scale(folds=4), tmp_path)
    ]
    whole = load_data(PUBLISHED / "mpqa", scale(folds=4), tmp_path)
    tested = np.concatenate([part.test.numbers for part in parts])
    assert tested.tolist() == whole.test.numbers.tolist()
    assert sorted(tested.tolist()) == list(range(len(whole.texts.classes)))
    seen = [set(texts_of(part, "test")) for part in parts]
    assert all(not one & other for place, one in enumerate(seen) for other in seen[:place])
    assert not any(set(texts_of(part, "train")) & test for part, test in zip(parts, seen, strict=True))


def test_folds_are_cut_where_there_is_no_test_and_each_must_have_every_label(tmp_path):
    both, five = [f"{i % 2}\tt{i}" for i in range(60)], scale(folds=5)
    folder(tmp_path, a=both, b=[*both, "odd\tonce"], train=both, test=["0\tx", "1\ty"])
    assert list_folds(tmp_path, five, None) == (five,)
    assert len(list_folds(tmp_path / "a.tsv", five, None)) == 5
    # training has it in three of the folds
    with pytest.raises(DataError, match="no training text has the label 'odd'"):
        list_folds(tmp_path / "b.tsv", five, None)
    with pytest.raises(SettingError, match="fold is 2 without folds"):
        scale(fold=2)


def test_training_texts_that_stand_in_dev_or_test_too_are_left_out_and_counted(tmp_path):
    train = [f"{i % 2}\ttext {i} of many" for i in range(30)]
    place = folder(tmp_path, train=train, dev=["0\tTEXT 3 of many", "1\tnew"], test=["0\ttext 4 of many"])
    data = load_data(place, CPU, None)
    assert (len(data.train), len(data.dev), len(data.test), data.dropped) == (28, 2, 1, 2)
    assert "text 3 of many" not in texts_of(data, "train")


def test_training_decides_the_vocabulary_and_known_vectors_keep_their_words(tmp_path):
    train = ["0\tgood film", "1\tbad film", "0\tgood once", "1\tbad <pad> <pad>"]
    place, vectors = folder(tmp_path, train=train, dev=["0\tfilm"], test=["1\tGOOD unseen once <pad>"]), tmp_path / "v"
    data = load_data(place, CPU, None)
    assert data.vocabulary == ("<pad>", "<unk>", "<start>", "<end>", "bad", "film", "good")
    assert data.test.texts[0][0] == [2, 6, UNKNOWN, UNKNOWN, UNKNOWN, 3]
    assert PADDING not in data.train.texts[0].values
    assert load_data(place, scale(min_count=1), None).vocabulary[-1] == "once"
    vectors.write_text("Once 9 9\nonce 1 2\nfilm 3 4\nother 5 6\n")
    data = load_data(place, scale(width=2, embeddings=vectors), None)
    found = {data.vocabulary[i]: vector.tolist() for i, vector in zip(*data.vectors(2), strict=True)}
    assert found == {"film": [3.0, 4.0], "once": [1.0, 2.0]}
    vectors.write_text("film 3 5\n")
    assert load_data(place, scale(width=2, embeddings=vectors), None).fingerprint != data.fingerprint
    vectors.write_text("other 5 6\n")
    with pytest.raises(DataError, match="has a vector for none of the 6 words; name another file"):
        load_data(place, scale(width=2, embeddings=vectors), None)


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
    place = folder(tmp_path, train=lines, dev=["0\ta b"], test=["1\tb c"])
    data = load_data(place, scale(max_words=6, pipeline=tmp_path), None)
    assert data.counts()["cut_to_the_longest"] == 1
    assert int(data.train.lengths.max()) == 8
    table, whole = data.texts.table(5), parsed(lines[5].partition("\t")[2].split())
    assert (table.heads, table.relations) == (whole[:6].heads, whole.relations[:6])


def test_a_cap_keeps_the_same_texts_whatever_their_order(tmp_path):
    lines = write_sentences(tmp_path / "a.tsv", 90).read_text().splitlines(keepends=True)
    (tmp_path / "b.tsv").write_text("".join(reversed(lines)))
    one, other = (load_data(tmp_path / name, scale(train_examples=20), None) for name in ("a.tsv", "b.tsv"))
    assert len(one.train) == 20
    assert sorted(texts_of(one, "test")) == sorted(texts_of(other, "test"))
    # equal texts tie, so that the cap may fall between two of them
    assert len(set(texts_of(one, "train")) ^ set(texts_of(other, "train"))) <= 1


def test_prepared_texts_are_kept_and_follow_from_the_contents_alone(tmp_path):
    path = write_sentences(tmp_path / "a.tsv", 60)
    one = load_data(path, CPU, tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("*.npz"))) == 1
    moved = path.rename(tmp_path / "other.tsv")
    other = load_data(moved, CPU, tmp_path / "cache")
    assert one.fingerprint == other.fingerprint
    assert one.train.texts[0].values.tolist() == other.train.texts[0].values.tolist()
    moved.write_text(moved.read_text() + "pos\tone more .\n")
    assert load_data(moved, CPU, tmp_path / "cache").fingerprint != one.fingerprint


def test_texts_that_cannot_be_used_are_refused(tmp_path):
    many = [f"{i % 2}\ttext {i}" for i in range(40)]
    folder(tmp_path, few=["pos\tx", "neg\ty", "pos\tz"], many=many)
    folder(tmp_path, odd=[f"{'odd' if i == TESTED else i % 2}\tt{i}" for i in range(40)])
    folder(tmp_path, train=["0\ta b", "1\tc d", "0\te", "1\tf"], dev=["0\tx"], test=["1\ty", "7\tz", "1\tw"])
    (tmp_path / "tested").mkdir()
    folder(tmp_path / "tested", train=many, dev=["0\tx"], test=many)
    for place, changes, message in (
        ("tested", {}, "tested: the train split holds no text; add data"),
        ("few.tsv", {}, r"3 different texts cannot be cut into 10 parts"),
        ("odd.tsv", {}, r"no training text has the label 'odd'"),
        ("", {}, r"test\.tsv, line 2: label '7' does not occur in train\.tsv; expected one of 0, 1"),
        ("many.tsv", {"pipeline": Path("nowhere")}, "nowhere does not exist; expected a spaCy pipeline with a parser"),
        ("many.tsv", {"pipeline": Path("./no-package")}, "no-package does not exist; expected a spaCy pipeline"),
        # the folder may be the root of a disk, all of which must not be read
        ("many.tsv", {"pipeline": tmp_path}, r"holds no config\.cfg; expected the folder of a spaCy pipeline"),
    ):
        with pytest.raises(DataError, match=message):
            load_data(tmp_path / place, scale(**changes), None)


def test_a_batch_is_padded_on_the_right_and_says_which_sentences_it_has():
    batch = collate([Encoded(tokens=[2, 9, 9, 3], label=1, number=5), Encoded(tokens=[2, 3], label=0, number=8)])
    assert batch["tokens"].tolist() == [[2, 9, 9, 3], [2, 3, 0, 0]]
    assert (batch["labels"].tolist(), batch["numbers"].tolist()) == ([1, 0], [5, 8])
    with pytest.raises(DataError, match="no examples"):
        collate([])


@needs_a_parser
def test_a_real_parse_fits_the_words_is_made_once_and_kept(tmp_path, monkeypatch):
    pytest.importorskip("spacy")
    lines = (PUBLISHED / "cr" / "all.tsv").read_text().splitlines(keepends=True)
    path = tmp_path / "cr.tsv"
    path.write_text("".join([*lines[100:160], *lines[2000:2060]]))
    plain = load_data(path, CLASSIFICATION_SCALES["demo"], None)
    with_parses = dataclasses.replace(CLASSIFICATION_SCALES["demo"], pipeline=PIPELINE)
    data = load_data(path, with_parses, tmp_path / "cache")
    assert plain.fingerprint != data.fingerprint
    for number in range(len(data.texts.classes)):
        table = data.texts.table(number)
        assert table.words == plain.texts.table(number).words
        roots = [relation for word, (head, relation) in enumerate(zip(*table.parse(), strict=True)) if head == word]
        assert roots == ["ROOT"]
    assert {"nsubj", "amod", "obj", "advmod"} <= set(data.texts.relation_names)

    def none(*_: object, **__: object) -> None:
        raise AssertionError("parsed again")

    with monkeypatch.context() as patched:
        # a worker needs no parser
        patched.setattr(classification, "FORM", dataclasses.replace(classification.FORM, words=none))
        other = load_data(path, with_parses, tmp_path / "cache")
    assert [other.texts.table(n).parse() for n in range(20)] == [data.texts.table(n).parse() for n in range(20)]
    task = ClassificationTask()
    model, _ = attach_arm(task, parse_arm("guided"), other, with_parses, seed=2)
    assert model(**task.collate([other.train[place] for place in range(5)]))["logits"].isfinite().all()
    # text that was not cut into words has those of the pipeline
    raw = ["pos\tI don't mind, really.", "neg\tIt isn't good!", "pos\tFine, thanks."]
    path.write_text("".join(f"{line[:-1]} {number}{line[-1]}\n" for number in range(6) for line in raw))
    words = load_data(path, with_parses, None).texts.table(0).words
    assert words == ("I", "do", "n't", "mind", ",", "really", "0", ".")


PROBED = DATA / "probing"
WHOLE = dataclasses.replace(PROBING_SCALES["demo"], train_examples=None)


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


@pytest.mark.full
@needs("probing")
@pytest.mark.parametrize("name", ["sentence_length", "tree_depth", "word_content", "odd_man_out"])
def test_no_sentence_of_x_probe_is_in_two_splits_or_twice_in_one(name):
    data = load_probing(PROBED / "xprobe_en" / name, WHOLE, None)
    every = [text for split in SPLITS for text in sentences(data, split)]
    assert len(every) == len(set(every))
    lines = sum(map(len, read_probing(find_probing_file(PROBED / "xprobe_en" / name)).values()))
    assert lines == len(every) + data.repeated + data.contradicted
    assert data.contradicted == (12_876 if name == "odd_man_out" else 0)


@needs("probing")
def test_the_sample_of_the_published_files_is_read():
    for name in PROBES:
        path = PROBED / "senteval_sample" / f"{name}.txt"
        if name == "sentence_length":  # the sample shows one class
            with pytest.raises(DataError, match="has 1 labels"):
                read_probing(path)
            continue
        found = read_probing(path)
        assert sum(map(len, found.values())) == len(path.read_text().splitlines())
        assert set(found) == ({"tr", "te"} if name == "bigram_shift" else {"te"})
