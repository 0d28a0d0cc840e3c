"""What the laboratory asks of a task, so that training, comparing and tuning are written once.

Owns the protocol of tasks and the small values that pass between a task and the laboratory. Must not know any task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from headwise.errors import require_choice, require_integer, require_positive, require_range
from headwise.lab.experiment.guided import Guided
from headwise.lab.experiment.metrics import Measure
from headwise.masks.head_mask import HeadMask

Batch = Mapping[str, Tensor]
# Metadata of a scale's field that says where something lies on disk: what lies there is part of the data's digest.
UNRECORDED: Mapping[str, bool] = {"recorded": False}


@dataclass(frozen=True)
class Recipe:
    """How a run of a scale is trained.

    Attributes:
        learning_rate: Peak rate of the optimizer.
        epochs: Passes over the training split.
        warmup_steps: Steps of linear warm-up.
        warmup_share: Share of all steps that warm up where `warmup_steps` is 0, in [0, 1).
        schedule: How the rate falls after the warm-up: to zero in a line, or with the inverse square root of the step.
        clip_norm: Largest norm of the gradient, repulsion included; 0 clips nothing.
        betas: Adam's decay rates.
        epsilon: Adam's epsilon.
        weight_decay: Decoupled weight decay (AdamW); 0 is Adam as Kingma and Ba wrote it.
        accumulation: Batches a step.
        averaged: How many of the last epochs' weights are averaged for the test; 1 takes the last.
        bfloat16: Whether a GPU computes under bfloat16 autocast; a CPU never does.
        optimizer: Adam, or plain SGD with momentum 0.9.

    Raises:
        SettingError: A value is outside its range.
    """

    learning_rate: float
    epochs: int
    warmup_steps: int
    schedule: Literal["linear", "inverse_sqrt"] = "linear"
    clip_norm: float = 5.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    accumulation: int = 1
    averaged: int = 1
    bfloat16: bool = False
    # records from before there was a choice have none; a scale that chooses records its own choice
    optimizer: Literal["adam", "sgd"] = field(default="adam", metadata={"recorded": False})
    # a scale that has such a share records it itself
    warmup_share: float = field(default=0.0, metadata={"recorded": False})

    def warmup(self, steps: int) -> int:
        """Return how many of a run's steps warm up.

        >>> Recipe(1e-3, 3, 0, warmup_share=0.1).warmup(250)
        25
        """
        return self.warmup_steps or int(self.warmup_share * steps)

    def __post_init__(self) -> None:
        require_positive("learning_rate", self.learning_rate)
        require_positive("epsilon", self.epsilon)
        for name in ("epochs", "accumulation"):
            require_integer(name, getattr(self, name), low=1)
        require_integer("averaged", self.averaged, low=1, high=self.epochs)
        require_integer("warmup_steps", self.warmup_steps)
        require_choice("schedule", self.schedule, ("linear", "inverse_sqrt"))
        require_choice("optimizer", self.optimizer, ("adam", "sgd"))
        require_range("clip_norm", self.clip_norm, low=0.0)
        require_range("weight_decay", self.weight_decay, low=0.0)
        require_range("warmup_share", self.warmup_share, low=0.0, high=1.0)


class Scale(Protocol):
    """A size of a task: a frozen dataclass whose fields are its record."""

    @property
    def name(self) -> str:
        """Its name on the command line."""
        ...

    @property
    def recipe(self) -> Recipe:
        """How it is trained."""
        ...

    @property
    def compile_routing(self) -> bool:
        """Whether routing is compiled."""
        ...


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
        """Return what a person should know of the data before training begins, in a few lines."""
        ...


class Batches(Protocol):
    """A batch sampler whose order follows from (seed, epoch) alone, with the same number of batches each epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Answers:
    """What a model answered on a split.

    Attributes:
        statistics: What the metric needs of each item, [N] or [N, K].
        predicted: The answers, or what tells them apart, int64 [N].
        measures: Further numbers about them, by name.
        text: The answers as lines of text, where they are text.
        signatures: How each score was computed, by its name, where a library says so.
    """

    statistics: NDArray
    predicted: NDArray
    measures: Mapping[str, float] = field(default_factory=dict)
    text: Sequence[str] | None = None
    signatures: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class Preparing(Protocol):
    """A task whose data is prepared once, into a folder that can be taken elsewhere."""

    def prepare(self, folder: Path, scale: Any, place: Path, *, tokenizer: Path | None, progress: bool = False) -> Data:
        """Write what `Task.load` then takes for the same scale into the folder `place`; nothing is overwritten."""
        ...


