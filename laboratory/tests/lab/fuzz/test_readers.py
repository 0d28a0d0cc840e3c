"""The readers of tasks and roles on 10,000 broken files each: each is read, or refused in a sentence that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz.made_files import Reader
from fuzz.mutate import INPUTS, Mutation, fuzz
from lab.fuzz.corpus_files import (
    conllu,
    documents,
    objects,
    packed_conllu,
    packed_documents,
    parses,
    prepared_text,
    rarities,
    settings,
    shard,
    subwords,
    text,
    word_pieces,
    words,
)
from lab.fuzz.labeled_files import (
    classified_texts,
    comma_separated,
    glue,
    glue_with_gaps,
    logic,
    packed_texts,
    pairs,
    probed_sentences,
    probing,
    profile,
    reviews,
    sentences,
    sentences_as_words,
    sick,
    tab_separated,
    truth,
    word_vectors,
)
from lab.fuzz.pair_and_graph_files import (
    agenda,
    packed_pairs,
    parallel_text,
    plain_pairs,
    prepared_pairs,
    prepared_tokens,
    rating_key,
    ratings,
    relations,
    requests,
    segments,
    talks,
    triples,
    vocabulary,
)

READERS: tuple[Callable[[Path], Reader], ...] = (
    *(plain_pairs, packed_pairs, talks, segments, prepared_pairs, prepared_tokens),
    *(triples, agenda, relations, requests, vocabulary, rating_key, ratings),
    *(tab_separated, comma_separated, packed_texts, probing, word_vectors, glue_with_gaps),
    *(sentences, pairs, sick, reviews, profile, truth, logic),
    *(documents, packed_documents, objects, prepared_text, shard, word_pieces, subwords),
    *(conllu, packed_conllu, rarities, parses, text, settings, words),
)
GLUE = [("CoLA", "train"), ("CoLA", "test"), ("STS-B", "train"), ("RTE", "dev"), ("MNLI", "train")]
MAKERS = {maker.__name__: maker for maker in READERS} | {f"{name} {split}": glue(name, split) for name, split in GLUE}
# What is done with the texts takes longer than reading them.
LOADERS = (parallel_text, classified_texts, probed_sentences, sentences_as_words)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_a_broken_file_is_read_or_refused_by_name(name: str, tmp_path: Path):
    refuses_by_name(*MAKERS[name](tmp_path), inputs=INPUTS)


@pytest.mark.slow
@pytest.mark.parametrize("maker", LOADERS)
def test_what_is_made_of_a_broken_file_is_made_in_time(maker: Callable[[Path], Reader], tmp_path: Path):
    refuses_by_name(*maker(tmp_path), inputs=INPUTS // 10)


def refuses_by_name(path: Path, read: Callable[[], object], mutate: Mutation, *, inputs: int) -> None:
    tally = fuzz(read, path, mutate=mutate, inputs=inputs)
    folder = str(path.parent)
    unnamed = [one for one in tally.messages.values() if path.name not in one and folder not in one]
    assert not unnamed, unnamed[:5]
    long = [message for message in tally.messages.values() if len(message) > 1_000]
    assert not long, [message[:500] for message in long[:3]]
