"""Blank texts are left out and counted alike, whatever reads them and from whatever file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from cases import cases
from headwise.texts.batching import read_sentences
from headwise.texts.labeled_texts import describe_blank
from headwise_lab.tasks.classification.probing import load_probing
from headwise_lab.tasks.classification.scales import CLASSIFICATION_SCALES
from headwise_lab.tasks.classification.task import load_data
from headwise_lab.tasks.glue.files import read_split
from headwise_lab.tasks.lm.scales import LM_SCALES
from headwise_lab.tasks.lm.task import LmTask
from headwise_lab.tasks.sentence.scales import SENTENCE_SCALES
from headwise_lab.tasks.sentence.task import load_sentences
from lab.tasks.sentence.sentence_sets import sentence

CLASSIFICATION = dataclasses.replace(CLASSIFICATION_SCALES["demo"], train_examples=None)
SENTENCE = dataclasses.replace(SENTENCE_SCALES["demo"], train_examples=None)
LM = dataclasses.replace(LM_SCALES["demo"], vocabulary_size=300, length=16)
BLANK = ("", "  ", "\u3000")
ROWS = [(str(number % 2), sentence(number, str(number % 2))) for number in range(80)]
# A blank text has any label, or none.
MIXED = [*ROWS[:30], ("1", BLANK[0]), *ROWS[30:], ("0", BLANK[1]), ("", BLANK[2])]


def classified(place: Path) -> str:
    return load_data(place, CLASSIFICATION, None).summary()


def sentences(place: Path) -> str:
    return load_sentences(place, SENTENCE, None).summary()


def probed(place: Path) -> str:
    return load_probing(place, CLASSIFICATION, None).summary()


def fine_tuned(place: Path) -> str:
    found, left_out = read_split(place, "train")
    return f"{[one.texts for one in found]}" + (f"; {left_out} left out" if left_out else "")


def lines(place: Path) -> str:
    found = read_sentences(place)
    return f"{describe_blank(found)} {list(found)}"


def modeled(place: Path) -> str:
    return LmTask().load(place, LM, place.parent / "cache").summary()


def write_lines(rows: list[tuple[str, str]], line: Callable[[str, str], str]) -> str:
    return "".join(f"{line(*row)}\n" for row in rows)


def as_table(label: str, text: str) -> str:
    return f'{label},"{text}"'


def as_tabs(label: str, text: str) -> str:
    return f"{label}\t{text}"


def as_object(label: str, text: str) -> str:
    return json.dumps({"label": label or None, "text": text or None})


def as_pair(label: str, text: str) -> str:
    # either side of a pair may be blank
    return f"{label}\t{text}\tand so on" if label == "1" else f"{label}\tand so on {len(text)}\t{text}"


def as_probe(label: str, text: str) -> str:
    return f"{'tr' if len(text) % 2 else 'te'}\t{label}\t{text}"


def as_entailment(label: str, text: str) -> str:
    return f"0\t{text}\tand so on\t{'not_' * (label == '1')}entailment"


CASES: dict[str, tuple[Callable[[Path], str], str, str, Callable[[str, str], str]]] = {
    "a table": (classified, "a.csv", "label,text\n", as_table),
    "a folder of tables": (classified, "set/all.tsv", "", as_tabs),
    "objects": (classified, "a.jsonl", "", as_object),
    "a table of texts": (sentences, "a.csv", "label,text\n", as_table),
    "a folder of texts": (sentences, "set/all.tsv", "", as_tabs),
    "objects of texts": (sentences, "a.jsonl", "", as_object),
    "pairs": (sentences, "a.tsv", "label\tpremise\thypothesis\n", as_pair),
    "probes": (probed, "a.txt", "", as_probe),
    "glue": (fine_tuned, "RTE/train.tsv", "index\tsentence1\tsentence2\tlabel\n", as_entailment),
    "a column of sentences": (lines, "a.csv", "label,text\n", as_table),
    "sentences": (lines, "a.txt", "", lambda _label, text: text),
    "documents": (modeled, "a.jsonl", "", as_object),
}


SAID = {
    classified: "; {} without a text left out",
    sentences: "; {} without a word left out",
    probed: "; {} without a text left out",
    fine_tuned: "; {} left out",
    lines: "Texts without a word that were left out: {}.",
    modeled: ", {} blank ones left out",
}


@cases("name", CASES)
def test_blank_texts_are_left_out_and_counted(name: str, tmp_path: Path):
    read, file, header, line = CASES[name]
    said = []
    for folder, rows in (("whole", ROWS), ("mixed", MIXED)):
        path = tmp_path / folder / file
        path.parent.mkdir(parents=True)
        path.write_text(header + write_lines(rows, line), encoding="utf-8")
        said.append(read(path.parent if path.parent.name in ("set", "RTE") else path))
    whole, mixed = said
    # of a file of lines, an end of line after another is no text
    words = SAID[read].format(2 if name == "sentences" else len(BLANK))
    assert words in mixed
    assert mixed.replace(words, "") == whole
