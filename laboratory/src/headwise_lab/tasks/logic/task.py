"""The logical inference task: which of seven relations holds between two propositional formulas."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.input_files import encode_json
from headwise.texts.frozen import Frozen
from headwise_lab.experiment.evaluation import Accuracy, scores_by_bin
from headwise_lab.experiment.task import Answers, ClassifierTask
from headwise_lab.tasks.logic.data import Example, LogicData, collate, find_files, load_logic
from headwise_lab.tasks.logic.frozen import open_logic
from headwise_lab.tasks.logic.model import PairClassifier
from headwise_lab.tasks.logic.scales import LOGIC_SCALES, LogicScale


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
        # scikit-learn takes seconds to import
        from headwise_lab.tasks.logic import baselines

        if name == "counts":
            predicted = baselines.counts(data.train, data.test, len(data.vocabulary), seed=seed)
        else:
            predicted = baselines.majority(data.train, data.test)
        return Answers(predicted == data.test.labels, predicted)

    def extra_files(self, data: LogicData) -> dict[str, str]:
        """Return the vocabulary and the labels."""
        kept = {"vocabulary": data.vocabulary, "labels": data.labels}
        return {"vocabulary.json": encode_json(kept, indent=1) + "\n"}

    def open_frozen(self, folder: Path, record: Mapping[str, Any], pipeline: Path | None) -> Frozen:  # noqa: ARG002  nothing is parsed
        """Return the encoder of a run, which reads formulas."""
        return open_logic(self, folder, record)
