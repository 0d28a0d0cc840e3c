# %% [markdown]
# # Add a task
#
# A task of the laboratory says what its data are, how its model is built and how it is scored. Training, arms,
# resuming, tables and verdicts are written against that. In the repository a task is a folder in `headwise_lab/tasks`
# with two files, `task.toml` and `task.py`, and a line in `headwise_lab/experiment/registry.py`; here both are on this
# page. The task: which of five symbols occurs most often in a sequence?

# %%
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import DataError
from headwise.input_files import parse_json
from headwise.settings import Count, Natural, Positive
from headwise_lab.experiment import registry
from headwise_lab.experiment.arm_text import parse_arm
from headwise_lab.experiment.scale import Scale, read_presets
from headwise_lab.experiment.settings import RunSettings
from headwise_lab.experiment.task import ClassifierTask
from headwise_lab.training.train import train_run

SYMBOLS = 5

# %% [markdown]
# **Settings** are data, in `task.toml`: the metric, what bins of test items are made of, and the presets. A value under
# `[scales]` is every preset's; a table in it is a preset.

# %%
SETTINGS = Path(tempfile.mkdtemp()) / "task.toml"
SETTINGS.write_text("""
metric = "accuracy"
primary = "accuracy"
difficulty = "length, up to"
bins = [5, 10, 15]
baselines = ["majority"]

[scales]
heads = 4
batch_size = 64

[scales.demo]
width = 16
learning_rate = 5e-3
epochs = 2
warmup_steps = 10
train_examples = 2_000
""")

# %% [markdown]
# **Scales** are the sizes of a run. Their types say what a size may be.

# %%


@dataclass(frozen=True)
class CountingScale(Scale):
    """Sizes of the task."""

    name: str
    width: Count
    heads: Count
    learning_rate: Positive
    batch_size: Count
    epochs: Count
    warmup_steps: Natural
    train_examples: Count
    compile_routing: bool = False


SCALES = read_presets(SETTINGS, CountingScale)

# %% [markdown]
# **Data** are three splits. A split of a classifier has labels and lengths.

# %%


class Split:
    """Sequences of symbols and the most frequent one of each."""

    def __init__(self, number: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.lengths = generator.integers(5, 16, number)
        self.items = [generator.integers(0, SYMBOLS, length) for length in self.lengths]
        self.labels = np.array([np.bincount(item, minlength=SYMBOLS).argmax() for item in self.items])

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> tuple[np.ndarray, int]:
        return self.items[place], int(self.labels[place])


class CountingData:
    """Splits that follow from their sizes alone."""

    def __init__(self, scale: CountingScale) -> None:
        self.train, self.dev, self.test = Split(scale.train_examples, 0), Split(300, 1), Split(300, 2)
        self.fingerprint = f"counting {scale.train_examples}"

    def summary(self) -> str:
        """Return what is printed before training."""
        return f"sequences: {len(self.train)} train, {len(self.dev)} dev, {len(self.test)} test"


# %% [markdown]
# **The model** takes a batch and returns its loss. `find_heads` finds the heads.

# %%


class Counter(nn.Module):
    """One attention layer over embedded symbols."""

    def __init__(self, scale: CountingScale) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS + 1, scale.width, padding_idx=SYMBOLS)
        self.encoder = nn.TransformerEncoderLayer(scale.width, scale.heads, 32, dropout=0.0, batch_first=True)
        self.output = nn.Linear(scale.width, SYMBOLS)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the logits of each sequence, and the loss where labels are given."""
        padding = tokens == SYMBOLS
        states = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        logits = self.output(states.masked_fill(padding[..., None], 0.0).sum(1) / (~padding).sum(1, keepdim=True))
        return {"logits": logits} | ({} if labels is None else {"loss": F.cross_entropy(logits, labels)})


# %% [markdown]
# **The task** joins them: a classifier's scores and its majority baseline are there already.

# %%


class CountingTask(ClassifierTask, settings=SETTINGS):
    """Which symbol is most frequent?"""

    name = "counting"
    scales = SCALES

    def load(
        self, folder: Path | None, scale: CountingScale, cache: Path | None, *, progress: bool = False
    ) -> CountingData:
        """Return the data, which are generated."""
        return CountingData(scale)

    def find(self, folder: Path, scale: CountingScale) -> None:
        """Refuse any folder."""
        raise DataError(f"{folder} was given; the task generates its data.")

    def model(self, data: CountingData, scale: CountingScale) -> Counter:
        """Return a new model."""
        return Counter(scale)

    def collate(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        """Return a padded batch."""
        rows = [torch.as_tensor(item) for item, _ in examples]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=SYMBOLS)
        return {"tokens": tokens, "labels": torch.tensor([label for _, label in examples])}


registry.TASKS = {**registry.TASKS, "counting": f"{__name__}:CountingTask"}

# %% [markdown]
# Every arm now runs on it. In the repository, `headwise compare counting --arms plain,cka,svgd` would train all arms
# with all seeds and write the table; here are two runs.

# %%
folder = Path(tempfile.mkdtemp())
for name in ("plain", "cka"):
    settings = RunSettings("counting", SCALES["demo"], parse_arm(name), seed=0, cache=folder)
    train_run(settings, folder / name)
    result = parse_json((folder / name / "result.json").read_text())
    print(name, "accuracy", round(result["score"]["pooled"], 3), "effective heads", round(result["effective_heads"], 2))
