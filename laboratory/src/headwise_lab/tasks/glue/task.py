"""The GLUE task: fine-tuning of a pretrained model, one set at a time (Wang et al. 2019; An et al. 2020, Table 3)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.atomic import new_folder
from headwise.errors import DataError, SettingError
from headwise.routing.save import find_aggregators, save
from headwise.texts.batching import LengthBatches, batch_by_length, to_device
from headwise.texts.frozen import Frozen
from headwise.texts.pretrained import MODEL, holds_added, quietly
from headwise_lab.experiment.arm import Arm
from headwise_lab.experiment.evaluation import (
    ACCURACY,
    round_to_bins,
    score_answers,
    spread_batches,
)
from headwise_lab.experiment.run_folder import write_text
from headwise_lab.experiment.scale import was_set
from headwise_lab.experiment.task import Answers, Task
from headwise_lab.tasks.glue.data import EncodedText, GlueData, GlueSplit, load_glue, make_collator, require_set
from headwise_lab.tasks.glue.files import GLUE, find_missing_file, format_submission
from headwise_lab.tasks.glue.scales import GLUE_SCALES, GlueScale
from headwise_lab.training.start import Classifier, losses, require_kept

SUBMISSION = "submission"
BATCH, PROBED = 64, 128


class GlueTask(Task, settings=Path(__file__).with_name("task.toml")):
    """Fine-tuning on one of GLUE's sets; see `task.Task`."""

    name = "glue"
    scales = GLUE_SCALES

    def __init__(self) -> None:
        self._padding = 0

    def load(self, folder: Path | None, scale: GlueScale, cache: Path | None, *, progress: bool = False) -> GlueData:  # noqa: ARG002  nothing is kept, and reading is short
        """Return the data; see `load_glue`."""
        if folder is None:
            raise DataError(f"glue needs --data: the folder of one of GLUE's sets, {', '.join(GLUE)}.")
        data = load_glue(folder, scale)
        if not data.start.of_arms and was_set(scale, "starts"):
            raise SettingError(f"starts is set, and all runs begin with {data.start.place}; omit it.")
        self._padding = data.tokenizer.pad_token_id or 0
        return data

    def find(self, folder: Path, scale: GlueScale) -> None:  # noqa: ARG002  any scale reads the same files
        """Refuse a place without the files of a set."""
        require_set(folder)

    def missing_file(self, folder: Path) -> str:
        """Return the file without which the set in a folder cannot be run; "" where all are there."""
        return find_missing_file(folder)

    def model(self, data: GlueData, scale: GlueScale) -> Classifier:
        """Return the model that plain begins with under seed 0."""
        return self.initial_model(Arm("plain", control=None), data, scale, 0)

    def initial_model(self, arm: Arm, data: GlueData, scale: GlueScale, seed: int) -> Classifier:
        """Return the model that a run begins with."""
        require_kept(self.remaining_arm(arm, data), data.start.place)
        folder = data.start.folder(arm.name, seed, scale.starts)
        model = Classifier(folder, data.classes, scale.layer_decay, trust_remote_code=scale.trust_remote_code)
        if model.network.config.pad_token_id is None:
            model.network.config.pad_token_id = data.tokenizer.pad_token_id
        return model

    def remaining_arm(self, arm: Arm, data: GlueData) -> Arm:
        """Return what an arm does while fine-tuning: nothing where it acted in the run that it begins with.

        Nor are its rate and dropout those of fine-tuning then.
        """
        return replace(arm, methods=(), learning_rate=None, dropout=None) if data.start.of_arms else arm

    def initial_run(self, arm: Arm, data: GlueData, scale: GlueScale, seed: int) -> int | None:
        """Return the seed of the pre-training that a run goes back to; None where all begin with one model."""
        return data.start.pretraining(arm.name, seed, scale.starts)

    def target(self, model: Classifier) -> nn.Module:
        """Return the model of transformers."""
        return model.network

    def batches(self, data: GlueData, scale: GlueScale, seed: int) -> LengthBatches:
        """Return batches of examples of similar length."""
        return LengthBatches(data.train.lengths, batch_size=scale.batch_size, seed=seed)

    def collate(self, examples: Sequence[EncodedText]) -> dict[str, Tensor]:
        """Return a padded batch."""
        return make_collator(self._padding)(examples)

    def on_dev(self, model: Any, data: GlueData) -> dict[str, Any]:
        """Return the set's score on dev."""
        answers = _decide(data, self._logits(model, data.dev))
        return {"pooled": score_answers(data.found.score, answers, data.dev.labels)}

    def on_test(self, model: Any, data: GlueData) -> Answers:
        """Return the answers to GLUE's dev file, and what else is measured of them."""
        logits = self._logits(model, data.test)
        answers = _decide(data, logits)
        measures = {"loss": float(losses(torch.from_numpy(logits), torch.from_numpy(data.test.labels)).mean())}
        return _make_answers(data, answers, {**measures, **_measure(data, answers)})

    def losses(self, model: Any, data: GlueData) -> NDArray[np.float64]:
        """Return the loss of each test example, and 1."""
        logits, labels = self._logits(model, data.test), torch.from_numpy(data.test.labels)
        found = losses(torch.from_numpy(logits), labels).double().numpy()
        return np.stack([found, np.ones(len(found))], axis=1)

    def difficulties(self, data: GlueData) -> NDArray[np.int64]:
        """Return the number of tokens of each test example, rounded up to the end of its bin."""
        return round_to_bins(data.test.lengths, self.bins)

    def probe(self, model: Any, data: GlueData) -> Iterator[None]:
        """Run the model on dev examples, one batch per item."""
        for batch in spread_batches(data.dev.lengths, PROBED, BATCH):
            self._run(model, [data.dev[int(place)] for place in batch])
            yield

    def baseline(self, name: str, data: GlueData, seed: int) -> Answers:  # noqa: ARG002  nothing is drawn
        """Return the most frequent class of training, or its mean score."""
        labels = data.train.labels
        answer = np.bincount(labels.astype(np.int64)).argmax() if data.found.labels else labels.mean()
        return _make_answers(data, np.full(len(data.test), float(answer)), {})

    def export(self, model: Any, data: GlueData, scale: GlueScale, folder: Path) -> None:
        """Write the answers to GLUE's test files for its server, and the model if `keep_model` is set."""
        if scale.keep_model:
            _save_model(model, data, folder)
        for name, examples, split in data.read_unlabeled():
            (folder / SUBMISSION).mkdir(exist_ok=True)
            answers = _decide(data, self._logits(model, split))
            write_text(folder / SUBMISSION / f"{name}.tsv", format_submission(data.found, examples, answers.tolist()))

    def open_frozen(self, folder: Path, record: Mapping[str, Any], pipeline: Path | None) -> Frozen:  # noqa: ARG002  nothing is rebuilt
        """Refuse a run that kept no model."""
        raise DataError(
            f"{folder} keeps no folder {self.exported!r} with a model and its tokenizer; run it with --set "
            "keep_model=true. One with gates, talking heads or differential attention is never kept."
        )

    def _logits(self, model: Any, split: GlueSplit) -> NDArray[np.float32]:
        """Return the logits of each example of a split, [N, classes], or its number over 5, [N]."""
        found: NDArray[np.float32] | None = None
        with torch.no_grad():
            for batch in batch_by_length(split.lengths, BATCH):
                made = self._run(model, [split[int(place)] for place in batch])["logits"].float().cpu().numpy()
                found = np.zeros((len(split), *made.shape[1:]), dtype=np.float32) if found is None else found
                found[batch] = made
        assert found is not None  # no split is empty
        return found

    def _run(self, model: Any, examples: Sequence[EncodedText]) -> dict[str, Tensor]:
        batch = {name: tensor for name, tensor in self.collate(examples).items() if name != "labels"}
        return model(**to_device(batch, model))


