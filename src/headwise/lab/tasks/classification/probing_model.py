"""The model of the probing task: a Transformer encoder, the mean of its top layer, and a classifier of two layers.

Owns `ProbedTransformer`. Must not know the task's data.
"""

from __future__ import annotations

from torch import nn

from headwise.lab.models.text_classifiers import EncoderSizes, SentenceTransformer, WordVectors


class ProbedTransformer(SentenceTransformer):
    """Returns the logits of a property of a sentence (Li et al. 2021, section 4.2.2), trained end to end.

    s = mean_t h_t over the tokens of the top layer; logits = W_2 drop(ReLU(W_1 s + b_1)) + b_2. The paper does not say
    how wide the hidden layer is; here it is as wide as s.

    Args:
        words: Vectors of the tokens.
        num_labels: Number of classes.
        sizes: Sizes of the encoder.

    Example:
        >>> import torch
        >>> from headwise.lab.tasks.classification.probing_scales import PROBING_SCALES
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
