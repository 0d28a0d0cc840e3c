"""Word tables, CoNLL-U and inverse document frequencies: what they hold, and what they refuse."""

from __future__ import annotations

import gzip
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headwise as hw
from cases import cases

TREEBANK = Path(os.environ.get("HEADWISE_DATA", "")) / "ud" / "en_ewt"


@settings(max_examples=40)
@given(st.text(max_size=40))
def test_words_of_a_text_are_its_characters_but_white_space_in_order(text: str):
    table = hw.roles.WordTable.split(text)
    assert "".join(table.words) == "".join(letter for letter in text if not letter.isspace())
    assert [text[start:end] for start, end in table.spans] == list(table.words)
    assert hw.roles.WordTable(table.words).words == table.words


def test_a_part_of_a_table_keeps_what_hangs_together():
    table = hw.roles.WordTable(list("abcde"), heads=[1, 1, 4, 1, 3], relations=list("vwxyz"), rarities=[1, 2, 3, 4, 5])
    part = table[1:4]
    # b is the root, c hung on e which was cut off, d hangs on b
    assert (part.words, part.heads, part.relations) == (("b", "c", "d"), (0, 1, 0), ("w", "x", "y"))
    assert part.rarities == (2, 3, 4)
    assert [part.text[start:end] for start, end in part.spans] == ["b", "c", "d"]
    assert table[:99] == table


def depths(table: hw.roles.WordTable) -> list[int]:
    found = []
    for word in range(len(table)):
        depth, above = 0, word
        while table.heads[above] != above:
            above, depth = table.heads[above], depth + 1
            assert depth < len(table), "the heads go round in a circle"
        found.append(depth)
    return sorted(found)


def test_a_shuffled_parse_has_the_same_tree_over_other_words():
    table = hw.roles.WordTable(
        list("abcdefg"), heads=[1, 1, 1, 2, 2, 4, 5], relations=["amod", "ROOT", "nsubj", "obj", "det", "case", "x"]
    )
    shuffled = table.shuffled_parse(3)
    assert shuffled.words == table.words
    assert shuffled.heads != table.heads
    assert depths(shuffled) == depths(table)
    edges = sorted((r, table.relations[h]) for r, h in zip(table.relations, table.heads, strict=True))
    moved = sorted((r, shuffled.relations[h]) for r, h in zip(shuffled.relations, shuffled.heads, strict=True))
    assert moved == edges
    assert table.shuffled_parse(3) == shuffled
    assert table.shuffled_parse(4) != shuffled


CONLLU = """# sent_id = 1
# text = Don't go, John.
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\t_\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\t_\t_\t3\tadvmod\t_\t_
3\tgo\tgo\tVERB\t_\t_\t0\troot\t_\tSpaceAfter=No
4\t,\t,\tPUNCT\t_\t_\t5\tpunct\t_\t_
4.1\tghost\t_\t_\t_\t_\t_\t_\t_\t_
5\tJohn\tJohn\tPROPN\t_\t_\t3\tvocative\t_\tx=y|SpaceAfter=No
6\t.\t.\tPUNCT\t_\t_\t3\tpunct\t_\tSpaceAfter=No

1-2\tdu\t_\t_\t_\t_\t_\t_\t_\t_
1\tde\tde\tADP\t_\t_\t3\tcase\t_\t_
2\tle\tle\tDET\t_\t_\t3\tdet\t_\t_
3\tfilm\tfilm\tNOUN\t_\t_\t0\troot\t_\t_
"""


