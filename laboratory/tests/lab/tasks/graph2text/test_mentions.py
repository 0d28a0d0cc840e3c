"""Mentions are the longest entities from left to right, found in time that grows with the words alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.mutate import read_in_time
from headwise_lab.tasks.graph2text.files import find_mentions, parse_triples

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


@pytest.mark.parametrize("name", LINES)
def test_a_line_of_many_entities_or_of_long_ones_is_read_in_time(name: str):
    read_in_time(lambda: parse_triples(LINES[name], "a.tsv", 1))
