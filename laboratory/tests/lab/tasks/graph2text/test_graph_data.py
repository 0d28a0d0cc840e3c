"""The graph-to-text task's data: AGENDA, a file of one's own, mentions, refusals by line, vocabulary, and neighbors."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import cases
from fuzz.mutate import read_in_time
from headwise.errors import DataError
from headwise_lab.tasks.graph2text.data import END, START, UNKNOWN, EncodedGraph, collate, load_graphs
from headwise_lab.tasks.graph2text.files import find_mentions, parse_triples, read_graphs, read_triples
from headwise_lab.tasks.graph2text.scales import GRAPH_SCALES
from lab.tasks.graph2text.graph_sets import agenda_line, write_agenda, write_triples

TOY = dataclasses.replace(
    GRAPH_SCALES["demo"], name="toy", min_count=1, train_examples=None, dev_examples=None, test_examples=None
)
PUBLISHED = Path(os.environ.get("HEADWISE_DATA", ""))


def test_agenda_without_its_training_file_trains_on_validation_and_says_so(tmp_path):
    data = load_graphs(write_agenda(tmp_path / "agenda", "val", "test"), TOY)
    assert [len(split) for split in (data.train, data.dev, data.test)] == [18, 2, 20]
    assert "without its training file" in data.summary()
    graph = data.test.graphs[0]
    assert graph.entities == (("beam", "search"), ("parsing",), ("lda",))
    assert graph.triples == ((0, "COMPARE", 1), (2, "USED-FOR", 1))
    assert graph.reference == "we use beam search for parsing , not lda , in run 100 ."


def test_agenda_with_its_training_file_has_its_own_splits(tmp_path):
    data = load_graphs(write_agenda(tmp_path / "agenda", "train", "val", "test"), TOY)
    assert [len(split) for split in (data.train, data.dev, data.test)] == [20, 20, 20]


def test_a_graph_of_a_later_split_is_left_out_of_an_earlier_one(tmp_path):
    folder = write_agenda(tmp_path / "agenda", "train", "val", "test")
    with (folder / "preprocessed.train.tsv").open("a", encoding="utf-8") as stream:
        stream.write(agenda_line(200) + "\n")
    data = load_graphs(folder, TOY)
    assert (len(data.train), data.dropped) == (20, 1)


def test_a_file_of_ones_own_has_its_mentions_found(tmp_path):
    path = tmp_path / "mine.tsv"
    path.write_text(
        "Fast Parsing\tbeam search <method> | used for | parsing <task> ; search\tBeam search, or search: for parsing.",
        encoding="utf-8",
    )
    (graph,) = read_triples(path)
    path.write_text("\ufeff" + path.read_text(encoding="utf-8"), encoding="utf-8")
    assert read_triples(path) == [graph]
    assert graph.title == ("fast", "parsing")
    assert graph.entities == (("beam", "search"), ("parsing",), ("search",))
    assert graph.types == ("method", "task", "entity")
    assert graph.triples == ((0, "used for", 1),)
    assert graph.text == (0, ",", "or", 2, ":", "for", 1, ".")


def test_a_file_of_ones_own_is_cut_into_tenths(tmp_path):
    data = load_graphs(write_triples(tmp_path / "mine.tsv", 40), TOY)
    assert [len(split) for split in (data.train, data.dev, data.test)] == [32, 4, 4]
    assert data.coder.vocabulary[:7] == ("<pad>", "<unk>", "<s>", "</s>", "<method>", "<task>", ",")


@cases(
    ("line", "said"),
    [
        ("a title\tone | two | three", "line 2: 2 fields; expected a title"),
        ("a title\tone | two\ta text", "line 2: 'one | two'; expected head | relation | tail"),
        ("a title\tone | | three\ta text", r"line 2: 'one | | three'; expected head"),
        ("a title\tone | r | <task>\ta text", None),
        ("a title\t\ta text", "line 2: ''; expected head"),
        ("a title\tone | two | three\t", "line 2: the text is empty"),
        ("a title\tone ; \ta text", "line 2: ''; expected head"),
    ],
)
def test_a_line_of_ones_own_that_does_not_fit_is_named(line, said, tmp_path):
    path = tmp_path / "mine.tsv"
    path.write_text(f"good\tone | two | three\ta text\n{line}\n", encoding="utf-8")
    if said is None:
        assert read_triples(path)[1].entities[1] == ("<", "task", ">")
        return
    with pytest.raises(DataError) as caught:
        read_triples(path)
    assert str(caught.value).startswith(f"{path}, {said}")


@cases(
    ("changed", "said"),
    [
        ({"types": "<method> <task>"}, "3 entities and 2 types"),
        ({"triples": "0 1"}, "triple '0 1'; expected three numbers"),
        ({"triples": "0 x 1"}, "triple '0 x 1'; expected three numbers"),
        ({"triples": "0 2 1"}, "expected entities below 3 and a relation below 2"),
        ({"triples": "0 1 3"}, "expected entities below 3"),
        ({"text": "we use <method_1> ."}, "mentions <method_1>; expected the number and type"),
        ({"text": "we use <method_3> ."}, "mentions <method_3>"),
        ({"text": f"we use <method_{'1' * 5000}> ."}, f"mentions <method_{'1' * 52}; expected the number"),
        ({"triples": f"0 {'1' * 5000} 1"}, "expected three numbers"),
        ({"triples": "0 -1 1"}, "triple '0 -1 1'; expected three numbers"),
        ({"text": " "}, "the text is empty"),
        ({"entities": "beam search ;  ; lda"}, "an entity is empty"),
    ],
)
def test_a_line_of_agenda_that_does_not_fit_is_named(changed, said, tmp_path):
    folder = write_agenda(tmp_path / "agenda", "val", "test")
    path = folder / "preprocessed.val.tsv"
    path.write_text(agenda_line(1) + "\n" + agenda_line(2, **changed) + "\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_graphs(folder)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert said in str(caught.value)


def test_places_without_a_set_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_graphs(tmp_path / "nowhere")
    with pytest.raises(DataError, match="neither AGENDA"):
        read_graphs(tmp_path)
    with pytest.raises(DataError, match="lacks"):
        read_graphs(write_agenda(tmp_path / "agenda", "val"))
    (tmp_path / "empty.tsv").write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match="has no lines"):
        read_graphs(tmp_path / "empty.tsv")


def test_mentions_are_ids_behind_the_vocabulary_and_are_read_as_types(tmp_path):
    data = load_graphs(write_agenda(tmp_path / "agenda", "val", "test"), dataclasses.replace(TOY, longest=6))
    coder = data.coder
    size, one = len(coder.vocabulary), data.dev[0]
    assert [word - size for word in one["text"] if word >= size] == [0, 1, 2]
    assert one["text"][-1] == END
    # the number of the run, next to the last, is in few texts and may have no id
    assert coder.decode(one["text"])[:-2] == list(data.dev.graphs[0].text[:-2])
    batch = collate([one])
    assert batch["inputs"][0, 0] == START
    assert coder.vocabulary[batch["inputs"][0, 3]] == "<method>"
    # a training text that is cut has no end
    assert len(data.train[0]["text"]) == 7
    assert END not in data.train[0]["text"]
    strange = dataclasses.replace(data.dev.graphs[0], types=("x", "task", "method"), triples=((0, "NEW", 1),))
    assert coder.encode(strange)["types"][0] == UNKNOWN
    assert coder.encode(strange)["triples"] == [(0, 2, 1)]


def test_neighbors_are_those_of_the_paper():
    large = EncodedGraph(title=[5], entities=[[6], [7], [8]], types=[4, 4, 4], triples=[(0, 4, 2)], text=[3], words=9)
    small = EncodedGraph(title=[5, 6], entities=[[6, 6]], types=[4], triples=[], text=[9, 3], words=9)
    batch = collate([large, small])
    assert batch["nodes"].tolist() == [[1, -1, -2, -3, 4, 5], [1, -4, 0, 0, 0, 0]]
    root, a, b, c, forward, inverse = range(6)
    edges = {(root, n) for n in (a, b, c)} | {(n, root) for n in (a, b, c)} | {(n, n) for n in range(6)}
    edges |= {(forward, a), (c, forward), (inverse, c), (a, inverse)}
    assert {tuple(edge) for edge in batch["neighbors"][0].nonzero().tolist()} == edges
    assert batch["neighbors"][1].nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert batch["labels"].tolist() == [[3, -100], [9, 3]]


@pytest.mark.skipif(not (PUBLISHED / "agenda").is_dir(), reason="HEADWISE_DATA has no AGENDA")
def test_the_published_files_are_read_whole():
    data = load_graphs(PUBLISHED / "agenda", dataclasses.replace(GRAPH_SCALES["cpu"], dev_examples=None))
    assert [len(split) for split in (data.train, data.dev, data.test)] == [900, 100, 1000]
    assert len(data.coder.relations) == 7
    assert sum(len(graph.triples) for graph in data.test.graphs) > 4000


WORDS = st.lists(st.sampled_from("abc"), min_size=1, max_size=5).map(tuple)


def by_comparison(words: Sequence[str], entities: Sequence[tuple[str, ...]]) -> Iterator[str | int]:
    longest_first = sorted(range(len(entities)), key=lambda number: -len(entities[number]))
    place = 0
    while place < len(words):
        for number in longest_first:
            if tuple(words[place : place + len(entities[number])]) == entities[number]:
                yield number
                place += len(entities[number])
                break
        else:
            yield words[place]
            place += 1


@given(st.lists(st.sampled_from("abcd"), max_size=30), st.lists(WORDS, max_size=6, unique=True))
def test_mentions_are_those_of_comparing_every_entity_at_every_word(words: list[str], entities: list[tuple[str, ...]]):
    assert list(find_mentions(words, entities)) == list(by_comparison(words, entities))


ENTITIES = [f"entity {number}" for number in range(8000)]
LINES = {
    # took 38 s
    "8,000 entities": "\t".join(["title", " ; ".join(ENTITIES), "a text of " + " , ".join(ENTITIES)]),
    "8,000 triples": "\t".join(["title", " ; ".join(f"{one} | of | {one} x" for one in ENTITIES), "a text"]),
    "one long entity": "\t".join(["title", "a " * 100_000 + "b", "a " * 200_000]),
    "entities within one another": "\t".join(["title", " ; ".join("a " * n + "b" for n in range(600)), "a " * 100_000]),
}


@cases("name", LINES)
def test_a_line_of_many_entities_or_of_long_ones_is_read_in_time(name: str):
    read_in_time(lambda: parse_triples(LINES[name], "a.tsv", 1))