class Task(Protocol):
    """A task of the laboratory.

    Attributes:
        name: Its name on the command line.
        metric: Name of its metric, one of `metric.METRICS`.
        primary: What verdicts are about, in words.
        difficulty: What the bins of test items are by.
        scales: Its scales by name.
        baselines: Rows of its table that no arm makes.
        shown: What of `Answers.measures` is shown beside the metric.
    """

    name: str
    metric: str
    primary: str
    difficulty: str
    scales: Mapping[str, Any]
    baselines: tuple[str, ...]
    shown: tuple[Measure, ...]

    def load(self, folder: Path | None, scale: Any, cache: Path | None, *, progress: bool = False) -> Any:
        """Return the data of a scale, from a folder of files or, where the task can, generated."""
        ...

    def model(self, data: Any, scale: Any) -> nn.Module:
        """Return a new model, whose forward takes a collated batch and returns "loss" among others."""
        ...

    def studied(self, model: Any) -> nn.Module:
        """Return the part of a model whose heads the arms act on."""
        ...

    def batches(self, data: Any, scale: Any, seed: int) -> Sampler[list[int]]:
        """Return the batches of the training split; also `Batches`."""
        ...

    def collate(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        """Return examples of the training split as a batch of the model's arguments."""
        ...

    def on_dev(self, model: Any, data: Any) -> dict[str, Any]:
        """Return what the epoch's record says of dev: "pooled", the number tuning goes by, and what else there is."""
        ...

    def on_test(self, model: Any, data: Any) -> Answers:
        """Return a trained model's answers on the test split."""
        ...

    def greedy(self, model: Any, data: Any) -> NDArray:
        """Return what the metric needs of each test item, [N] or [N, K], answered by the cheapest search."""
        ...

    def losses(self, model: Any, data: Any) -> NDArray:
        """Return for each test item the sum of its losses and how many predictions it is of, float64 [N, 2]."""
        ...

    def difficulties(self, data: Any) -> NDArray:
        """Return the bin of each test item, int [N]."""
        ...

    def references(self, data: Any) -> Sequence[str] | None:
        """Return the text each test answer is scored against, where answers are text that sacreBLEU tests in pairs."""
        ...

    def probe(self, model: Any, data: Any) -> Iterable[None]:
        """Run the model on examples spread evenly over dev, one batch each time it is asked, for measures of heads."""
        ...

    def baseline(self, name: str, data: Any, seed: int) -> Answers:
        """Return the answers of a baseline on the test split."""
        ...

    def keepsakes(self, data: Any) -> Mapping[str, str]:
        """Return what a run's folder holds beside settings and weights so that its model can be used: name to text."""
        ...


@runtime_checkable
class WithModels(Protocol):
    """A task with models besides its own, which have no attention; arms name them.

    Attributes:
        models: Their names.
    """

    models: tuple[str, ...]

    def other_model(self, name: str, data: Any, scale: Any) -> nn.Module:
        """Return a new model of that name, which takes the same batches."""
        ...


class MakesMasks(Protocol):
    """What makes the role masks of a batch from the keyword arguments of a model's forward, or of its encoder's."""

    def __call__(self, batch: Mapping[str, Any]) -> HeadMask:
        """Return the masks."""
        ...

    def keep(self, folder: Path) -> None:
        """Write what makes masks of sentences in no data into a run's folder, beside its weights."""
        ...


@runtime_checkable
class WithRoles(Protocol):
    """A task whose sentences have words that heads can be guided by."""

    def role_masks(self, guided: Guided, data: Any, scale: Any, seed: int) -> MakesMasks:
        """Return what makes the masks of a batch.

        Raises:
            DataError: A role needs a parse, and there are none.
        """
        ...


@runtime_checkable
class WithRuleLayers(Protocol):
    """A task whose paper repels the heads of some layers alone."""

    def rule_layers(self, scale: Any) -> tuple[int, ...] | None:
        """Return the layers that a rule acts on where its arm names none; None for all."""
        ...


@runtime_checkable
class Exporting(Protocol):
    """A task whose trained model is for other programs too."""

    def export(self, model: Any, data: Any, scale: Any, folder: Path) -> None:
        """Write the model of a finished run into its folder in a form that others read."""
        ...


@runtime_checkable
class FindsData(Protocol):
    """A task that can say of a place whether it holds its data, before a run reads all of it."""

    def find(self, folder: Path, scale: Any) -> None:
        """Refuse a place that `load` would refuse for holding something else.

        Raises:
            DataError: There is no such place, or it holds no data of the task.
        """
        ...


@runtime_checkable
class WithStarts(Protocol):
    """A task whose runs begin with models that were trained before, perhaps one for each arm."""

    def started(self, arm: Any, data: Any, scale: Any, seed: int) -> nn.Module:
        """Return the model that a run begins with.

        Raises:
            DataError: It is not there.
        """
        ...

    def remaining(self, arm: Any, data: Any) -> Any:
        """Return what an arm still does; an arm that acted in the training before may do nothing."""
        ...

    def start_of(self, arm: Any, data: Any, scale: Any, seed: int) -> int | None:
        """Return which of its arm's earlier runs a run begins with, where the arm's method acted in these; else None.

        Runs that begin with one of them are not independent of one another.
        """
        ...

    def lacking(self, folder: Path) -> str:
        """Return the name of a file without which data cannot be run on; "" where all are there."""
        ...


@runtime_checkable
class WithParts(Protocol):
    """A task of which one run may be several trainings: the folds of a cross-validation."""

    def parts(self, folder: Path | None, scale: Any, cache: Path | None) -> Sequence[Any]:
        """Return the scale of each training of a run, in the order of the test items; the scale itself where it is one.

        The names of the parts are 0, 1, ... and their test items, one part after another, are those of the whole.
        """
        ...