def _decide(data: GlueData, logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the class of each example, or its score from 0 to 5."""
    return (logits.argmax(axis=1) if data.found.labels else 5.0 * logits).astype(np.float64)


def _make_answers(data: GlueData, answers: NDArray[np.float64], measures: Mapping[str, float]) -> Answers:
    # scores are distinguished to five decimals
    predicted = answers if data.found.labels else np.round(1e5 * answers)
    statistics = np.stack([np.full(len(answers), float(data.found.score)), answers, data.test.labels], axis=1)
    return Answers(statistics, predicted.astype(np.int64), measures)


def _save_model(model: Classifier, data: GlueData, folder: Path) -> None:
    """Write a folder that another fine-tuning can begin with; none where transformers would lose what an arm added."""
    if holds_added(model.network):
        return
    with quietly(), new_folder(folder / MODEL, replaced=None) as temporary:
        if find_aggregators(model.network):
            save(model.network, temporary)
        else:
            model.network.save_pretrained(temporary)
        data.tokenizer.save_pretrained(temporary)


def _measure(data: GlueData, answers: NDArray[np.float64]) -> dict[str, float]:
    truth = data.test.labels
    if not data.found.labels:
        from scipy.stats import pearsonr

        if np.ptp(answers) == 0.0 or np.ptp(truth) == 0.0:
            return {"Pearson": 0.0}
        found: Any = pearsonr(answers, truth)
        return {"Pearson": float(found.statistic)}
    measures = {"accuracy": 100 * score_answers(ACCURACY, answers, truth)}
    if len(data.found.labels) == 2:
        from sklearn.metrics import f1_score

        measures["F1"] = float(f1_score(truth, answers, zero_division=cast(Any, 0.0)))
    return measures
