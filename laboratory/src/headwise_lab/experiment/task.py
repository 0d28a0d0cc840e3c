"""`Task`, the interface that training, comparing and tuning are written against, and the values it works with.

Tasks whose model classifies: predictions and cross entropies on a whole split, in batches of similar length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from headwise.errors import DataError, SettingError
from headwise.heads.heads import Heads
from headwise.masks.head_mask import HeadMask
from headwise.shrinking.prune import prune
from headwise.texts.batching import LengthBatches, batch_by_length, to_device
from headwise.texts.frozen import Frozen
from headwise_lab.experiment.arm import Guided
from headwise_lab.experiment.evaluation import Measure, round_to_bins, spread_batches, spread_evenly
from headwise_lab.experiment.scale import read_task_file


def name_run(folder: Path) -> str:
    """Return what a run is called: its arm and its seed.

    >>> name_run(Path("/runs/logic-demo/plain/seed-0"))
    'plain-seed-0'
    """
    return f"{folder.resolve().parent.name}-{folder.resolve().name}"


Batch = Mapping[str, Tensor]


class Data(Protocol):
    """The splits of a task."""

    @property
    def train(self) -> Dataset:
        """The training split."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest of everything the data follows from."""
        ...

    def summary(self) -> str:
        """Return a description of the data to print before training, in a few lines."""
        ...


class Batches(Protocol):
    """A batch sampler whose order depends on (seed, epoch) only, with the same number of batches each epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order comes next."""
        ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Answers:
    """What a model answered on a split.

    Attributes:
        statistics: Statistics of each item for the metric, [N] or [N, K].
        predicted: The answers, or numbers that identify them, int64 [N].
        measures: Further measures of the answers, by name.
        text: The answers as lines of text, if they are text.
        signatures: The signature of each score by name, if its library has one.
    """

    statistics: NDArray
    predicted: NDArray
    measures: Mapping[str, float] = field(default_factory=dict)
    text: Sequence[str] | None = None
    signatures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Analysis:
    """An analysis of a finished run; functions are named as "module:function".

    Attributes:
        measure: Function of the run's settings and folder that returns {"numbers": {name: number}, ...}.
        about: Function of the run's scale that returns a digest of what else the numbers depend on; kept as "about".
        once: Whether it is the same for all seeds and measured for the first only.
    """

    measure: str
    about: str = ""
    once: bool = False


class MaskMaker(Protocol):
    """Makes the role masks of a batch from the keyword arguments of a model's forward, or of its encoder's."""

    def __call__(self, batch: Mapping[str, Any]) -> HeadMask:
        """Return the masks."""
        ...

    def keep(self, folder: Path) -> None:
        """Write the files for masks of new sentences into a run's folder."""
        ...


