"""Parses of spaCy become word tables, once a text, and a cache on disk gives the same ones back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import headwise as hw
from cases import cases

spacy = pytest.importorskip("spacy")

from headwise.roles.spacy import Parser  # noqa: E402

DATA = Path(os.environ.get("HEADWISE_DATA", "absent"))
TRAINED = DATA.parent / "models" / "en_ewt_parser"


@spacy.Language.component("hang_left")
def hang_left(doc):
    """A parser without weights: every token hangs on the one before it."""
    for token in doc:
        token.head = doc[max(0, token.i - 1)]
        token.dep_ = "ROOT" if token.i == 0 else f"left{token.i % 3}"
    return doc


def pipeline(name: str = "toy"):
    nlp = spacy.blank("en", meta={"name": name})
    nlp.add_pipe("hang_left", name="parser")
    return nlp


def test_a_loaded_pipeline_is_the_same_after_it_has_seen_words():
    nlp = pipeline()
    before = Parser(nlp, progress=False).digest
    Parser(nlp, progress=False)(["zorblax glorp went"])
    assert "zorblax" in nlp.vocab.strings
    assert Parser(nlp, progress=False).digest == before
    other = pipeline()
    other.vocab.vectors.resize((1, 3))
    assert Parser(other, progress=False).digest != before


@pytest.fixture
def given_texts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each call of a pipeline was given."""
    given: list[int] = []
    original = spacy.Language.pipe

    def pipe(self, texts, **settings):
        texts = list(texts)
        given.append(len(texts))
        return original(self, texts, **settings)

    monkeypatch.setattr(spacy.Language, "pipe", pipe)
    return given


TEXTS = ["A good film.", "No  white\nspace\there ", "", "naïve 👩‍👩‍👧 数据", "A good film."]


def test_white_space_is_no_word_and_what_hangs_on_it_hangs_on_its_head():
    (table,) = Parser(pipeline())(["one  two \n three"])
    assert table.words == ("one", "two", "three")
    assert table.heads == (0, 0, 1)
    assert table.spans == ((0, 3), (5, 8), (11, 16))
    assert table.text == "one  two \n three"


def test_words_that_are_given_stay_the_words():
    (table,) = Parser(pipeline())([["it", "'s", "n't", "?!"]])
    assert table.words == ("it", "'s", "n't", "?!")
    assert table.text == "it 's n't ?!"
    assert table.heads == (0, 0, 1, 2)


@cases("kept", ["memory", "disk"])
def test_a_text_is_parsed_once_and_comes_back_equal(tmp_path: Path, given_texts: list[int], kept: str):
    given_texts.clear()
    cache = tmp_path if kept == "disk" else None
    parse = Parser(pipeline(), cache)
    first = parse(TEXTS)
    assert given_texts == [4]
    assert [table.text for table in first] == TEXTS
    assert parse(TEXTS) == first
    assert parse([*TEXTS[:2], "new"])[:2] == first[:2]
    assert given_texts == [4, 1]
    if kept == "disk":
        again = Parser(pipeline(), cache)
        assert len(again._kept) == 5
        assert again(TEXTS) == first
        assert given_texts == [4, 1]


def test_another_pipeline_and_another_setting_have_parses_of_their_own(tmp_path: Path, given_texts: list[int]):
    for made in (
        Parser(pipeline(), tmp_path),
        Parser(pipeline("other"), tmp_path),
        Parser(pipeline(), tmp_path, one_sentence=False),
    ):
        made(TEXTS[:1])
    assert given_texts == [1, 1, 1]
    assert len(list(tmp_path.iterdir())) == 3
    # words and the text they make are not the same thing to a tokenizer
    Parser(pipeline(), tmp_path)([["A", "good", "film."]])
    assert given_texts == [1, 1, 1, 1]


def test_a_damaged_file_of_the_cache_is_named(tmp_path: Path):
    parse = Parser(pipeline(), tmp_path)
    parse(TEXTS)
    (path,) = tmp_path.rglob("*.spacy")
    assert path.stat().st_size < 2500
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"not a file of ours"):
        path.write_bytes(content)
        with pytest.raises(hw.errors.DataError, match=rf"{path.name} is not a file of parses .* delete it"):
            Parser(pipeline(), tmp_path)


def test_two_processes_that_parse_the_same_disturb_nobody(tmp_path: Path):
    one, other = Parser(pipeline(), tmp_path), Parser(pipeline(), tmp_path)
    assert one(TEXTS) == other(TEXTS)
    assert len(list(tmp_path.rglob("*.spacy"))) == 2
    assert Parser(pipeline(), tmp_path)(TEXTS) == one(TEXTS)


def test_bad_input_is_refused_in_a_sentence(tmp_path: Path):
    with pytest.raises(hw.errors.DataError, match=r"loaded from 'absent_pipeline'.*expected a folder or the name"):
        Parser("absent_pipeline")
    with pytest.raises(hw.errors.DataError, match="has no component; expected one with a parser"):
        Parser(spacy.blank("en"))
    parse = Parser(pipeline())
    with pytest.raises(hw.errors.DataError, match="expected a list of texts"):
        parse("a text")
    with pytest.raises(hw.errors.DataError, match="text 1 is a int"):
        parse(["a", 3])
    with pytest.raises(hw.errors.DataError, match="text 0 has a word that is empty"):
        parse([["a", " "]])
    for given_text in ("ab\ud800", ["ok", "\ud800"]):
        with pytest.raises(hw.errors.DataError, match=r"text 0 holds half a character .*errors='replace'"):
            parse([given_text])
    (tmp_path / "file").write_text("")
    with pytest.raises(hw.errors.DataError, match="cannot be created"):
        Parser(pipeline(), tmp_path / "file")(["a"])
    parse.nlp.max_length = 3
    with pytest.raises(hw.errors.DataError, match=r"a text of 4 characters is longer than the pipeline allows \(3\)"):
        parse(["abcd"])


@pytest.mark.skipif(not TRAINED.is_dir(), reason="there is no trained pipeline beside HEADWISE_DATA")
def test_a_trained_parser_gives_the_roles_a_person_would(tmp_path: Path):
    parse = Parser(TRAINED, tmp_path)
    (table,) = parse(["He really likes good films."])
    assert dict(zip(table.words, table.relations, strict=True))["films"] == "obj"
    assert [table.words[i] for i in hw.roles.Major().find(table)] == ["He", "really", "likes", "good", "films"]
    assert sum(word == head for word, head in enumerate(table.heads)) == 1
    # two sentences told to be one have one root
    assert sum(w == h for w, h in enumerate(parse(["It rains. We stay."])[0].heads)) == 1
    free = Parser(TRAINED, one_sentence=False)
    assert sum(w == h for w, h in enumerate(free(["It rains. We stay."])[0].heads)) == 2
    assert Parser(str(TRAINED), tmp_path).digest == parse.digest
