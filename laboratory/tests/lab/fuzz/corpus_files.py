"""Files of documents, word pieces, parses and runs, each with its reader."""

from __future__ import annotations

import json
from pathlib import Path

import spacy

import headwise as hw
from fuzz.made_files import Reader, lines, mutate_packed, packed, write_json
from fuzz.mutate import mutate_bytes, mutate_json, mutate_json_lines, mutate_text
from headwise.input_files import name_in_errors
from headwise.roles.spacy import Parser
from headwise.texts.batching import read_sentences
from headwise_lab.data.documents import find_files, read_pieces
from headwise_lab.data.subwords import read_subwords
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.run_folder import write_result
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.frozen.runs import read_words
from headwise_lab.tasks.logic.scales import LogicScale
from headwise_lab.tasks.pretraining.wordpieces import read_word_pieces
from headwise_lab.tasks.translation.corpora import CORPORA
from headwise_lab.tasks.translation.data import load_translation
from headwise_lab.training.trained import read_arm, read_finished, read_scale
from lab.sealing import resealing
from lab.tasks.glue.glue_toy import toy_words
from lab.tasks.logic.logic_toy import TOY
from lab.tasks.pretraining.pretraining_toy import document, load_text, open_text, small, write_jsonl
from lab.tasks.translation.translation_toy import write_toy_corpus

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
    made = load_text(write_jsonl(place / "a.jsonl.gz", 120), small(), place / "cache").folder

    def read() -> object:
        data = open_text(made, 8, 8)
        return data.summary(), data.train[0], data.dev[0], data.test[0]

    return made / "record.json", resealing(made / "record.json", read), mutate_json


def shard(place: Path) -> Reader:
    made = load_text(write_jsonl(place / "a.jsonl.gz", 120), small(), place / "cache").folder
    read = resealing(made / "record.json", lambda: open_text(made, 8, 8).train[0])
    return made / "train-00000.npy", read, mutate_bytes


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
    return path, lambda: hw.roles.read_conllu(path), mutate_text


def packed_conllu(place: Path) -> Reader:
    path = packed(conllu(place)[0])
    return path, lambda: hw.roles.read_conllu(path), mutate_packed


def rarities(place: Path) -> Reader:
    path = place / "idf.json"
    hw.roles.idf([["naïve", "数据"], ["film"], ["a", "film"]]).save(path)
    return path, lambda: hw.roles.IDF.load(path)("film"), mutate_json


def parses(place: Path) -> Reader:
    nlp = spacy.blank("en")
    nlp.add_pipe("parser").add_label("dep")
    nlp.initialize()
    parse = Parser(nlp, place, progress=False)
    parse(["A sentence.", "Another one."])
    (path,) = place.rglob("*.spacy")
    return path, lambda: parse._read(path), mutate_bytes


def text(place: Path) -> Reader:
    path = lines(place / "a.txt", "A sentence.", "", "Another one.")
    return path, lambda: read_sentences(path), mutate_text


def settings(place: Path) -> Reader:
    record = RunSettings("logic", TOY, parse_arm("em"), seed=3).record()
    path = write_json(place / "settings.json", record)
    write_result(place, {"task": "logic"})

    def read() -> object:
        found = read_finished(place, "logic")
        return read_scale(place, found, LogicScale), read_arm(place, found)

    return path, resealing(place / "result.json", read), mutate_json


def words(place: Path) -> Reader:
    path = write_json(place / "vocabulary.json", {"vocabulary": ["a", "b"], "labels": ["0", "1"]})
    return path, lambda: read_words(place, "labels"), mutate_json