class Task(ABC):
    """A task of the laboratory: its data, model and scores.

    `class MyTask(Task, settings=Path(__file__).with_name("task.toml"))` takes the attributes below from that file,
    `shown` and `analyses` as tables, and `scales` from `read_presets`. Other tables in it are the task's own.

    Attributes:
        name: Its name on the command line.
        metric: Name of its metric, one of `metrics.METRICS`.
        primary: The metric that verdicts are about, in words.
        difficulty: The quantity that bins of test items are made of.
        bins: The last quantity of each bin; the last bin takes what is beyond. Empty where each quantity is a bin.
        scales: Its presets by name.
        baselines: Names of its baselines.
        shown: The measures in `Answers.measures` that the table shows in addition to the metric.
        models: Names of models without attention that arms may use instead of the task's model.
        prepares: Whether `prepare` can write its data into a folder that `load` reads.
        analyses: Analyses of its finished runs in addition to `analyses.registry.ANALYSES`, by name.
        exported: Folder inside a finished run from which its model is read, in the format of Hugging Face; "" for none.
            Without that folder, `open_frozen` reads the run.
    """

    name: str
    metric: str
    primary: str
    difficulty: str
    scales: Mapping[str, Any]
    baselines: tuple[str, ...]
    bins: tuple[int, ...] = ()
    shown: tuple[Measure, ...] = ()
    models: tuple[str, ...] = ()
    prepares: bool = False
    analyses: Mapping[str, Analysis] = {}
    exported: str = ""

    def __init_subclass__(cls, settings: Path | None = None) -> None:
        """Take the attributes from a file.

        Raises:
            DataError: The file cannot be read, or a setting is unknown or wrong.
        """
        super().__init_subclass__()
        if settings is None:
            return
        found = read_task_file(settings)
        found = {name: value for name, value in found.items() if name == "analyses" or not isinstance(value, Mapping)}
        for name in found:
            if not hasattr(cls, name) and name not in Task.__annotations__:
                raise DataError(f"{settings}: {name} is not a setting of {cls.__name__}; correct its name or omit it.")
        try:
            found["shown"] = tuple(Measure(**measure) for measure in found.get("shown", ()))
            found["analyses"] = {name: Analysis(**values) for name, values in found.get("analyses", {}).items()}
        except TypeError as error:
            raise DataError(f"{settings}: {error}; correct what is shown or the analyses.") from None
        for name, value in found.items():
            setattr(cls, name, value)

    @abstractmethod
    def load(self, folder: Path | None, scale: Any, cache: Path | None, *, progress: bool = False) -> Any:
        """Return the `Data` of a scale, from a folder of files or, if the task can, generated."""

    @abstractmethod
    def find(self, folder: Path, scale: Any) -> None:
        """Raise `DataError` for a path without data of the task, without reading all of it."""

    @abstractmethod
    def model(self, data: Any, scale: Any) -> nn.Module:
        """Return a new model, whose forward takes a collated batch and returns "loss" among others."""

    @abstractmethod
    def batches(self, data: Any, scale: Any, seed: int) -> Sampler[list[int]]:
        """Return the batches of the training split; also `Batches`."""

    @abstractmethod
    def collate(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        """Return examples of the training split as a batch of the model's arguments."""

    @abstractmethod
    def on_dev(self, model: Any, data: Any) -> dict[str, Any]:
        """Return the dev scores of an epoch: "pooled", which tuning maximizes, and possibly others."""

    @abstractmethod
    def on_test(self, model: Any, data: Any) -> Answers:
        """Return a trained model's answers on the test split."""

    @abstractmethod
    def losses(self, model: Any, data: Any) -> NDArray:
        """Return for each test item the sum of its losses and the number of predictions in it, float64 [N, 2]."""

    @abstractmethod
    def difficulties(self, data: Any) -> NDArray:
        """Return the bin of each test item, int [N]."""

    @abstractmethod
    def probe(self, model: Any, data: Any) -> Iterable[None]:
        """Run the model on examples spread evenly over dev, one batch per item, for measures of heads."""

    @abstractmethod
    def baseline(self, name: str, data: Any, seed: int) -> Answers:
        """Return the answers of a baseline on the test split."""

    def dev_losses(self, model: Any, data: Any) -> Iterator[Tensor]:
        """Yield the losses of items spread evenly over dev with their graph, [B], where attention has a row per item.

        Raises:
            SettingError: The task has no such losses.
        """
        raise SettingError(f"task {self.name} has no losses of dev items to weigh heads by.")

    def target(self, model: Any) -> nn.Module:
        """Return the part of a model whose heads the arms act on: the whole model unless overridden."""
        return model

    def prune(self, model: Any, heads: Heads, removed: Mapping[str, Sequence[int]]) -> None:
        """Remove heads from a model's weights, in place; `removed` has the numbers of heads by attention."""
        prune(heads, removed)

    def greedy(self, model: Any, data: Any) -> NDArray:
        """Return the metric's statistics of each test item, [N] or [N, K], with the cheapest decoding."""
        return self.on_test(model, data).statistics

    def references(self, data: Any) -> Sequence[str] | None:
        """Return the reference of each test item for sacreBLEU's paired tests; None if there are none."""
        return None

    def extra_files(self, data: Any) -> Mapping[str, str]:
        """Return further files that a run's model needs: name to text."""
        return {}

    def parts(self, folder: Path | None, scale: Any, cache: Path | None) -> Sequence[Any]:
        """Return the scale of each training of a run, such as the folds, in the order of the test items."""
        return (scale,)

    def prepare(self, folder: Path, scale: Any, place: Path, *, tokenizer: Path | None, progress: bool = False) -> Any:
        """Write data that `load` reads for the same scale into the new folder `place`, and return the data."""
        raise NotImplementedError

    def other_model(self, name: str, data: Any, scale: Any) -> nn.Module:
        """Return a new model that `models` names, which takes the same batches."""
        raise NotImplementedError

    def role_masks(self, guided: Guided, data: Any, scale: Any, seed: int) -> MaskMaker:
        """Return a maker of role masks.

        Raises:
            SettingError: The task's sentences have no words.
            DataError: A role needs a parse, and there are none.
        """
        raise SettingError(f"task {self.name} has no words with roles; guided heads need a task that has.")

    def rule_layers(self, scale: Any) -> tuple[int, ...] | None:
        """Return the layers that a rule acts on by default; None for all."""
        return None

    def initial_model(self, arm: Any, data: Any, scale: Any, seed: int) -> nn.Module:
        """Return the model that a run starts from, perhaps one that an earlier run of the same arm trained.

        Raises:
            DataError: It does not exist.
        """
        return self.model(data, scale)

    def remaining_arm(self, arm: Any, data: Any) -> Any:
        """Return the part of an arm that is left to do; an arm may have acted in an earlier training only."""
        return arm

    def initial_run(self, arm: Any, data: Any, scale: Any, seed: int) -> int | None:
        """Return the seed of its arm's earlier run that a run starts from; None if it starts from scratch.

        Runs that start from the same one are not independent.
        """
        return None

    def missing_file(self, folder: Path) -> str:
        """Return the name of a required file that a folder of data lacks, or ""."""
        return ""

    def export(self, model: Any, data: Any, scale: Any, folder: Path) -> None:
        """Write the model of a finished run into its folder in a format that other programs read."""

    def open_frozen(self, folder: Path, record: Mapping[str, Any], pipeline: Path | None) -> Frozen:
        """Return the model of a finished run for reading.

        Args:
            folder: The run's folder.
            record: Its settings.
            pipeline: The spaCy pipeline that parsed the run's texts; None for the path used in training.

        Raises:
            DataError: The run cannot be read.
        """
        raise DataError(
            f"{folder} has no folder {self.exported!r} with a model and its tokenizer: one with gates, talking heads "
            "or differential attention is not written; of any other arm, train it again."
        )


# Evaluation batch size.
BATCH = 256
# From the indices of some items of a split to their logits [B, classes].
Logits = Callable[[NDArray[np.int64]], Tensor]


class ClassifierTask(Task):
    """A task whose model returns the "logits" of a batch of items; a split has their `lengths` and `labels`.

    `load`, `find`, `model` and `collate` are left to write; "majority" is a baseline.

    Attributes:
        probed: Maximum number of dev items for measures of heads.
        probe_batch: Batch size for these.
    """

    probed = 256
    probe_batch = BATCH

    def batches(self, data: Any, scale: Any, seed: int) -> LengthBatches:
        """Return batches of items of similar length."""
        return LengthBatches(data.train.lengths, batch_size=scale.batch_size, seed=seed)

    def on_dev(self, model: Any, data: Any) -> dict[str, Any]:
        """Return the accuracy on dev."""
        return {"pooled": float((self.predict(model, data.dev) == data.dev.labels).mean())}

    def difficulties(self, data: Any) -> NDArray[np.integer]:
        """Return the length of each test item, rounded up to the end of its bin where there are bins."""
        return round_to_bins(data.test.lengths, self.bins) if self.bins else data.test.lengths

    def baseline(self, name: str, data: Any, seed: int) -> Answers:
        """Return the most frequent class of training, the first of equally frequent ones, for every test item."""
        predicted = np.full(len(data.test), np.bincount(data.train.labels).argmax(), dtype=np.int64)
        return Answers(predicted == data.test.labels, predicted)

    def on_test(self, model: Any, data: Any) -> Answers:
        """Return the predicted classes and whether they are right."""
        predicted = self.predict(model, data.test)
        return Answers(predicted == data.test.labels, predicted)

    def losses(self, model: Any, data: Any) -> NDArray[np.float64]:
        """Return the cross entropy of each test item, and 1."""
        split = data.test
        return compute_cross_entropies(lambda places: self.logits(model, split, places), split.lengths, split.labels)

    def dev_losses(self, model: Any, data: Any) -> Iterator[Tensor]:
        """Yield the cross entropy of one dev item at a time, which may be several rows to attention."""
        for place in spread_evenly(len(data.dev), self.probed):
            answered = self.logits(model, data.dev, np.array([place]))
            right = torch.tensor([int(data.dev.labels[place])], device=answered.device)
            yield F.cross_entropy(answered, right, reduction="none")

    def probe(self, model: Any, data: Any) -> Iterator[None]:
        """Run the model on dev items, one batch per item of the iterator."""
        for places in spread_batches(data.dev.lengths, self.probed, self.probe_batch):
            self.logits(model, data.dev, places)
            yield

    def predict(self, model: Any, split: Any) -> NDArray[np.int64]:
        """Return the predicted class of each item of a split, [N], in the split's order."""
        return predict_classes(lambda places: self.logits(model, split, places), split.lengths)

    def logits(self, model: Any, split: Any, places: NDArray[np.int64]) -> Tensor:
        """Return the logits of some items of a split."""
        batch = to_device(self.collate([split[int(place)] for place in places]), model)
        return model(**{name: tensor for name, tensor in batch.items() if name != "labels"})["logits"]


def predict_classes(logits: Logits, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the likeliest class of each item of a split, [N], in the split's order.

    >>> predict_classes(lambda places: torch.eye(3)[places], np.array([5, 2, 9])).tolist()
    [0, 1, 2]
    """
    predicted = np.zeros(len(lengths), dtype=np.int64)
    for places in _batches(lengths):
        predicted[places] = logits(places).argmax(dim=-1).cpu().numpy()
    return predicted


def compute_cross_entropies(
    logits: Logits, lengths: NDArray[np.int64], labels: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Return the cross entropy of each item of a split and 1, [N, 2], in the split's order.

    >>> alike = lambda places: torch.zeros(len(places), 2)
    >>> compute_cross_entropies(alike, np.array([5, 2]), np.array([0, 1])).round(3).tolist()
    [[0.693, 1.0], [0.693, 1.0]]
    """
    found = np.ones((len(lengths), 2))
    for places in _batches(lengths):
        answered = logits(places)
        right = torch.from_numpy(labels[places].astype(np.int64)).to(answered.device)
        found[places, 0] = F.cross_entropy(answered, right, reduction="none").cpu().numpy()
    return found


def _batches(lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    return (np.asarray(batch, dtype=np.int64) for batch in batch_by_length(lengths, BATCH))
