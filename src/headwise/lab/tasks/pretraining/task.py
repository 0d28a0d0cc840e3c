"""The pre-training task: ELECTRA on text of any size (Clark et al. 2020; An et al. 2020, section 5.3)."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.errors import DataError
from headwise.lab.data.batching import to_device
from headwise.lab.experiment.evaluation import spread_evenly
from headwise.lab.experiment.frozen import Frozen
from headwise.lab.experiment.metrics import Auc
from headwise.lab.experiment.run_folder import whole_folder, write_text
from headwise.lab.experiment.task import Answers, Task
from headwise.lab.frozen.open import open_export
from headwise.lab.models.electra import ElectraPretraining
from headwise.lab.models.pretrained import quietly
from headwise.lab.tasks.pretraining.data import MaskedRow, PretrainingData, StreamBatches, load_text, open_text
from headwise.lab.tasks.pretraining.files import FORMS, find_files
from headwise.lab.tasks.pretraining.prepare import RECORD, TOKENIZER, compute_fingerprint, prepare_text
from headwise.lab.tasks.pretraining.scales import PRETRAINING_SCALES, PretrainingScale
from headwise.lab.tasks.pretraining.scores import SHOWN, compute_losses, compute_placements, score_rows
from headwise.lab.training.start import DISCRIMINATOR

PROBED, PROBED_TOGETHER = 64, 32
# Test rows are binned by how many of their tokens continue a word, in tens.
BIN = 10


class PretrainingTask(Task):
    """Replaced token detection with a generator trained with it; see `task.Task`."""

    name = "pretraining"
    metric = Auc().name
    primary = "AUC of replaced token detection on the test rows, each model with its own generator"
    difficulty = "continuing word pieces, up to"
    scales = PRETRAINING_SCALES
    baselines = ("original",)
    prepares = True
    shown = SHOWN

    def load(
        self, folder: Path | None, scale: PretrainingScale, cache: Path | None, *, progress: bool = False
    ) -> PretrainingData:
        """Return the data of a place of text, or of a folder that was prepared before.

        Raises:
            DataError: No place was named, it holds no text, or the folder was prepared with other sizes.
        """
        if folder is None:
            raise DataError(f"pretraining needs --data: {FORMS}.")
        if (folder / RECORD).exists():
            return _open_prepared(folder, scale)
        if cache is None:
            raise DataError("pretraining prepares its data in a cache folder, and none was given.")
        return load_text(
            folder, scale.preparation, cache, scale.masked, scale.dev_rows, scale.test_rows, progress=progress
        )

    def find(self, folder: Path, scale: PretrainingScale) -> None:
        """Refuse a place without text."""
        if (folder / RECORD).exists():
            _open_prepared(folder, scale)
        else:
            find_files(folder)

    def prepare(
        self, folder: Path, scale: PretrainingScale, place: Path, *, tokenizer: Path | None, progress: bool = False
    ) -> PretrainingData:
        """Write the data of a scale into the folder `place`, which `load` then takes, here or on another machine.

        Raises:
            DataError: As `load`, or `place` holds something else.
        """
        if (folder / RECORD).exists():
            raise DataError(f"{folder} is prepared already; give it to headwise compare pretraining --data.")
        files, preparation = find_files(folder), dataclasses.replace(scale.preparation, tokenizer=tokenizer)
        fingerprint = compute_fingerprint(files, preparation)
        if place.exists() and any(place.iterdir()):
            held = open_text(place, scale.masked, None, None) if (place / RECORD).exists() else None
            if held is None or held.fingerprint != fingerprint:
                raise DataError(f"{place} holds something else; name another folder.")
        else:
            if place.exists():
                place.rmdir()
            prepare_text(files, preparation, fingerprint, place, progress=progress)
        return open_text(place, scale.masked, scale.dev_rows, scale.test_rows)

    def model(self, data: PretrainingData, scale: PretrainingScale) -> ElectraPretraining:
        """Return a generator and a discriminator."""
        return ElectraPretraining(scale.sizes(data.words.vocabulary_size), padding=data.words.padding)

    def target(self, model: ElectraPretraining) -> nn.Module:
        """Return the discriminator."""
        return model.discriminator

    def rule_layers(self, scale: PretrainingScale) -> tuple[int, ...] | None:
        """Return the first layer, as in the paper."""
        return None if scale.all_layers else (0,)

    def batches(self, data: PretrainingData, scale: PretrainingScale, seed: int) -> StreamBatches:
        """Return the stream of batches, a round at a time."""
        steps = scale.steps // scale.rounds
        return StreamBatches(data.shards, batch_size=scale.batch_size, steps=steps, seed=seed)

    def collate(self, examples: Sequence[MaskedRow]) -> dict[str, Tensor]:
        """Return a batch."""
        return MaskedRow.batch(examples)

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

    def extra_files(self, data: PretrainingData) -> dict[str, str]:
        """Return the word pieces."""
        return {TOKENIZER: data.words.to_json()}

    def export(self, model: ElectraPretraining, data: PretrainingData, scale: PretrainingScale, folder: Path) -> None:  # noqa: ARG002  every scale's is exported
        """Write the discriminator and its tokenizer: `from_pretrained` takes the folder.

        With an aggregator in it only `headwise.load` does, and transformers refuses it.
        """
        with quietly(), whole_folder(folder / DISCRIMINATOR) as temporary:
            exported: Any = model.discriminator
            exported.save_pretrained(temporary)
            for name, text in data.words.files().items():
                write_text(temporary / name, text)

    def open_frozen(self, folder: Path, record: Mapping[str, Any], pipeline: Path | None) -> Frozen:  # noqa: ARG002  nothing is parsed
        """Return the discriminator of a run."""
        return open_export(folder, DISCRIMINATOR)


def _open_prepared(folder: Path, scale: PretrainingScale) -> PretrainingData:
    data = open_text(folder, scale.masked, scale.dev_rows, scale.test_rows)
    record = data.record
    if record["length"] != scale.length or (
        record["tokenizer"] == "learned" and record["vocabulary_size"] > scale.vocabulary_size
    ):
        raise DataError(
            f"{folder} was prepared with rows of {record['length']} tokens and {record['vocabulary_size']} word "
            f"pieces, and scale {scale.name} has {scale.length} and {scale.vocabulary_size}; prepare it for that scale."
        )
    return data