def conllu(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "some.conllu"
    path.write_bytes(text.encode())
    return path


@cases("ending", ["\n", "\r\n"])
def test_conllu_is_read_with_multiword_tokens_empty_nodes_and_spaces(tmp_path: Path, ending: str):
    first, second = hw.roles.read_conllu(conllu(tmp_path, CONLLU.replace("\n", ending)))
    assert first.text == "Don't go, John."
    assert first.words == ("Do", "n't", "go", ",", "John", ".")
    assert first.heads == (2, 2, 2, 4, 2, 2)
    assert first.relations[1] == "advmod"
    assert [first.text[start:end] for start, end in first.spans] == list(first.words)
    # words that do not spell their token share its characters
    assert second.text == "du film"
    assert second.spans == ((0, 2), (0, 2), (3, 7))


@cases(
    ("old", "new", "message"),
    [
        ("3\tgo\tgo\tVERB\t_\t_\t0\troot\t_\t", "3\tgo\tgo\tVERB\t0\troot\t_\t", r"conllu:6: 8 columns.*expected 10"),
        ("5\tJohn", "7\tJohn", r"conllu:9: the identifier is '7'; expected the word 5"),
        ("5\tJohn", "five\tJohn", r"conllu:9: the identifier is 'five'"),
        ("\t5\tpunct", "\tfive\tpunct", r"conllu:7: the head is 'five'"),
        ("\t5\tpunct", "\t9\tpunct", r"conllu:7: the head is 9; expected at most 6"),
        ("\t5\tpunct", "\t_\tpunct", r"conllu:7: the head is missing"),
        ("\t5\tpunct", "\t-1\tpunct", r"conllu:7: the head is '-1'; expected the number of a word"),
        ("\t5\tpunct", "\t4\tpunct", r"conllu:7: the word is its own head"),
        ("\t5\tpunct", "\t0\troot", r"conllu:7: a second root of the sentence, after that of line 6"),
        ("\t0\troot\t_\tSpace", "\t5\tx\t_\tSpace", r"conllu:4: the sentence has no root"),
        ("\t3\tvocative", "\t4\tvocative", r"conllu:7: the heads of the sentence go in a circle"),
        ("5\tJohn", "4\tJohn", r"conllu:9: the identifier is '4'; expected the word 5"),
        ("5\tJohn\t", "5\t\t", r"conllu:9: the form is empty"),
        ("1-2\tdu", "1-9\tdu", r"conllu:15: a multiword token ends at word 9; expected at most 3"),
        ("2\tle", "2-3\tx" + "\t_" * 8 + "\n2\tle", r"conllu:14: the identifier is '2-3'; expected the word 2"),
        ("5\tJohn", f"{'5' * 5000}\tJohn", r"conllu:9: the identifier is '5{60}'; expected a number"),
        ("1-2\tdu", f"1-{'2' * 5000}\tdu", r"conllu:12: the identifier is '1-2{58}'; expected a number"),
        ("\t5\tpunct", f"\t{'5' * 5000}\tpunct", r"conllu:7: the head is '5{60}'; expected the number"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, old: str, new: str, message: str):
    assert old in CONLLU
    with pytest.raises(hw.errors.DataError, match=message):
        hw.roles.read_conllu(conllu(tmp_path, CONLLU.replace(old, new)))


def test_a_conllu_file_without_sentences_or_that_is_none_is_refused(tmp_path: Path):
    with pytest.raises(hw.errors.DataError, match="holds no sentence"):
        hw.roles.read_conllu(conllu(tmp_path, "# only this\n"))
    with pytest.raises(hw.errors.DataError, match="No such file"):
        hw.roles.read_conllu(tmp_path / "absent.conllu")
    (tmp_path / "latin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(hw.errors.DataError, match="not UTF-8"):
        hw.roles.read_conllu(tmp_path / "latin")


def test_a_file_without_heads_gives_tables_without_a_parse(tmp_path: Path):
    (table,) = hw.roles.read_conllu(conllu(tmp_path, "1\ta\t_\t_\t_\t_\t_\t_\t_\t_\n"))
    assert table.heads is None
    with pytest.raises(hw.errors.DataError, match=r"'a' has no parse; parse it with"):
        table.parse()


@pytest.mark.skipif(not TREEBANK.is_dir(), reason="HEADWISE_DATA names no folder with the treebank")
def test_a_whole_treebank_is_read_as_its_own_text_says(tmp_path: Path):
    path = tmp_path / "dev.conllu"
    path.write_bytes(gzip.decompress((TREEBANK / "en_ewt-ud-dev.conllu.gz").read_bytes()))
    tables = hw.roles.read_conllu(path)
    assert hw.roles.read_conllu(TREEBANK / "en_ewt-ud-dev.conllu.gz") == tables
    lines = path.read_text(encoding="utf-8").splitlines()
    texts = [line.removeprefix("# text = ") for line in lines if line.startswith("# text = ")]
    assert len(tables) == len(texts) > 1000
    assert [table.text for table in tables] == texts


def test_idf_is_the_formula_and_an_unseen_word_is_the_rarest():
    table = hw.roles.idf([hw.roles.WordTable(["The", "film", "film"]), ["the", "plot"], ["The", "the"]])
    assert table("film") == math.log(4 / 2) + 1
    assert table("THE") == math.log(4 / 4) + 1
    assert table("unseen") == math.log(4 / 1) + 1 == table.greatest
    cased = hw.roles.idf([["The", "film"], ["the", "plot"]], lowercase=False)
    assert cased("The") == cased("plot") == math.log(3 / 2) + 1
    rated = table.rate(hw.roles.WordTable(["The", "plot", "twist"]))
    assert rated.rarities == (table("the"), table("plot"), table.greatest)
    assert rated.words == ("The", "plot", "twist")


def test_idf_is_saved_with_the_model_and_comes_back_equal(tmp_path: Path):
    table = hw.roles.idf([["naïve", "数据"], ["film"]], lowercase=False)
    table.save(tmp_path / "idf.json")
    again = hw.roles.IDF.load(tmp_path / "idf.json")
    assert again == table
    assert again("数据") == table("数据")
    assert not list(tmp_path.glob(".*"))


@cases(
    "content",
    [
        "",
        "[]",
        '{"format": 2, "documents": 1, "frequencies": {}, "lowercase": true}',
        '{"format": 1, "documents": 1, "frequencies": {"a": 2}, "lowercase": true}',
        '{"format": 1, "documents": 1, "frequencies": {"a": "1"}, "lowercase": true}',
        '{"format": 1, "documents": 1}',
        '{"format": 1, "documents": 1' + "0" * 400 + ', "frequencies": {"a": 1}, "lowercase": true}',
        '{"format": 1, "documents": 1' + "0" * 5000 + ', "frequencies": {"a": 1}, "lowercase": true}',
        '{"format": 1, "documents": 1, "frequencies": {"a": 1}, "lowercase": "no"}',
        '{"format": 1, "documents": 1, "frequencies": {"\\ud83d": 1}, "lowercase": true}',
        '{"a":' * 100_000 + "1" + "}" * 100_000,
    ],
)
def test_a_file_that_is_no_idf_is_refused_by_name(tmp_path: Path, content: str):
    path = tmp_path / "idf.json"
    path.write_text(content, encoding="utf-8")
    expected = r"idf.json holds no inverse document frequencies \(.+\); expected a file written by IDF\.save"
    with pytest.raises(hw.errors.DataError, match=expected):
        hw.roles.IDF.load(path)


def test_heads_of_numpy_become_integers():
    table = hw.roles.WordTable(["a", "film"], np.array([1, 1]), ["det", "ROOT"])
    assert [type(head) for head in table.heads] == [int, int]


def test_a_gzipped_file_is_read_and_a_broken_one_named(tmp_path: Path):
    lines = "1\tGood\t_\t_\t_\t_\t2\tamod\t_\t_\n2\tfilm\t_\t_\t_\t_\t0\troot\t_\t_\n"
    path = tmp_path / "one.conllu.gz"
    path.write_bytes(gzip.compress(lines.encode()))
    (table,) = hw.roles.read_conllu(path)
    assert (table.words, table.heads) == (("Good", "film"), (1, 1))
    for content in (lines.encode(), gzip.compress(lines.encode())[:-9], b""):
        path.write_bytes(content)
        with pytest.raises(
            hw.errors.DataError, match=r"one.conllu.gz(, after line \d: cannot be read| holds no sentence)"
        ):
            hw.roles.read_conllu(path)
