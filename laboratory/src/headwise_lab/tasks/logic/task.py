"""The logical inference task: which of seven relations holds between two propositional formulas."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.errors import DataError, require_integer
from headwise.heads.find import find_heads
from headwise.input_files import encode_json, read_numbered_lines
from headwise.texts.batching import Row
from headwise.texts.frozen import Frozen
from headwise_lab.data.arrays import Ragged
from headwise_lab.experiment.evaluation import Accuracy, scores_by_bin
from headwise_lab.experiment.task import Answers, ClassifierTask, Task, name_run
from headwise_lab.frozen.runs import batch_rows, list_files, load_run, read_words, run_encoder
from headwise_lab.tasks.logic.data import Example, LogicData, LogicSplit, collate, find_files, load_logic
from headwise_lab.tasks.logic.formulas import RELATIONS, bracket_fault
from headwise_lab.tasks.logic.model import PairClassifier
from headwise_lab.tasks.logic.scales import LOGIC_SCALES, LogicScale
from headwise_lab.training.trained import read_scale


class LogicTask(ClassifierTask, settings=Path(__file__).with_name("task.toml")):
    """Logical inference (Bowman et al. 2015; Tran et al. 2018); see `task.Task` for the methods."""

    name = "logic"
    scales = LOGIC_SCALES

    def load(self, folder: Path | None, scale: LogicScale, cache: Path | None, *, progress: bool = False) -> LogicData:
        """Return the data; see `load_logic`."""
        return load_logic(folder, scale, cache, progress=progress)

    def find(self, folder: Path, scale: LogicScale) -> None:
        """Refuse a place without the published files."""
        find_files(folder, scale)

    def model(self, data: LogicData, scale: LogicScale) -> PairClassifier:
        """Return a pair classifier."""
        return PairClassifier(len(data.vocabulary), len(data.labels), scale)

    def target(self, model: PairClassifier) -> nn.Module:
        """Return the encoder; the pooling's attention is apart."""
        return model.encoder

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Return a padded batch."""
        return collate(examples)

    def on_dev(self, model: PairClassifier, data: LogicData) -> dict[str, Any]:
        """Return the accuracy on dev, pooled and in each bin."""
        return scores_by_bin(Accuracy(), self.predict(model, data.dev) == data.dev.labels, data.dev.bins)

    def difficulties(self, data: LogicData) -> NDArray[np.integer]:
        """Return the number of operators of each test pair."""
        return data.test.bins

    def baseline(self, name: str, data: LogicData, seed: int) -> Answers:
        """Return the answers of the most frequent label, or of gradient boosting on token counts."""
        if name == "majority":
            return super().baseline(name, data, seed)
        predicted = counts(data.train, data.test, len(data.vocabulary), seed=seed)
        return Answers(predicted == data.test.labels, predicted)

    def extra_files(self, data: LogicData) -> dict[str, str]:
        """Return the vocabulary and the labels."""
        kept = {"vocabulary": data.vocabulary, "labels": data.labels}
        return {"vocabulary.json": encode_json(kept, indent=1) + "\n"}

    def open_frozen(self, folder: Path, record: Mapping[str, Any], pipeline: Path | None) -> Frozen:  # noqa: ARG002  nothing is parsed
        """Return the encoder of a run, which reads formulas."""
        return open_logic(self, folder, record)


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


def counts(train: LogicSplit, test: LogicSplit, vocabulary_size: int, *, seed: int) -> NDArray[np.int64]:
    """Return the predictions of gradient boosting on the token counts of each side, [N].

    It does not see the order of tokens, so its score is what can be had without understanding formulas. It has
    scikit-learn's default settings.
    """
    # scikit-learn takes seconds to import
    from sklearn.ensemble import HistGradientBoostingClassifier
    from threadpoolctl import threadpool_limits

    require_integer("seed", seed)
    require_integer("vocabulary_size", vocabulary_size, low=1)
    model = HistGradientBoostingClassifier(random_state=seed)
    # thousands of short parallel regions are slow with many threads on a busy machine
    with threadpool_limits(1):
        model.fit(_features(train, vocabulary_size), train.labels)
        return model.predict(_features(test, vocabulary_size)).astype(np.int64)


def token_counts(sequences: Ragged, vocabulary_size: int) -> NDArray[np.float32]:
    """Return how often each token occurs in each sequence, [N, T].

    >>> token_counts(Ragged.of([[1, 2, 1], []]), 3).tolist()
    [[0.0, 2.0, 1.0], [0.0, 0.0, 0.0]]
    """
    rows = np.repeat(np.arange(len(sequences)), sequences.lengths)
    cells = rows * vocabulary_size + sequences.values
    flat = np.bincount(cells, minlength=len(sequences) * vocabulary_size)
    return flat.reshape(len(sequences), vocabulary_size).astype(np.float32)


def _features(split: LogicSplit, vocabulary_size: int) -> NDArray[np.float32]:
    return np.hstack([token_counts(side, vocabulary_size) for side in (split.premises, split.hypotheses)])
