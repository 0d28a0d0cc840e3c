"""Real parses of real sentences: aligned with the words the model reads, kept on disk, and made once."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from headwise.errors import DataError
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.tasks.classification import texts
from headwise_lab.tasks.classification.data import load_data
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.tasks.classification.task import ClassificationTask
from headwise_lab.training.attach import attach_arm

DATA = Path(os.environ.get("HEADWISE_DATA", "absent"))
TRAINED = DATA.parent / "models" / "en_ewt_parser"
needs_a_parser = pytest.mark.skipif(not TRAINED.is_dir(), reason="no trained pipeline stands beside HEADWISE_DATA")
DEMO = CLASSIFICATION_SCALES["demo"]
PARSED = dataclasses.replace(DEMO, pipeline=TRAINED)


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    lines = (DATA / "classification" / "cr" / "all.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "cr.tsv").write_text("".join([*lines[100:160], *lines[2000:2060]]))
    return tmp_path / "cr.tsv"


@needs_a_parser
def test_the_words_of_a_published_set_stay_and_each_has_a_head(reviews):
    pytest.importorskip("spacy")
    plain, data = (load_data(reviews, scale, None) for scale in (DEMO, PARSED))
    assert plain.fingerprint != data.fingerprint
    for number in range(len(data.texts.words)):
        table = data.texts.table(number)
        assert table.words == plain.texts.table(number).words
        heads, relations = table.parse()
        roots = [word for word, head in enumerate(heads) if head == word]
        assert len(roots) == 1
        assert relations[roots[0]] == "ROOT"
    assert {"nsubj", "amod", "obj", "advmod"} <= set(data.texts.relation_names)


@needs_a_parser
def test_a_worker_reads_parses_that_were_made_and_needs_no_parser(reviews, tmp_path, monkeypatch):
    pytest.importorskip("spacy")
    one = load_data(reviews, PARSED, tmp_path / "cache")

    def none(*_: object, **__: object) -> None:
        raise AssertionError("parsed again")

    monkeypatch.setattr(texts, "word_tables", none)
    other = load_data(reviews, PARSED, tmp_path / "cache")
    assert [other.texts.table(n).parse() for n in range(20)] == [one.texts.table(n).parse() for n in range(20)]
    task = ClassificationTask()
    model, _ = attach_arm(task, parse_arm("guided"), other, PARSED, seed=2)
    batch = task.collate([other.train[place] for place in range(5)])
    assert model(**batch)["logits"].isfinite().all()


@needs_a_parser
def test_text_that_was_not_cut_into_words_has_those_of_the_pipeline(tmp_path):
    pytest.importorskip("spacy")
    lines = ["pos\tI don't mind, really.", "neg\tIt isn't good!", "pos\tFine, thanks."]
    path = tmp_path / "mine.tsv"
    path.write_text("".join(f"{line[:-1]} {number}{line[-1]}\n" for number in range(6) for line in lines))
    data = load_data(path, PARSED, None)
    assert data.texts.table(0).words == ("I", "do", "n't", "mind", ",", "really", "0", ".")


def test_a_pipeline_that_is_not_there_is_refused(tmp_path):
    path = tmp_path / "mine.tsv"
    path.write_text("".join(f"{number % 2}\ttext {number}\n" for number in range(20)))
    for name in ("nowhere", "./no-package"):
        with pytest.raises(
            DataError, match=f"{name.strip('./')} does not exist; expected a spaCy pipeline with a parser"
        ):
            load_data(path, dataclasses.replace(DEMO, pipeline=Path(name)), None)
    # the folder may be the root of a disk, all of which must not be read
    with pytest.raises(DataError, match=r"holds no config\.cfg; expected the folder of a spaCy pipeline"):
        load_data(path, dataclasses.replace(DEMO, pipeline=tmp_path), None)
