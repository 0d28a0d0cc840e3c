"""GLUE's files (Wang et al. 2019): the eight sets of An et al. 2020, and submissions to the test server."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwise.errors import DataError
from headwise.input_files import describe_place
from headwise.texts.tables import read_table
from headwise_lab.data.arrays import find_plain_or_gz
from headwise_lab.experiment.evaluation import ACCURACY, MATTHEWS, SPEARMAN
from headwise_lab.experiment.scale import read_task_file


@dataclass(frozen=True)
class GlueExample:
    """One line of a file: its texts, its label as written ("" in a test file), and its index for the test server."""

    texts: tuple[str, ...]
    label: str
    index: str


@dataclass(frozen=True)
class GlueSet:
    """The file format of a set.

    Attributes:
        name: Its name and that of its folder.
        texts: Columns of the texts.
        label: Column of the label.
        labels: The label of each class; empty for a score from 0 to 5.
        score: Its score: `ACCURACY`, `MATTHEWS` or `SPEARMAN` of `experiment.evaluation`.
        dev: Names of the dev files without suffix.
        test: Names of the test files and of their submissions.
        bare: The columns of training and dev files that have no header.
        unordered: Whether the texts of a pair may be swapped.
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
        """Test files and the names of their submissions."""
        return self.test or (("test", self.name),)


SCORES = {"accuracy": ACCURACY, "Matthews": MATTHEWS, "Spearman": SPEARMAN}
GLUE = {
    name: GlueSet(name, **{**found, "score": SCORES[found.get("score", "accuracy")]})
    for name, found in read_task_file(Path(__file__).with_name("task.toml"))["sets"].items()
}


def find_set(folder: Path) -> GlueSet:
    """Return the set that a folder is named after."""
    known = {name.lower(): found for name, found in GLUE.items()}
    found = known.get(folder.resolve().name.lower())
    if found is None or not folder.is_dir():
        state = "is none of GLUE's sets" if folder.is_dir() else describe_place(folder)
        raise DataError(f"{folder} {state}; expected a folder named {', '.join(GLUE)}, with that set's own files.")
    return found


def find_missing_file(folder: Path) -> str:
    """Return the first missing training or dev file of a set, or ""."""
    found = find_set(folder)
    names = ("train", *found.dev)
    return next((f"{name}.tsv" for name in names if find_plain_or_gz(folder, f"{name}.tsv") is None), "")


def list_labeled_files(folder: Path) -> list[Path]:
    """Return the training and dev files of a set."""
    found = (find_plain_or_gz(folder, f"{name}.tsv") for name in ("train", *find_set(folder).dev))
    return [path for path in found if path is not None]


def list_unlabeled_files(folder: Path) -> list[tuple[str, str]]:
    """Return the test files that are present and the names of their submissions."""
    return [(file, name) for file, name in find_set(folder).answers if find_plain_or_gz(folder, f"{file}.tsv")]


def read_split(folder: Path, split: str) -> tuple[list[GlueExample], int]:
    """Return the examples of "train", "dev" or a test file by its name, and how many lines were left out."""
    found, examples, left_out = find_set(folder), [], 0
    names = found.dev if split == "dev" else (split,)
    labeled = split in ("train", "dev")
    for name in names:
        path = find_plain_or_gz(folder, f"{name}.tsv")
        if path is None:
            raise DataError(f"{folder} lacks {name}.tsv, plain or .gz; GLUE has it in the folder {found.name}.")
        for number, fields in _read_rows(found, path, labeled=labeled):
            texts = tuple(" ".join(fields.get(column, "").split()) for column in found.texts)
            label = fields.get(found.label, "").strip() if labeled else ""
            whole = found.gaps or fields.keys() >= {*found.texts}
            if labeled and whole and not (all(texts) and (label or not found.gaps)):
                left_out += 1
                continue
            # the server expects an answer to every line of a test file, gaps included
            if labeled or not found.gaps:
                _require_line(found, path, number, texts, label, labeled=labeled)
            examples.append(GlueExample(texts, label, fields.get("index", fields.get("id", str(len(examples))))))
    return examples, left_out


def format_submission(found: GlueSet, examples: Sequence[GlueExample], answers: Sequence[float]) -> str:
    r"""Return the submission for a test file: a header, then the index and the answer of each line.

    >>> format_submission(GLUE["RTE"], [GlueExample(("a", "b"), "", "7")], [1.0])
    'index\tprediction\n7\tnot_entailment\n'
    """
    words = [found.labels[int(answer)] if found.labels else f"{min(5.0, max(0.0, answer)):.3f}" for answer in answers]
    lines = [f"{example.index}\t{word}" for example, word in zip(examples, words, strict=True)]
    return "\n".join(["index\tprediction", *lines]) + "\n"


def _read_rows(found: GlueSet, path: Path, *, labeled: bool) -> Iterator[tuple[int, dict[str, str]]]:
    bare = found.bare if labeled else ()
    wanted = (*found.texts, *((found.label,) if labeled else ()))
    table = read_table(path, lambda names: not bare and set(wanted) <= set(names), fewest=len(wanted), even=False)
    header = bare or table.header or table.rows[0][1]
    missing = next((name for name in wanted if name not in header), None)
    if missing is not None:
        raise DataError(f"{path}, line 1: the header lacks {missing!r}; expected GLUE's own file.")
    for number, fields in table.rows:
        if len(fields) > len(header):
            if found.gaps:
                yield number, {}
                continue
            raise DataError(
                f"{path}, line {number}: {len(fields)} fields, and {len(header)} columns; a text holds a tab, take it "
                "out."
            )
        yield number, dict(zip(header, fields, strict=False))


def _require_line(
    found: GlueSet, path: Path, number: int, texts: tuple[str, ...], label: str, *, labeled: bool
) -> None:
    if not all(texts):
        raise DataError(f"{path}, line {number}: a text is missing or empty; expected {', '.join(found.texts)}.")
    if not labeled:
        return
    if found.labels and label not in found.labels:
        raise DataError(f"{path}, line {number}: the label is {label!r:.60}; expected {' or '.join(found.labels)}.")
    if not found.labels:
        try:
            known = 0.0 <= float(label) <= 5.0
        except ValueError:
            known = False
        if not known:
            raise DataError(f"{path}, line {number}: the score is {label!r:.60}; expected a number from 0 to 5.")
