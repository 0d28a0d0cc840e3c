"""The probing task: a property of a sentence, such as its length or the number of its subject.

Owns what differs from classification, of which it is a kind: the files, the scales and the model. The data is
`probing_data`'s.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headwise.errors import DataError
from headwise.lab.experiment.task import Answers
from headwise.lab.tasks.classification.data import ClassificationData
from headwise.lab.tasks.classification.scales import ClassificationScale
from headwise.lab.tasks.classification.task import ClassificationTask, words_of
from headwise.lab.tasks.classification.probing_data import ProbingData, load_probing
from headwise.lab.data.probing_files import probing_file
from headwise.lab.tasks.classification.probing_model import ProbedTransformer
from headwise.lab.tasks.classification.probing_scales import PROBING_SCALES

# Beyond so many classes a linear model of pairs of words takes gigabytes.
MANY = 100


class ProbingTask(ClassificationTask):
    """Linguistic probing, trained end to end (Li et al. 2021, section 4.2); see `task.Task` for the methods."""

    name = "probing"
    primary = "accuracy on the test sentences"
    scales = PROBING_SCALES
    network = ProbedTransformer
    # beside sinusoids of that size a sentence of twenty words is read sooner than with smaller vectors (chosen on dev)
    drawn = 1.0

    def load(
        self, folder: Path | None, scale: ClassificationScale, cache: Path | None, *, progress: bool = False
    ) -> ProbingData:
        """Return the data; see `load_probing`."""
        if folder is None:
            raise DataError(
                "probing needs --data: the file of one task, as SentEval's past_present.txt, with partition, label and "
                "sentence in each line."
            )
        return load_probing(folder, scale, cache, progress=progress)

    def find(self, folder: Path, scale: ClassificationScale) -> None:  # noqa: ARG002  any scale reads the same files
        """Refuse a place without the file of a task."""
        probing_file(folder)

    def parts(
        self,
        folder: Path | None,  # noqa: ARG002  a probing run is one training
        scale: ClassificationScale,
        cache: Path | None,  # noqa: ARG002
    ) -> tuple[ClassificationScale, ...]:
        """Return the scale: a probing file is not cross-validated."""
        return (scale,)

    def baseline(self, name: str, data: ClassificationData, seed: int) -> Answers:
        """Return the answers of the most frequent class, or of a linear model of the words and pairs of words.

        With over 100 classes, as in word content, the latter is naive Bayes on the words alone.
        """
        if name != "counts" or len(data.labels) <= MANY:
            return super().baseline(name, data, seed)
        # scikit-learn takes seconds to import, and only the worker that fits a baseline needs it
        from headwise.lab.models import bag_of_words

        train, test = (words_of(data, split, lower=True) for split in (data.train, data.test))
        predicted = bag_of_words.naive_bayes(train, test, data.train.labels)
        return Answers(predicted == data.test.labels, np.asarray(predicted))
