"""The readers of tasks and roles on 10,000 broken files each: each is read, or refused in a sentence that names it."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import headwise as hw
from fuzz.mutate import INPUTS, Mutation, fuzz, mutate_bytes, mutate_json, mutate_json_lines, mutate_text
from headwise.digests import FILES, OWN
from headwise.input_files import name_in_errors
from headwise.lab.data.documents import find_files, read_pieces
from headwise.lab.data.encoded import read_sentences
from headwise.lab.data.labeled_texts import Layout, read_labeled, read_texts
from headwise.lab.data.line_streams import read_lines
from headwise.lab.data.probing_files import drop_repeats, read_probing
from headwise.lab.data.subwords import read_subwords
from headwise.lab.data.word_vectors import pack_vectors
from headwise.lab.experiment.arm_text import parse_arm
from headwise.lab.experiment.settings import RunSettings
from headwise.lab.frozen.runs import read_words
from headwise.lab.tasks.classification.data import load_data
from headwise.lab.tasks.classification.probing_data import load_probing
from headwise.lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise.lab.tasks.glue.files import read_split
from headwise.lab.tasks.graph2text.coder import SPECIAL
from headwise.lab.tasks.graph2text.data import load_graphs
from headwise.lab.tasks.graph2text.rating_form import CRITERIA
from headwise.lab.tasks.graph2text.ratings import read_ratings
from headwise.lab.tasks.graph2text.scales import GRAPH_SCALES
from headwise.lab.tasks.graph2text.writer import _read_coder, read_requests
from headwise.lab.tasks.logic.data import load_logic
from headwise.lab.tasks.logic.generator import generate
from headwise.lab.tasks.logic.scales import LogicScale
from headwise.lab.tasks.pretraining.wordpieces import read_word_pieces
from headwise.lab.tasks.sentence.data import load_sentences
from headwise.lab.tasks.sentence.files import read_set
from headwise.lab.tasks.sentence.scales import SENTENCE_SCALES
from headwise.lab.tasks.translation.corpora import CORPORA
from headwise.lab.tasks.translation.data import load_translation, open_prepared
from headwise.lab.tasks.translation.files import read_pairs
from headwise.lab.training.trained import read_arm, read_finished, read_scale
from headwise.roles.spacy_cache import Parse, ParseCache
from lab.tasks.classification.probing_toy import write_probing
from lab.tasks.glue.glue_toy import toy_words, write_glue
from lab.tasks.graph2text.graph_sets import write_agenda, write_triples
from lab.tasks.logic.logic_toy import TOY
from lab.tasks.pretraining.pretraining_toy import document, load_text, open_text, small, write_jsonl
from lab.tasks.sentence.sentence_sets import sentence, write_pairs, write_profiles, write_texts
from lab.tasks.translation.translation_toy import write_toy_corpus

# The file to change, what reads it and all that belongs to it, and how it is changed.
Reader = tuple[Path, Callable[[], object], Mutation]
CLASSIFICATION = dataclasses.replace(CLASSIFICATION_SCALES["demo"], train_examples=None, pipeline=None, embeddings=None)
SENTENCE = dataclasses.replace(SENTENCE_SCALES["demo"], train_examples=None, positive=None, embeddings=None)
GRAPHS = dataclasses.replace(GRAPH_SCALES["demo"], min_count=1, train_examples=None, dev_examples=None)
PARSE = Parse((0, 4), (3, 8), (1, 1), ("det", "ROOT"))


def mutate_packed(content: bytes, draw: random.Random) -> bytes:
    """Return a packed file whose text is changed, or whose bytes are."""
    if draw.random() < 0.5:
        return mutate_bytes(content, draw)
    return gzip.compress(mutate_text(gzip.decompress(content), draw), compresslevel=1)


def lines(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def packed(path: Path) -> Path:
    place = path.with_name(f"{path.name}.gz")
    place.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return place


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def unsealed(folder: Path) -> Path:
    """Return a prepared folder as an earlier version wrote it, without digests: no change shows but in what is read."""
    path = folder / "record.json"
    kept = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {name: value for name, value in kept.items() if name not in (FILES, OWN)})
    return folder


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
    made = unsealed(load_translation(CORPORA["multi30k"], folder, cache=place / "cache", vocabulary_size=270).folder)
    return made / "record.json", lambda: open_prepared(made).summary(), mutate_json


def prepared_tokens(place: Path) -> Reader:
    folder = write_toy_corpus(place, sizes=(40, 4, 4), longest=6)
    made = unsealed(load_translation(CORPORA["multi30k"], folder, cache=place / "cache", vocabulary_size=270).folder)
    return made / "train.source.offsets.npy", lambda: list(open_prepared(made).train), mutate_bytes


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


# ---- labeled texts ----


def labeled(path: Path) -> Callable[[], object]:
    return lambda: read_labeled(Layout("all"), {"all": path})


def tab_separated(place: Path) -> Reader:
    path = write_texts(place / "a.tsv", 60)
    return path, labeled(path), mutate_text


def classified_texts(place: Path) -> Reader:
    path = write_texts(place / "a.tsv", 60)
    return path, lambda: load_data(path, CLASSIFICATION, None), mutate_text


def comma_separated(place: Path) -> Reader:
    rows = [f'"{sentence(number, str(number % 2))}, ""so""",{number % 2}' for number in range(60)]
    path = lines(place / "a.csv", "text,label", *rows)
    return path, labeled(path), mutate_text


