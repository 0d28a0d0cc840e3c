"""The reader of the published logical inference files: `trainK` and `testK`, plain or gzipped."""

from collections.abc import Iterator
from pathlib import Path

from headwise.errors import DataError
from headwise.input_files import read_numbered_lines
from headwise_lab.tasks.logic.formulas import RELATIONS, Pair, bracket_fault


def read_pairs(path: Path, operators: int) -> Iterator[Pair]:
    """Yield the pairs of one file; any words may be variables and operators.

    Args:
        path: The file.
        operators: The bin of all its lines: the number in the file's name.

    Raises:
        DataError: A line lacks a field, names an unknown relation, has an empty side or unbalanced brackets; or the
            file cannot be read. The message names the file, the line and the fault.
    """
    for number, line in read_numbered_lines(path):
        fields = line.split("\t")
        if len(fields) != 3:
            raise DataError(
                f"{path}, line {number}: {len(fields)} tab-separated fields; expected 3: relation, premise, hypothesis."
            )
        label, *sides = fields
        if label not in RELATIONS:
            raise DataError(f"{path}, line {number}: relation {label!r:.60}; expected one of {' '.join(RELATIONS)}.")
        texts = []
        for name, side in zip(("premise", "hypothesis"), sides, strict=True):
            tokens = side.split()
            fault = bracket_fault(tokens) if tokens else "it is empty"
            if fault is not None:
                raise DataError(f"{path}, line {number}: {name} {side!r:.60}: {fault}; correct or drop the line.")
            texts.append(" ".join(tokens))
        yield Pair(label, texts[0], texts[1], operators)
