"""The pre-training task: ELECTRA on text of any size (Clark et al. 2020; An et al. 2020, section 5.3)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from headwise.atomic import new_folder
from headwise.texts.batching import to_device
from headwise.texts.pretrained import holds_added, quietly
from headwise_lab.experiment.evaluation import Auc, spread_evenly
from headwise_lab.experiment.run_folder import write_text
from headwise_lab.experiment.task import Answers
from headwise_lab.models.electra import ElectraPretraining
from headwise_lab.packed_text.folder import PackedTask, find_packed, write_packed
from headwise_lab.tasks.pretraining.data import PACKING, PretrainingData
from headwise_lab.tasks.pretraining.scales import PRETRAINING_SCALES, PretrainingScale
from headwise_lab.tasks.pretraining.scores import compute_losses, compute_placements, score_rows
from headwise_lab.training.start import DISCRIMINATOR

PROBED, PROBED_TOGETHER = 64, 32
# Test rows are binned by how many of their tokens continue a word, in tens.
BIN = 10


class PretrainingTask(PackedTask, settings=Path(__file__).with_name("task.toml")):
    """Replaced token detection with a generator trained with it; see `task.Task`."""

    name = "pretraining"
    scales = PRETRAINING_SCALES
    packing = PACKING

    def load(
        self, folder: Path | None, scale: PretrainingScale, cache: Path | None, *, progress: bool = False
    ) -> PretrainingData:
        """Return the data of a place of text, or of a folder that was prepared before."""
        found = find_packed(PACKING, folder, scale.preparation, cache, scale=scale.name, progress=progress)
        return PretrainingData(*found, scale.dev_rows, scale.test_rows, scale.masked)

    def prepare(
        self, folder: Path, scale: PretrainingScale, place: Path, *, tokenizer: Path | None, progress: bool = False
    ) -> PretrainingData:
        """Write the data of a scale into the folder `place`, which `load` then takes, here or on another machine."""
        found = write_packed(PACKING, folder, scale.preparation, place, tokenizer=tokenizer, progress=progress)
        return PretrainingData(place, *found, scale.dev_rows, scale.test_rows, scale.masked)

    def model(self, data: PretrainingData, scale: PretrainingScale) -> ElectraPretraining:
        """Return a generator and a discriminator."""
        return ElectraPretraining(scale.sizes(data.words.vocabulary_size), padding=data.words.padding)

    def target(self, model: ElectraPretraining) -> nn.Module:
        """Return the discriminator."""
        return model.discriminator

    def rule_layers(self, scale: PretrainingScale) -> tuple[int, ...] | None:
        """Return the first layer, as in the paper."""
        return None if scale.all_layers else (0,)

    def on_dev(self, model: Any, data: PretrainingData) -> dict[str, Any]:
        """Return the AUC on dev and the further measures."""
        answers = score_rows(model, data.dev)
        return {"pooled": float(Auc().values(answers.statistics).mean()), **answers.measures}

    def on_test(self, model: Any, data: PretrainingData) -> Answers:
        """Return the answers on the test rows."""
        return score_rows(model, data.test)

    def losses(self, model: Any, data: PretrainingData) -> NDArray[np.float64]:
        """Return the discriminator's loss of each test row, and its tokens."""
        return compute_losses(model, data.test)

    def difficulties(self, data: PretrainingData) -> NDArray[np.int64]:
        """Return how many tokens of each test row continue a word, rounded up to the next ten."""
        continuing = data.words.continuing
        counts = np.array([continuing[data.test.ids(number)].sum() for number in range(len(data.test))])
        return np.maximum(BIN, -(-counts // BIN) * BIN)

    def probe(self, model: Any, data: PretrainingData) -> Iterator[None]:
        """Run the model on rows of dev, one batch per item."""
        chosen = spread_evenly(len(data.dev), PROBED).tolist()
        for first in range(0, len(chosen), PROBED_TOGETHER):
            batch = self.collate([data.dev[number] for number in chosen[first : first + PROBED_TOGETHER]])
            model(**to_device(batch, model), sampling_seed=first)
            yield

    def baseline(self, name: str, data: PretrainingData, seed: int) -> Answers:  # noqa: ARG002  nothing is drawn
        """Return the same score for every token, were each masked token replaced."""
        rows = data.test
        replaced = np.zeros((len(rows), rows.length), dtype=bool)
        for number in range(len(rows)):
            replaced[number, rows[number].positions] = True
        return Answers(compute_placements(np.zeros(replaced.shape), replaced), np.zeros(len(rows), dtype=np.int64))

    def export(self, model: ElectraPretraining, data: PretrainingData, scale: PretrainingScale, folder: Path) -> None:  # noqa: ARG002  every scale's is exported
        """Write the discriminator and its tokenizer: `from_pretrained` takes the folder.

        With an aggregator in it only `headwise.load` does, and transformers refuses it. A discriminator with gates,
        talking heads or differential attention is not written, since transformers would load it without them.
        """
        if holds_added(model.discriminator):
            return
        with quietly(), new_folder(folder / DISCRIMINATOR, replaced=None) as temporary:
            exported: Any = model.discriminator
            exported.save_pretrained(temporary)
            for name, text in data.words.files().items():
                write_text(temporary / name, text)
