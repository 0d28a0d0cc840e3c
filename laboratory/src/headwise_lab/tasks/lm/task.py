"""The task of language modeling: a causal model of transformers on packed text, from scratch or fine-tuned."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.errors import SettingError
from headwise.routing.aggregate import Aggregate
from headwise.texts.batching import to_device
from headwise.texts.frozen import Frozen
from headwise_lab.experiment.arm import Arm
from headwise_lab.experiment.evaluation import round_to_bins, spread_evenly
from headwise_lab.experiment.task import Answers
from headwise_lab.packed_text.folder import PackedTask, find_packed, write_packed
from headwise_lab.packed_text.shards import stack_rows
from headwise_lab.tasks.lm.attention import measure_copying, measure_sinks
from headwise_lab.tasks.lm.data import PACKING, LmData
from headwise_lab.tasks.lm.model import (
    CausalModel,
    build_model,
    find_model,
    open_causal,
    open_model,
    require_tokenizer,
    write_model,
)
from headwise_lab.tasks.lm.scales import LM_SCALES, LmScale
from headwise_lab.tasks.lm.scores import (
    compute_likelihood,
    compute_token_losses,
    find_items,
    score_cloze,
    score_rows,
    score_unigrams,
)
from headwise_lab.training.processes import IGNORED
from headwise_lab.training.start import require_kept

PROBED, PROBED_TOKENS = 64, 2_048
# Training rows that the baseline counts.
COUNTED = 50_000


class LmTask(PackedTask, settings=Path(__file__).with_name("task.toml")):
    """Causal language modeling; see `task.Task`."""

    name = "lm"
    scales = LM_SCALES
    packing = PACKING

    def load(self, folder: Path | None, scale: LmScale, cache: Path | None, *, progress: bool = False) -> LmData:
        """Return the data of a place of text, or of a folder that was prepared before."""
        start = find_model(scale)
        found = find_packed(PACKING, folder, scale.preparation, cache, scale=scale.name, progress=progress)
        if start is not None:
            require_tokenizer(found[0], found[2], scale)
        return LmData(*found, scale.dev_rows, scale.test_rows, start)

    def prepare(
        self, folder: Path, scale: LmScale, place: Path, *, tokenizer: Path | None, progress: bool = False
    ) -> LmData:
        """Write the data of a scale into the folder `place`, which `load` then takes, here or on another machine."""
        if find_model(scale) is not None and tokenizer is not None:
            raise SettingError(f"the model in {scale.pretrained} has its own tokenizer; omit --tokenizer.")
        given = tokenizer or scale.preparation.tokenizer
        found = write_packed(PACKING, folder, scale.preparation, place, tokenizer=given, progress=progress)
        return LmData(place, *found, scale.dev_rows, scale.test_rows)

    def model(self, data: LmData, scale: LmScale) -> CausalModel:
        """Return the model that plain begins with."""
        return self.initial_model(Arm("plain", control=None), data, scale, 0)

    def initial_model(self, arm: Arm, data: LmData, scale: LmScale, seed: int) -> CausalModel:  # noqa: ARG002  parameters are drawn later
        """Return a new model, or the one of the folder."""
        if data.start_model is None:
            return build_model(data.words, scale)
        require_kept(arm, scale.pretrained, "leave it out, or train a new model (without --model)")
        aggregated = arm.find(Aggregate) is not None
        return open_model(data.start_model.any_folder(), data.words, scale, aggregated=aggregated)

    def target(self, model: CausalModel) -> nn.Module:
        """Return the model of transformers."""
        return model.network

    def on_dev(self, model: Any, data: LmData) -> dict[str, Any]:
        """Return the likelihood of dev and the further measures."""
        answers = score_rows(model, data.dev, data.words)
        return {"pooled": compute_likelihood(answers.statistics), **answers.measures}

    def on_test(self, model: Any, data: LmData) -> Answers:
        """Return the likelihoods of the test rows, and what else is measured of the model."""
        answers = score_rows(model, data.test, data.words)
        measures = {
            **answers.measures,
            **score_cloze(model, find_items(data.test, data.words), data.words.end),
            **measure_copying(model, data.words, data.test.length),
            **measure_sinks(model, data.dev),
        }
        return Answers(answers.statistics, answers.predicted, measures)

    def greedy(self, model: Any, data: LmData) -> NDArray[np.float64]:
        """Return the sum of losses and the number of tokens of each test row, [N, 2]."""
        return self.losses(model, data)

    def losses(self, model: Any, data: LmData) -> NDArray[np.float64]:
        """Return the sum of losses and the number of tokens of each test row, [N, 2]."""
        return score_rows(model, data.test, data.words).statistics

    def dev_losses(self, model: Any, data: LmData) -> Iterator[Tensor]:
        """Yield the mean loss of the tokens of rows of dev."""
        for batch in _take_dev(data):
            tensors = to_device(batch, model)
            labels = tensors.pop("labels")
            losses = compute_token_losses(model(**tensors)["logits"], labels)
            yield losses.sum(dim=1) / (labels[:, 1:] != IGNORED).sum(dim=1)

    def difficulties(self, data: LmData) -> NDArray[np.int64]:
        """Return the number of documents in each test row, rounded up to the end of its bin."""
        starts = [(data.test.ids(number)[1:] == data.words.start).sum() for number in range(len(data.test))]
        return round_to_bins(1 + np.array(starts), self.bins)

    def probe(self, model: Any, data: LmData) -> Iterator[None]:
        """Run the model on rows of dev, one batch per item."""
        for batch in _take_dev(data):
            del batch["labels"]
            model(**to_device(batch, model))
            yield

    def baseline(self, name: str, data: LmData, seed: int) -> Answers:  # noqa: ARG002  nothing is drawn
        """Return the likelihoods of tokens by their frequency in training."""
        return score_unigrams(data.train, data.test, data.words, COUNTED)

    def open_frozen(self, folder: Path, record: Mapping[str, Any], pipeline: Path | None) -> Frozen:
        """Return the model of a run whose folder has none for transformers."""
        if record["scale"].get("lora"):
            # a model with adapters is not built again here
            return super().open_frozen(folder, record, pipeline)
        return open_causal(self, folder, record)

    def export(self, model: CausalModel, data: LmData, scale: LmScale, folder: Path) -> None:
        """Write the model and its tokenizer: see `write_model`."""
        write_model(model.network, data, scale, folder)


def _take_dev(data: LmData) -> Iterator[dict[str, Tensor]]:
    """Yield batches of rows spread evenly over dev."""
    chosen = spread_evenly(len(data.dev), PROBED).tolist()
    together = max(1, PROBED_TOKENS // data.dev.length)
    for first in range(0, len(chosen), together):
        yield stack_rows([data.dev[number] for number in chosen[first : first + together]])
