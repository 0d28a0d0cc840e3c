"""Files of labeled texts, pairs and formulas, each with its reader."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from fuzz.made_files import Reader, lines, mutate_packed, packed
from fuzz.mutate import mutate_json_lines, mutate_text
from headwise.texts.labeled_texts import Layout, read_labeled, read_texts
from headwise_lab.data.probing_files import drop_repeats, read_probing
from headwise_lab.data.word_vectors import pack_vectors
from headwise_lab.tasks.classification.probing import load_probing
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.tasks.classification.task import load_data
from headwise_lab.tasks.glue.files import read_split
from headwise_lab.tasks.logic.data import load_logic
from headwise_lab.tasks.logic.generator import generate
from headwise_lab.tasks.logic.scales import LogicScale
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES
from headwise_lab.tasks.sentence.task import load_sentences
from headwise_lab.texts.sets import read_set
from lab.tasks.classification.probing_toy import write_probing
from lab.tasks.glue.glue_toy import write_glue
from lab.tasks.logic.logic_toy import TOY
from lab.tasks.sentence.sentence_sets import sentence, write_pairs, write_profiles, write_texts

CLASSIFICATION = dataclasses.replace(CLASSIFICATION_SCALES["demo"], train_examples=None, pipeline=None, embeddings=None)
SENTENCE = dataclasses.replace(SENTENCE_SCALES["demo"], train_examples=None, positive=None, embeddings=None)


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
