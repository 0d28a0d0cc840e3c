"""GLUE's own files (Wang et al. 2019): the eight sets of An et al. 2020, read line by line.

Owns the form of each set's files, the refusal of every line that does not fit, and the files of answers for the test
server. Must not know token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwise.errors import DataError
from headwise.lab.data.arrays import numbered_lines
from headwise.lab.experiment.glue_score import ACCURACY, MATTHEWS, SPEARMAN

NOT = ("entailment", "not_entailment")
YES = ("0", "1")
BOM = "\ufeff"


@dataclass(frozen=True)
class GlueExample:
    """One line of a file: its texts, its label as it stands there ("" in a test file), and its index for the server."""

    texts: tuple[str, ...]
    label: str
    index: str


@dataclass(frozen=True)
class GlueSet:
    """The form of a set's files.

    Attributes:
        name: Its name, that of its folder.
        texts: Columns of the texts.
        label: Column of the label.
        labels: The labels, class by class; empty for a score from 0 to 5.
        score: What it is judged by, one of `glue_score`'s.
        dev: Names of the dev files without suffix.
        test: Names of the test files, and of the answers the server takes for them.
        bare: The columns of training and dev files where these have no header.
        unordered: Whether the texts of a pair may change places.
        gaps: Whether the published file has lines that lack fields, which are left out and counted.
    """

    name: str
    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    score: int = ACCURACY
    dev: tuple[str, ...] = ("dev",)
    test: tuple[tuple[str, str], ...] = ()
    bare: tuple[str, ...] = ()
    unordered: bool = False
    gaps: bool = False

    @property
    def answers(self) -> tuple[tuple[str, str], ...]:
        """Test files and the names of their answers."""
        return self.test or (("test", self.name),)


_SENTENCES = ("sentence1", "sentence2")
GLUE = {
    one.name: one
    for one in (
        GlueSet("CoLA", ("sentence",), "label", YES, MATTHEWS, bare=("source", "label", "mark", "sentence")),
        GlueSet("SST-2", ("sentence",), "label", YES),
        GlueSet("MRPC", ("#1 String", "#2 String"), "Quality", YES, unordered=True),
        GlueSet("STS-B", _SENTENCES, "score", (), SPEARMAN, unordered=True),
        GlueSet("QQP", ("question1", "question2"), "is_duplicate", YES, gaps=True),
        GlueSet(
            "MNLI",
            _SENTENCES,
            "gold_label",
            ("entailment", "neutral", "contradiction"),
            dev=("dev_matched",),
            test=(("test_matched", "MNLI-m"), ("test_mismatched", "MNLI-mm")),
        ),
        GlueSet("QNLI", ("question", "sentence"), "label", NOT),
        GlueSet("RTE", _SENTENCES, "label", NOT),
    )
}


def glue_set(folder: Path) -> GlueSet:
    """Return the set whose files a folder holds, by the folder's name.

    Raises:
        DataError: The folder is missing or has another name.
    """
    known = {name.lower(): found for name, found in GLUE.items()}
    found = known.get(folder.resolve().name.lower())
    if found is None or not folder.is_dir():
        state = "does not exist" if not folder.exists() else "is none of GLUE's sets"
        raise DataError(f"{folder} {state}; expected a folder named {', '.join(GLUE)}, with that set's own files.")
    return found


def lacking(folder: Path) -> str:
    """Return the first file without which a set can be neither trained on nor judged; "" where all are there."""
    found = glue_set(folder)
    names = ("train", *found.dev)
    return next((f"{name}.tsv" for name in names if _file(folder, name) is None), "")


def labelled_files(folder: Path) -> list[Path]:
    """Return the files that a set is trained and judged on."""
    found = (_file(folder, name) for name in ("train", *glue_set(folder).dev))
    return [path for path in found if path is not None]


def unlabelled_files(folder: Path) -> list[tuple[str, str]]:
    """Return the test files that are there, and the names of the answers the server takes for them."""
    return [(file, name) for file, name in glue_set(folder).answers if _file(folder, file) is not None]


def read_split(folder: Path, split: str) -> tuple[list[GlueExample], int]:
    """Return the examples of "train", "dev", or a file of the test split by its name, and how many lines were left out.

    Raises:
        DataError: The file is missing, or a line lacks a field, or has an empty text or an unknown label.
    """
    found, examples, left_out = glue_set(folder), [], 0
    names = found.dev if split == "dev" else (split,)
    labelled = split in ("train", "dev")
    for name in names:
        path = _file(folder, name)
        if path is None:
            raise DataError(f"{folder} lacks {name}.tsv, plain or .gz; GLUE has it in the folder {found.name}.")
        for number, fields in _rows(found, path, labelled=labelled):
            texts = tuple(" ".join(fields.get(column, "").split()) for column in found.texts)
            label = fields.get(found.label, "").strip() if labelled else ""
            if found.gaps and labelled and not (all(texts) and label):
                left_out += 1
                continue
            # of a test file with gaps the server wants an answer to each line
            if labelled or not found.gaps:
                _require_line(found, path, number, texts, label, labelled=labelled)
            examples.append(GlueExample(texts, label, _index(fields, len(examples))))
    return examples, left_out


def submission(found: GlueSet, examples: Sequence[GlueExample], answers: Sequence[float]) -> str:
    r"""Return the file of answers to a test file: a header, then the index and the answer of each line.

    Args:
        found: The set.
        examples: The lines of the test file.
        answers: The class of each, or its score.

    >>> submission(GLUE["RTE"], [GlueExample(("a", "b"), "", "7")], [1.0])
    'index\tprediction\n7\tnot_entailment\n'
    """
    words = [found.labels[int(answer)] if found.labels else f"{min(5.0, max(0.0, answer)):.3f}" for answer in answers]
    lines = [f"{example.index}\t{word}" for example, word in zip(examples, words, strict=True)]
    return "\n".join(["index\tprediction", *lines]) + "\n"


def _rows(found: GlueSet, path: Path, *, labelled: bool) -> Iterator[tuple[int, dict[str, str]]]:
    lines = numbered_lines(path)
    header: Sequence[str] = found.bare if labelled and found.bare else ()
    if not header:
        number, first = next(lines, (0, ""))
        header = first.removeprefix(BOM).split("\t")
        wanted = (*found.texts, *((found.label,) if labelled else ()))
        missing = [column for column in wanted if column not in header]
        if missing:
            raise DataError(f"{path}, line {number}: the header lacks {missing[0]!r}; expected GLUE's own file.")
    for number, line in lines:
        fields = line.removeprefix(BOM).split("\t") if number == 1 else line.split("\t")
        if len(fields) > len(header):
            if found.gaps:
                yield number, {}
                continue
            raise DataError(
                f"{path}, line {number}: {len(fields)} fields, and {len(header)} columns; a text holds a tab, take it "
                "out."
            )
        yield number, dict(zip(header, fields, strict=False))


def _index(fields: Mapping[str, str], place: int) -> str:
    return fields.get("index", fields.get("id", str(place)))


def _require_line(
    found: GlueSet, path: Path, number: int, texts: tuple[str, ...], label: str, *, labelled: bool
) -> None:
    if not all(texts):
        raise DataError(f"{path}, line {number}: a text is missing or empty; expected {', '.join(found.texts)}.")
    if not labelled:
        return
    if found.labels and label not in found.labels:
        raise DataError(f"{path}, line {number}: the label is {label!r}; expected {' or '.join(found.labels)}.")
    if not found.labels:
        try:
            known = 0.0 <= float(label) <= 5.0
        except ValueError:
            known = False
        if not known:
            raise DataError(f"{path}, line {number}: the score is {label!r}; expected a number from 0 to 5.")


def _file(folder: Path, name: str) -> Path | None:
    forms = [path for path in (folder / f"{name}.tsv", folder / f"{name}.tsv.gz") if path.is_file()]
    if len(forms) == 2:
        raise DataError(f"{folder} holds both {name}.tsv and {name}.tsv.gz; expected one of them: take the other away.")
    return forms[0] if forms else None
