"""Files of translation and of text from graphs, each with its reader."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from tempfile import TemporaryDirectory

from fuzz.made_files import Reader, lines, mutate_packed, packed, write_json
from fuzz.mutate import mutate_bytes, mutate_json, mutate_text
from headwise_lab.data.line_streams import read_lines
from headwise_lab.tasks.graph2text.data import SPECIAL, load_graphs
from headwise_lab.tasks.graph2text.ratings import CRITERIA, read_ratings
from headwise_lab.tasks.graph2text.scales import GRAPH_SCALES
from headwise_lab.tasks.graph2text.writer import _read_coder, read_requests
from headwise_lab.tasks.translation.corpora import CORPORA
from headwise_lab.tasks.translation.data import load_translation, open_prepared
from headwise_lab.tasks.translation.files import read_pairs
from lab.sealing import resealing
from lab.tasks.graph2text.graph_sets import write_agenda, write_triples
from lab.tasks.translation.translation_toy import write_toy_corpus

GRAPHS = dataclasses.replace(GRAPH_SCALES["demo"], min_count=1, train_examples=None, dev_examples=None)


# ---- translation ----


def plain_pairs(place: Path) -> Reader:
    source, target = lines(place / "a.de", "ein hund", "", "zwei"), lines(place / "a.en", "a dog", "", "two")
    return source, lambda: list(read_pairs(source, target)), mutate_text


def packed_pairs(place: Path) -> Reader:
    source, target = packed(lines(place / "a.de", "ein hund", "zwei")), lines(place / "a.en", "a dog", "two")
    return source, lambda: list(read_pairs(source, target)), mutate_packed


def talks(place: Path) -> Reader:
    source = lines(place / "train.tags.de-en.de", "<url>x</url>", "<title>Titel</title>", "ein hund")
    target = lines(place / "train.tags.de-en.en", "<url>x</url>", "<title>title</title>", "a dog")
    return source, lambda: list(read_pairs(source, target)), mutate_text


def segments(place: Path) -> Reader:
    def write(name: str, *texts: str) -> Path:
        found = [f'<seg id="{number}"> {text} &amp; &#x201e; </seg>' for number, text in enumerate(texts)]
        return lines(place / name, '<refset trglang="en">', "<doc>", *found, "</doc>")

    source, target = write("a.de.sgm", "ein hund", "zwei"), write("a.en.sgm", "a dog", "two")
    return source, lambda: list(read_pairs(source, target)), mutate_text


def parallel_text(place: Path) -> Reader:
    folder = write_toy_corpus(place, sizes=(40, 4, 4), longest=6)

    def read() -> object:
        with TemporaryDirectory(dir=place) as cache:
            return load_translation(CORPORA["multi30k"], folder, cache=Path(cache), vocabulary_size=270)

    return folder / "train.de", read, mutate_text


def prepared_pairs(place: Path) -> Reader:
    folder = write_toy_corpus(place, sizes=(40, 4, 4), longest=6)
    made = load_translation(CORPORA["multi30k"], folder, cache=place / "cache", vocabulary_size=270).folder
    record = made / "record.json"
    return record, resealing(record, lambda: open_prepared(made).summary()), mutate_json


def prepared_tokens(place: Path) -> Reader:
    folder = write_toy_corpus(place, sizes=(40, 4, 4), longest=6)
    made = load_translation(CORPORA["multi30k"], folder, cache=place / "cache", vocabulary_size=270).folder
    read = resealing(made / "record.json", lambda: list(open_prepared(made).train))
    return made / "train.source.offsets.npy", read, mutate_bytes


# ---- graphs ----


def triples(place: Path) -> Reader:
    path = write_triples(place / "mine.tsv", 40)
    return path, lambda: load_graphs(path, GRAPHS), mutate_text


def agenda(place: Path) -> Reader:
    folder = write_agenda(place / "agenda", "val", "test")
    return folder / "preprocessed.test.tsv", lambda: load_graphs(folder, GRAPHS), mutate_text


def relations(place: Path) -> Reader:
    folder = write_agenda(place / "agenda", "val", "test")
    return folder / "relations.vocab", lambda: load_graphs(folder, GRAPHS), mutate_text


def requests(place: Path) -> Reader:
    path = lines(place / "standard-input", "Fast\tlda <method> | for | text", "", "On\tlda ; text")

    def read() -> object:
        with path.open("rb") as stream:
            return list(read_requests(read_lines(stream, "standard-input"), "standard-input"))

    return path, read, mutate_text


def vocabulary(place: Path) -> Reader:
    kept = {"vocabulary": [*SPECIAL, "<method>", "a"], "types": 1, "relations": ["USED-FOR"]}
    path = write_json(place / "vocabulary.json", kept)
    return path, lambda: _read_coder(path), mutate_json


def _rating(place: Path) -> tuple[Path, Path]:
    key = {"names": ["svgd", "plain"], "runs": ["a", "b"], "set": "0f", "sides": {"3": "AB", "5": "BA"}}
    answers = [{"item": item, **{name: "A" for name, _ in CRITERIA}} for item in (3, 5)]
    return write_json(place / "rating-key.json", key), write_json(
        place / "one.json", {"rater": "one", "set": "0f", "answers": answers}
    )


def rating_key(place: Path) -> Reader:
    key, answers = _rating(place)
    return key, lambda: read_ratings(key, [answers]), mutate_json


def ratings(place: Path) -> Reader:
    key, answers = _rating(place)
    return answers, lambda: read_ratings(key, [answers]), mutate_json