def packed_texts(place: Path) -> Reader:
    path = packed(write_texts(place / "a.tsv", 60))
    return path, lambda: read_texts(path), mutate_packed


def probing(place: Path) -> Reader:
    path = write_probing(place / "past_present.txt", {"tr": 60, "va": 20, "te": 20})
    return path, lambda: drop_repeats(read_probing(path)), mutate_text


def probed_sentences(place: Path) -> Reader:
    path, _, mutate = probing(place)
    return path, lambda: load_probing(path, CLASSIFICATION, None), mutate


def word_vectors(place: Path) -> Reader:
    path = lines(place / "glove.txt", "the 0.1 -2e-3 3", "new york 1 2 3", "film 4 5 6")
    return path, lambda: pack_vectors(path, {"the", "film", "new york"}, 3), mutate_text


def glue(name: str, split: str) -> Callable[[Path], Reader]:
    def make(place: Path) -> Reader:
        folder = write_glue(place / "glue", train=30, judged=12) / name
        return folder / f"{split}.tsv", lambda: read_split(folder, split), mutate_text

    return make


def glue_with_gaps(place: Path) -> Reader:
    rows = [f"{number}\ta\tb\tone {number}?\tand {number}?\t{number % 2}" for number in range(20)]
    path = lines(place / "QQP" / "train.tsv", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", *rows, "21\ta")
    return path, lambda: read_split(path.parent, "train"), mutate_text


# ---- the sentence task ----


def sentences(place: Path) -> Reader:
    path = write_texts(place / "all.tsv", 60)
    return path, lambda: read_set(path), mutate_text


def sentences_as_words(place: Path) -> Reader:
    path = write_texts(place / "all.tsv", 60)
    return path, lambda: load_sentences(path, SENTENCE, None), mutate_text


def pairs(place: Path) -> Reader:
    folder = write_pairs(place / "snli", 40)
    return folder / "train.tsv", lambda: read_set(folder), mutate_text


def sick(place: Path) -> Reader:
    header = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment"
    for split in ("train", "trial", "test_annotated"):
        rows = [f"{n}\tone {split} {n}\tother {n}\t3.2\t{('NEUTRAL', 'ENTAILMENT')[n % 2]}" for n in range(20)]
        lines(place / f"SICK_{split}.txt", header, *rows)
    return place / "SICK_train.txt", lambda: read_set(place), mutate_text


def reviews(place: Path) -> Reader:
    rows = [json.dumps({"stars": 1.0 + n % 5, "text": f"review\n{n}", "useful": 0}) for n in range(60)]
    path = lines(place / "review.json", *rows)
    return path, lambda: read_set(place), mutate_json_lines


def profile(place: Path) -> Reader:
    folder = write_profiles(place / "pan")
    return folder / "a3.xml", lambda: read_set(folder), mutate_text


def truth(place: Path) -> Reader:
    folder = write_profiles(place / "pan")
    return folder / "truth.txt", lambda: read_set(folder), mutate_text


# ---- logic ----

LOGIC: LogicScale = dataclasses.replace(TOY, train_operators=1, test_bins=(1,), train_examples=None, dev_examples=None)


def logic(place: Path) -> Reader:
    for pair in generate(600, seed=1, max_operators=1):
        split = "test" if pair.operators == 1 and len(pair.premise) % 3 == 0 else "train"
        with (place / f"{split}{pair.operators}").open("a", encoding="utf-8") as stream:
            stream.write(f"{pair.relation}\t{pair.premise}\t{pair.hypothesis}\n")
    return place / "train1", lambda: load_logic(place, LOGIC, None), mutate_text


# ---- pre-training ----


def documents(place: Path) -> Reader:
    path = lines(place / "a.txt", *(f"{document(number)}\n" for number in range(8)))
    return path, lambda: [list(read_pieces(found)) for found in find_files(place)], mutate_text


def packed_documents(place: Path) -> Reader:
    path = packed(lines(place / "a.txt", *(f"{document(number)}\n" for number in range(8))))
    return path, lambda: list(read_pieces(path)), mutate_packed


def objects(place: Path) -> Reader:
    path = lines(place / "a.jsonl", *(json.dumps({"id": n, "text": document(n)}) for n in range(8)))
    return path, lambda: list(read_pieces(path)), mutate_json_lines


def prepared_text(place: Path) -> Reader:
    made = unsealed(load_text(write_jsonl(place / "a.jsonl.gz", 120), small(), place / "cache").folder)

    def read() -> object:
        data = open_text(made, 8, 8)
        return data.summary(), data.train[0], data.dev[0], data.test[0]

    return made / "record.json", read, mutate_json


def shard(place: Path) -> Reader:
    made = unsealed(load_text(write_jsonl(place / "a.jsonl.gz", 120), small(), place / "cache").folder)
    return made / "train-00000.npy", lambda: open_text(made, 8, 8).train[0], mutate_bytes


def word_pieces(place: Path) -> Reader:
    path = place / "tokenizer.json"
    path.write_text(toy_words().to_json(), encoding="utf-8")

    def read() -> object:
        found = read_word_pieces(path)
        with name_in_errors(path):
            return found.continuing, found.encode_batch(["a small bird [SEP]"])

    return path, read, mutate_json


def subwords(place: Path) -> Reader:
    made = load_translation(CORPORA["multi30k"], write_toy_corpus(place), cache=place / "cache", vocabulary_size=270)
    path = made.folder / "tokenizer.json"

    def read() -> object:
        found = read_subwords(path)
        with name_in_errors(path):
            return found.vocabulary_size, found.decode(found.encode("a small dog </s>"))

    return path, read, mutate_json


# ---- roles and runs ----


def conllu(place: Path) -> Reader:
    rows = ["1-2 du _ _ _ _ _ _ _ _", "1 de de ADP _ _ 3 case _ _", "2 le le DET _ _ 3 det _ _"]
    rows += ["3 film film NOUN _ _ 0 root _ SpaceAfter=No", "3.1 x _ _ _ _ _ _ _ _", "", "# text = a", "1 a" + " _" * 8]
    path = lines(place / "some.conllu", *(row.replace(" ", "\t") for row in rows))
    return path, lambda: hw.read_conllu(path), mutate_text


def packed_conllu(place: Path) -> Reader:
    path = packed(conllu(place)[0])
    return path, lambda: hw.read_conllu(path), mutate_packed


def rarities(place: Path) -> Reader:
    path = place / "idf.json"
    hw.idf([["naïve", "数据"], ["film"], ["a", "film"]]).save(path)
    return path, lambda: hw.IDF.load(path)("film"), mutate_json


def parses(place: Path) -> Reader:
    cache = ParseCache(place, b"pipeline")
    cache.add({b"0123456789abcdef": PARSE, b"fedcba9876543210": PARSE})
    (path,) = cache.folder.iterdir()
    return path, lambda: ParseCache(place, b"pipeline"), mutate_bytes


def text(place: Path) -> Reader:
    path = lines(place / "a.txt", "A sentence.", "", "Another one.")
    return path, lambda: read_sentences(path), mutate_text


def settings(place: Path) -> Reader:
    record = RunSettings("logic", TOY, parse_arm("em"), seed=3).record()
    path = write_json(place / "settings.json", record)
    # as version 0.1 wrote it, without digests
    write_json(place / "result.json", {"task": "logic"})

    def read() -> object:
        found = read_finished(place, "logic")
        return read_scale(place, found, LogicScale), read_arm(place, found)

    return path, read, mutate_json


def words(place: Path) -> Reader:
    path = write_json(place / "vocabulary.json", {"vocabulary": ["a", "b"], "labels": ["0", "1"]})
    return path, lambda: read_words(place, "labels"), mutate_json


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
