"""A finished run of logic, frozen: its encoder, which reads formulas."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.errors import DataError
from headwise.heads.find import find_heads
from headwise.input_files import read_numbered_lines
from headwise.texts.batching import Row
from headwise.texts.frozen import Frozen
from headwise_lab.experiment.task import Task, name_run
from headwise_lab.frozen.runs import batch_rows, list_files, load_run, read_words, run_encoder
from headwise_lab.tasks.logic.formulas import RELATIONS, bracket_fault
from headwise_lab.tasks.logic.model import PairClassifier
from headwise_lab.tasks.logic.scales import LogicScale
from headwise_lab.training.trained import read_scale

FORMULA = "one formula per line, such as ( not ( a ( and b ) ) )"


def open_logic(task: Task, folder: Path, record: Mapping[str, Any]) -> Frozen:
    """Return the encoder of a run of logic, which reads formulas."""
    (vocabulary,), scale = read_words(folder), read_scale(folder, record, LogicScale)
    model = load_run(folder, record, task, lambda: PairClassifier(len(vocabulary), len(RELATIONS), scale))
    encoder, ids = model.encoder, {token: index for index, token in enumerate(vocabulary)}

    def formulas(path: Path) -> list[str]:
        found = []
        for number, line in read_numbered_lines(path):
            tokens = line.split()
            strange = next((token for token in tokens if token not in ids), None)
            fault = f"{strange!r:.60} is not one of the run's tokens" if strange is not None else bracket_fault(tokens)
            if tokens and fault:
                raise DataError(f"{path}, line {number}: {fault}; expected {FORMULA}.")
            found += [" ".join(tokens)] if tokens else []
        if not found:
            raise DataError(f"{path} holds no text; expected {FORMULA}.")
        return found

    def row(formula: str) -> Row:
        tokens = formula.split()
        return Row([ids[token] for token in tokens], tuple(tokens))

    return Frozen(
        name_run(folder),
        encoder,
        find_heads(encoder),
        batch_rows(row, encoder),
        run_encoder(encoder),
        None,
        list_files(folder),
        lines=formulas,
        note="Of this run the encoder was looked at, which reads each formula of a pair alone.",
    )
