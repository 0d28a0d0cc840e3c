"""The probing task: classification of a property of a sentence, such as its length or the number of its subject."""

from pathlib import Path

import numpy as np
from torch import nn

from headwise.errors import DataError, SettingError
from headwise_lab.data.probing_files import find_probing_file
from headwise_lab.experiment.task import Answers
from headwise_lab.models.text_classifiers import EncoderSizes, SentenceTransformer, WordVectors
from headwise_lab.tasks.classification.data import ClassificationData
from headwise_lab.tasks.classification.probing_data import ProbingData, load_probing
from headwise_lab.tasks.classification.probing_scales import PROBING_SCALES
from headwise_lab.tasks.classification.scales import ClassificationScale
from headwise_lab.tasks.classification.task import ClassificationTask, list_words

# With more classes a linear model of pairs of words takes gigabytes.
MANY = 100


class ProbedTransformer(SentenceTransformer):
    """Returns the logits of a property of a sentence (Li et al. 2021, section 4.2.2), trained end to end.

    s = mean_t h_t over the tokens of the top layer; logits = W_2 drop(ReLU(W_1 s + b_1)) + b_2. The paper does not give
    the width of the hidden layer; here it is that of s.

    Args:
        words: Vectors of the tokens.
        num_labels: Number of classes.
        sizes: Sizes of the encoder.

    Example:
        >>> import torch
        >>> from headwise_lab.tasks.classification.probing_scales import PROBING_SCALES
        >>> scale = PROBING_SCALES["demo"]
        >>> model = ProbedTransformer(WordVectors(9, scale.width, dropout=0.0), 6, scale)
        >>> model(torch.tensor([[2, 5, 3], [2, 3, 0]]))["logits"].shape
        torch.Size([2, 6])
    """

    def __init__(self, words: WordVectors, num_labels: int, sizes: EncoderSizes) -> None:
        super().__init__(words, num_labels, sizes)
        self.classifier = nn.Sequential(
            nn.Linear(words.embedding_dim, words.embedding_dim),
            nn.ReLU(),
            nn.Dropout(words.dropout),
            nn.Linear(words.embedding_dim, num_labels),
        )


class ProbingTask(ClassificationTask):
    """Linguistic probing, trained end to end (Li et al. 2021, section 4.2); see `task.Task` for the methods."""

    name = "probing"
    primary = "accuracy on the test sentences"
    scales = PROBING_SCALES
    network = ProbedTransformer
    # as large as the sinusoids: trains faster than smaller vectors (chosen on dev)
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
        if scale.folds is not None:
            raise SettingError("probing is not cross-validated; omit --folds.")
        return load_probing(folder, scale, cache, progress=progress)

    def find(self, folder: Path, scale: ClassificationScale) -> None:  # noqa: ARG002  any scale reads the same files
        """Refuse a place without the file of a task."""
        find_probing_file(folder)

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
        # scikit-learn takes seconds to import
        from headwise_lab.models import bag_of_words

        train, test = (list_words(data, split, lower=True) for split in (data.train, data.test))
        predicted = bag_of_words.naive_bayes(train, test, data.train.labels)
        return Answers(predicted == data.test.labels, np.asarray(predicted))
