"""Probing files: SentEval's, and those of others in its form (Conneau et al. 2018; X-Probe)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwise.errors import DataError
from headwise.input_files import is_file
from headwise.texts.labeled_texts import DEV, TEST, TRAIN, LabeledText, Layout, join_labels
from headwise.texts.tables import count_fields, read_table

# The ten tasks by the names of their files, and what Li et al. 2021 call each.
PROBES: Mapping[str, str] = {
    "sentence_length": "SeLen",
    "word_content": "WC",
    "tree_depth": "TrDep",
    "top_constituents": "ToCo",
    "bigram_shift": "BShif",
    "past_present": "Tense",
    "subj_number": "SubNm",
    "obj_number": "ObjNm",
    "odd_man_out": "SOMO",
    "coordination_inversion": "CoIn",
}
PARTITIONS = (TRAIN, DEV, TEST)
FORMS = ("", ".txt", ".txt.gz")


@dataclass(frozen=True)
class Distinct:
    """What is left of each partition, and how many lines were repeated, contradicted by another label, or blank."""

    lines: Mapping[str, list[LabeledText]]
    repeated: int
    contradicted: int
    blank: int


def find_probing_file(place: Path) -> Path:
    """Return the file of a task: the place itself, or with `.txt` or `.txt.gz` appended.

    Raises:
        DataError: There is no such file, there are two, or the place is a folder.
    """
    if place.is_dir():
        found = [name for name in PROBES if any(is_file(place / f"{name}{form}") for form in FORMS)]
        files = f"name one of its files, as {place / found[0]}" if found else "expected files as past_present.txt in it"
        raise DataError(f"{place} is a folder; probing takes the file of one task: {files}.")
    found = [path for path in (place.with_name(place.name + form) for form in FORMS) if is_file(path)]
    if len(found) > 1:
        raise DataError(f"there are {' and '.join(str(path) for path in found)}; take one away or name one in full.")
    if not found:
        raise DataError(f"{place} does not exist; expected the file of a probing task, plain or with .txt or .txt.gz.")
    return found[0]


def read_probing(path: Path) -> dict[str, list[LabeledText]]:
    """Return the lines of each partition of a file, in the order "tr", "va", "te".

    A row is partition, label, ..., sentence, in the published files separated by tabs; fields between label and
    sentence are ignored. Blank sentences are kept as "".

    Raises:
        DataError: A row has fewer than three fields, another partition, or an empty label, or there is one label alone.
            The message names the file and the line.
    """
    found: dict[str, list[LabeledText]] = {name: [] for name in PARTITIONS}
    for number, fields in read_table(path, lambda _fields: False, fewest=3, even=False).rows:
        if len(fields) < 3:
            raise DataError(
                f"{path}, line {number}: {count_fields(len(fields))}; expected at least 3: partition (tr, va or te), "
                "label and, last, the sentence, separated by tabs."
            )
        partition, label, text = fields[0].strip(), fields[1].strip(), " ".join(fields[-1].split())
        if partition not in found:
            raise DataError(f"{path}, line {number}: the partition is {partition!r:.60}; expected tr, va or te.")
        if text and not label:
            raise DataError(f"{path}, line {number}: the label is empty; fill it in or drop the line.")
        found[partition].append(LabeledText(label, text, number))
    found = join_labels(found)
    labels = {one.label for lines in found.values() for one in lines if one.text}
    if len(labels) < 2:
        raise DataError(f"{path} has {len(labels)} labels in its lines; expected at least two different ones.")
    return {name: lines for name, lines in found.items() if lines}


def choose_layout(partitions: Sequence[str]) -> Layout:
    """Return which partition is which split; what is missing is cut from the others.

    Without `tr`, `va` is what is trained on. Without `te`, and where there is one partition alone, all of them are one
    pool, "all".

    >>> choose_layout(["va", "te"]), choose_layout(["va"]).names
    (Layout(train='va', dev=None, test='te'), ('all',))
    """
    if TEST not in partitions or len(partitions) == 1:
        return Layout("all")
    if TRAIN not in partitions:
        return Layout(DEV, test=TEST)
    return Layout(TRAIN, DEV if DEV in partitions else None, TEST)


def drop_repeats(read: Mapping[str, Sequence[LabeledText]]) -> Distinct:
    """Return the lines with a text, without texts that occur with two labels, and with every other text once.

    Texts that differ in capitals alone are equal. A text of several partitions is kept in the last of them, so that a
    test set stays as published except for its own repeats.

    >>> one, two = LabeledText("I", "a b", 1), LabeledText("I", "A b", 2)
    >>> found = drop_repeats({"tr": [one, LabeledText("O", "c", 3)], "te": [two, two]})
    >>> [one.text for one in found.lines["tr"]], len(found.lines["te"]), found.repeated
    (['c'], 1, 2)
    """
    lines = {name: [one for one in part if one.text] for name, part in read.items()}
    labels: defaultdict[str, set[str]] = defaultdict(set)
    for part in lines.values():
        for one in part:
            labels[one.text.lower()].add(one.label)
    clear = {name: [one for one in part if len(labels[one.text.lower()]) == 1] for name, part in lines.items()}
    kept: dict[str, list[LabeledText]] = {}
    seen: set[str] = set()
    for name, part in reversed(clear.items()):
        kept[name] = []
        for one in part:
            if one.text.lower() not in seen:
                seen.add(one.text.lower())
                kept[name].append(one)
    every, written, known, left = (sum(map(len, parts.values())) for parts in (read, lines, clear, kept))
    return Distinct({name: kept[name] for name in read}, known - left, written - known, every - written)
