"""Reading the sets of the sentence task, and cutting, thinning and encoding them."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from fuzz.mutate import read_in_time
from headwise.errors import DataError, SettingError
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES, SentenceScale
from headwise_lab.tasks.sentence.task import load_sentences
from headwise_lab.texts import words
from headwise_lab.texts.sets import read_set
from lab.tasks.sentence.sentence_sets import sentence, write_pairs, write_profiles, write_texts

spacy = pytest.importorskip("spacy")

SCALE = dataclasses.replace(SENTENCE_SCALES["demo"], name="toy", train_examples=None, min_count=1)
PUBLISHED = Path(os.environ.get("HEADWISE_DATA", ""))


def scale(**changes: object) -> SentenceScale:
    return dataclasses.replace(SCALE, **changes)


def texts_of(data, split: str) -> list[str]:
    return [" ".join(words) for words in data.words(getattr(data, split))]


def test_a_file_of_ones_own_is_cut_by_its_texts_and_encoded(tmp_path):
    path = write_texts(tmp_path / "mine.tsv", 100)
    data = load_sentences(path, SCALE, tmp_path / "cache")
    assert [len(data.train), len(data.dev), len(data.test)] == [80, 10, 10]
    again = load_sentences(path, SCALE, tmp_path / "cache")
    assert again.fingerprint == data.fingerprint
    assert again.train.texts[0].values.tolist() == data.train.texts[0].values.tolist()
    one = data.train[3]
    known = [data.vocabulary[token] for token in one["tokens"]]
    assert " ".join(known) == texts_of(data, "train")[3]
    assert data.labels[one["label"]] == ("1" if {"awful", "dirty"} & {*known} else "0")
    # a word of test that training does not have is unknown
    assert all(token < len(data.vocabulary) for text in data.test.texts for token in text.values)
    assert data.counts()["test_words_unknown"] > 0


def test_words_are_those_of_spacys_tokenizer_in_lower_case_and_cut(tmp_path):
    path = tmp_path / "mine.tsv"
    path.write_text("".join(f"{n % 2}\tIt Didn't  work, #{n} $5!\n" for n in range(40)), encoding="utf-8")
    data = load_sentences(path, scale(max_words=5), None)
    assert texts_of(data, "train")[0] == "it did n't work ,"
    assert data.texts.cut == 40


def test_a_word_of_any_length_is_cut_in_time_and_lines_share_a_tokenizer(monkeypatch):
    made: list[str] = []
    blank = spacy.blank
    monkeypatch.setattr(spacy, "blank", lambda name: made.append(name) or blank(name))
    words._make_tokenizer.cache_clear()
    assert [*words.tokenize(["It didn't.", "It did."])] == [["it", "did", "n't", "."], ["it", "did", "."]]
    # a hundred thousand brackets took minutes
    text = f"It didn't {'(' * 100_000} end, {'x' * 1_000} {'y' * 1_050}."
    found = []
    read_in_time(lambda: found.extend(next(words.locate_words([text]))))
    assert all(text[start:end].lower() == word for word, (start, end) in found)
    others = [word for word, _ in found if word != "("]
    assert others == ["it", "did", "n't", "end", ",", "x" * 1_000, *["y" * 100] * 10, "y" * 50, "."]
    assert len(found) == len(others) + 100_000
    assert made == ["en"]


def test_a_premise_or_an_author_is_in_one_split_alone(tmp_path):
    pairs = tmp_path / "pairs.tsv"
    lines = [f"{n % 2}\tpremise {n // 3} here\thypothesis {n}" for n in range(90)]
    pairs.write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = load_sentences(pairs, SCALE, None)
    assert data.pairs
    assert len(data.train[0]["second"]) == 2
    found = [{text.split()[1] for text in texts_of(data, split)} for split in ("train", "dev", "test")]
    assert all(found)
    assert not found[0] & found[1]
    assert not found[0] & found[2]
    tweets = load_sentences(write_profiles(tmp_path / "pan"), SCALE, None)
    authors = [{text.split()[3] for text in texts_of(tweets, split)} for split in ("train", "dev", "test")]
    assert sum(map(len, authors)) == len(set.union(*authors)) == 12


def test_pans_markup_is_taken_off_and_its_ages_are_the_labels(tmp_path):
    folder = write_profiles(tmp_path, authors=2, tweets=1)
    found = read_set(folder)
    assert [(one.label, one.texts, one.group) for one in found.splits["all"]] == [
        ("18-24", ("tweet 0 of 0 & friends",), "a0"),
        ("25-34", ("tweet 0 of 1 & friends",), "a1"),
    ]
    for text, read in (
        ("<documents><document><![CDATA[<p class='x'>a < b > c <br/>d</p>]]></document></documents>", "a < b > c d"),
        (f"<document>one <b>two</b> &amp;#{'9' * 5000}; <![CDATA[three]]></document>", "one two \ufffd three"),
    ):
        (folder / "a0.xml").write_text(f"<author>{text}</author>", encoding="utf-8")
        assert read_set(folder).splits["all"][0].texts == (read,)
    # an author whose age is not known is left out
    write_profiles(folder, authors=3, tweets=2)
    (folder / "truth.txt").write_text("a0:::f:::18-24\na1:::m:::XX-XX\na2:::f:::25-34\n", encoding="utf-8")
    found = read_set(folder)
    assert {(one.group, one.label) for one in found.splits["all"]} == {("a0", "18-24"), ("a2", "25-34")}
    assert found.description == "tweets by their author's age (1 authors of unknown age left out)"
    assert [path.name for path in found.paths] == ["a0.xml", "a2.xml"]


def test_a_profile_that_does_not_fit_is_refused_by_its_file(tmp_path):
    for number, (name, content, message) in enumerate(
        (
            ("truth.txt", "a0:::female:::18-24\nnobody", "line 2: 'nobody'; expected author:::gender:::age"),
            ("truth.txt", "a0:::female:::18-24", "no line for author 'a1'"),
            ("truth.txt", "a0:::f:::18-24\na1:::f:::25-34\na9:::f:::25-34", "names author 'a9'"),
            ("truth.txt", "a0:::f:::18-24\na0:::f:::25-34", "line 2: author 'a0' occurs a second time"),
            ("truth.txt", "a0:::f:::XX-XX\na1:::f:::XX-XX", "knows the age of no author"),
            ("a0.xml", "<author>", "a0.xml, line 1: no XML that can be read"),
            ("a0.xml", "<author>\n<document>&x;</document></author>", "a0.xml, line 2: no XML .*undefined entity"),
            (
                "a0.xml",
                '<?xml version="1.0" encoding="nothing"?><author/>',
                "a0.xml, line 1: no XML .*unknown encoding",
            ),
            ("a0.xml", '<?xml version="1.0" encoding="utf-7"?><author/>', "a0.xml, line 1: .*multi-byte encodings"),
            ("a0.xml", '<?xml version="1.0" encoding="idna"?><author/>', "a0.xml, line 1: no XML .*: convert the file"),
        )
    ):
        folder = write_profiles(tmp_path / str(number), authors=2)
        (folder / name).write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=message):
            read_set(folder)


def test_yelps_own_file_and_its_parts_are_read(tmp_path):
    reviews = tmp_path / "own" / "review.json.gz"
    reviews.parent.mkdir()
    lines = [json.dumps({"stars": 1.0 + n % 5, "text": f"review\n{n}"}) for n in range(60)]
    reviews.write_bytes(gzip.compress("\n".join(lines).encode()))
    found = read_set(reviews.parent).splits["all"]
    assert (found[6].label, found[6].texts) == ("2", ("review 6",))
    deep, huge = '{"stars":' * 100_000, "9" * 5000
    for line in (
        *(deep, f'{{"stars": {huge}, "text": ""}}', '{"stars": true, "text": ""}', '{"stars": 2.5, "text": ""}'),
        *('{"stars": 2.0}', '{"stars": 2, "text": "\\ud83d"}', '{"stars": 2, "text": null}', "[]"),
        '{"stars": Infinity, "text": "fine"}',
    ):
        reviews.write_bytes(gzip.compress(f"{lines[0]}\n{line}\n".encode()))
        with pytest.raises(DataError, match=r"line 2: expected a JSON object with stars and text \(.+\); correct or"):
            read_set(reviews.parent)
    for name in ("part1.tsv", "part2.tsv"):
        write_texts(tmp_path / "parts" / name, 30)
    assert len(read_set(tmp_path / "parts").splits["all"]) == 60


def test_snli_without_its_training_file_is_sick(tmp_path):
    folder = tmp_path / "snli"
    (folder / "sick").mkdir(parents=True)
    (folder / "dev.tsv").write_text("neutral\ta\tb\n", encoding="utf-8")
    header = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\r\n"
    for name in ("train", "trial", "test_annotated"):
        (folder / "sick" / f"SICK_{name}.txt").write_text(
            header + "1\tA dog runs\tA cat sits\t2.5\tNEUTRAL\r\n2\tA dog runs\tIt is a dog\t4\tENTAILMENT\r\n",
            encoding="utf-8",
        )
    found = read_set(folder)
    assert "training file is absent" in found.description
    assert found.splits["dev"][0].texts == ("A dog runs", "A cat sits")
    assert [one.label for one in found.splits["train"]] == ["neutral", "entailment"]


def test_what_stands_in_test_is_left_out_of_training_and_undecided_pairs_are_dropped(tmp_path):
    folder = write_pairs(tmp_path, 40)
    train, test = folder / "train.tsv", folder / "test.tsv"
    first = test.read_text().splitlines()[0]
    train.write_text(train.read_text() + first + "\n-\tnobody\tagreed\n", encoding="utf-8")
    data = load_sentences(folder, SCALE, None)
    assert (len(data.train), data.dropped) == (40, 1)
    assert "1 left out of training or dev" in data.summary()


def test_the_share_of_a_label_is_thinned_by_texts_alone(tmp_path):
    path = write_texts(tmp_path / "mine.tsv", 400)
    data = load_sentences(path, scale(positive=0.2), None)
    for split in (data.train, data.dev, data.test):
        assert split.labels.mean() == pytest.approx(0.2, abs=0.02)
    # order in the file does not matter
    lines = path.read_text().splitlines()
    path.write_text("\n".join(reversed(lines)) + "\n", encoding="utf-8")
    other = load_sentences(path, scale(positive=0.2), None)
    assert {*texts_of(other, "train")} == {*texts_of(data, "train")}
    with pytest.raises(SettingError, match="between 0 and 1"):
        scale(positive=1.0)


def test_what_does_not_fit_is_refused(tmp_path):
    path = write_texts(tmp_path / "mine.tsv", 400)
    other = "".join(f"{'ab'[n % 2]}\t{sentence(n, '1')}\n" for n in range(40))
    for content, changes, message in (
        (path.read_text(), {"positive": 0.7}, "less than 70"),
        (other, {"positive": 0.2}, "needs labels 0 and 1"),
        ("0\tone\ttwo\n1\tone\n", {}, "line 2: 2 fields; expected 3"),
        ("0\tone\ttwo\n\tone\ttwo\n", {}, "line 2: the label is empty"),
        ("0\tone\n0\ttwo\n", {}, "one label"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=message):
            load_sentences(path, scale(**changes), None)


def test_a_header_says_what_the_columns_are(tmp_path):
    one, two = ("it is fine",), ("a dog runs", "it moves")
    for header, row, texts in (
        ("sentiment\ttext\tsource", "pos\tit is fine\tweb", one),
        ("target\treview\tauthor", "pos\tit is fine\tann", one),
        ("id\tclass\ttext", "7\tpos\tit is fine", one),
        ("class\tpremise\thypothesis", "pos\ta dog runs\tit moves", two),
        ("category\tsentence1\tsentence2\tgold_label", "fiction\ta dog runs\tit moves\tpos", two),
        ("id\tsentence2\tlabel\tsentence1", "7\tit moves\tpos\ta dog runs", two),
    ):
        other = row.replace("pos", "neg")
        (tmp_path / "mine.tsv").write_text(f"{header}\n{row}\n{other}\n", encoding="utf-8")
        found = [(one.label, one.texts) for one in read_set(tmp_path / "mine.tsv").splits["all"]]
        assert found == [("pos", texts), ("neg", texts)]
    # without one a file of pairs may begin with any label
    (tmp_path / "mine.tsv").write_text("y\ta dog runs\tit moves\nn\ta cat\ta dog\n", encoding="utf-8")
    assert [one.label for one in read_set(tmp_path / "mine.tsv").splits["all"]] == ["y", "n"]


def test_vectors_are_read_and_their_words_kept_however_rare(tmp_path):
    path = write_texts(tmp_path / "mine.tsv", 60)
    vectors = tmp_path / "vectors.txt"
    width = 4
    vectors.write_text("awful 1 2 3 4\nabsent 1 1 1 1\n7 0 0 0 9\n", encoding="utf-8")
    data = load_sentences(path, scale(embeddings=vectors, width=width, min_count=50), tmp_path / "cache")
    ids, known = data.vectors(width)
    assert {data.vocabulary[index] for index in ids} <= {"awful", "7"}
    assert [1.0, 2.0, 3.0, 4.0] in known.tolist()
    assert load_sentences(path, scale(width=width), None).fingerprint != data.fingerprint


@pytest.mark.skipif(not (PUBLISHED / "yelp").is_dir(), reason="HEADWISE_DATA has no Yelp reviews")
def test_the_published_sets_are_read_whole():
    sizes = {
        name: len(next(iter(found.splits.values())))
        for name in ("yelp", "snli", "cyberbullying/twitter.tsv")
        for found in [read_set(PUBLISHED / name)]
    }
    assert sizes == {"yelp": 10_000, "snli": 4_500, "cyberbullying/twitter.tsv": 16_848}
    labels = np.unique([one.label for one in read_set(PUBLISHED / "yelp").splits["all"]])
    assert labels.tolist() == ["1", "2", "3", "4", "5"]
