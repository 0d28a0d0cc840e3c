"""Classifiers of sentences: a Transformer encoder, and the LSTM and CNN it is compared with.

They differ in how they make the vector of a sentence from the word vectors.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.errors import ShapeError, require_integer
from headwise_lab.models.encoder import Encoder

# Words a filter of the CNN sees at once (Kim 2014).
FILTER_WIDTHS = (3, 4, 5)
# Standard deviation of the vectors of words where none are known; chosen on dev of TREC and CR.
DRAWN = 0.2


class WordVectors(nn.Embedding):
    """Trainable vectors of token ids with dropout; those that are known start as given, the others are drawn.

    They are drawn from N(0, s^2), with s the root mean square of the known vectors' entries, or `drawn` where none is
    known: a rare word moves little in a few epochs, and from N(0, 1) hardly at all. Id 0 is padding: its vector is
    always zero.

    Args:
        size: Number of token ids.
        width: Numbers of a vector.
        dropout: Probability of dropping a number of a vector while training, in [0, 1).
        ids: Ids that are known, int64 [K]; None for none.
        known: Their vectors, [K, width].
        drawn: Standard deviation of the vectors where none is known.
    """

    def __init__(
        self,
        size: int,
        width: int,
        *,
        dropout: float,
        ids: NDArray | None = None,
        known: NDArray | None = None,
        drawn: float = DRAWN,
    ) -> None:
        self.drawn = drawn
        self.ids = torch.zeros(0, dtype=torch.int64) if ids is None else torch.as_tensor(ids)
        self.known = torch.zeros(0, width) if known is None else torch.as_tensor(known)
        super().__init__(size, width, padding_idx=0)
        self.dropout = dropout

    def reset_parameters(self) -> None:
        """Draw the vectors anew, and set those that are known."""
        super().reset_parameters()
        with torch.no_grad():
            self.weight *= self.known.square().mean().sqrt() if len(self.ids) else self.drawn
            self.weight[self.ids] = self.known.to(self.weight)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
        """Return the vectors [.., width] of token ids [..]."""
        return F.dropout(super().forward(input), self.dropout, self.training)


class TextClassifier(nn.Module, ABC):
    """Returns the logits of the class of a text or of two texts; subclasses compute them from the tokens."""

    # How many texts an example has.
    texts: int = 1

    @abstractmethod
    def logits(self, tokens: Tensor, second: Tensor | None) -> Tensor:
        """Return the logits [B, labels] of ids [B, L] and, where an example is two texts, of those of the second."""

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        numbers: Tensor | None = None,  # noqa: ARG002  for whoever masks heads sentence by sentence
        second: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return {"logits": [B, labels]}, and "loss", the mean cross entropy, when labels [B] are given.

        Token ids are [B, L], those of the second text of each pair [B, L2]; 0 is padding, which follows the tokens.

        Raises:
            ShapeError: Token ids are not two-dimensional, or a second text is missing or too many.
        """
        if (second is None) != (self.texts == 1):
            given = "no second text" if second is None else "a second text"
            raise ShapeError(f"{type(self).__name__} was made for {self.texts} text(s) an example and got {given}.")
        for name, ids in (("tokens", tokens), ("second", second)):
            if ids is not None and (ids.dim() != 2 or 0 in ids.shape):
                raise ShapeError(f"{name} has shape {tuple(ids.shape)}; expected (B, L).")
        logits = self.logits(tokens, second)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class SentenceClassifier(TextClassifier):
    """Returns the logits of a sentence's class: a vector of the sentence, dropout, one linear layer.

    For pairs of texts the classifier reads u, v, |u - v| and u * v (Mou et al. 2016). Subclasses make the vector of the
    tokens.
    """

    # Width of the sentence's vector, as a multiple of the model's.
    vectors: int = 1

    def __init__(self, words: WordVectors, num_labels: int, *, texts: int = 1) -> None:
        super().__init__()
        require_integer("num_labels", num_labels, low=2)
        self.texts = texts
        self.dropout = nn.Dropout(words.dropout)
        self.classifier = nn.Linear((1 if texts == 1 else 4) * self.vectors * words.embedding_dim, num_labels)

    @abstractmethod
    def vector(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Return the vector of each sentence, [B, pooled], of ids [B, L] with padding True at pads, bool [B, L]."""

    def logits(self, tokens: Tensor, second: Tensor | None) -> Tensor:
        """Return the logits of each sentence or pair, [B, labels]."""
        found = self.vector(tokens, tokens == 0)
        if second is not None:
            other = self.vector(second, second == 0)
            found = torch.cat([found, other, (found - other).abs(), found * other], dim=1)
        return self.classifier(self.dropout(found))


class SentenceTransformer(SentenceClassifier):
    """A Transformer encoder and the mean of its states over the tokens of the sentence.

    `model.encoder.layers.*.attention` are the attention sites.

    Args:
        words: Vectors of the tokens.
        num_labels: Number of classes.
        sizes: Has the layers, heads, head_size, hidden units and norm_first of the encoder.
    """

    def __init__(self, words: WordVectors, num_labels: int, sizes: Any) -> None:
        super().__init__(words, num_labels)
        self.encoder = Encoder(
            words.num_embeddings,
            width=words.embedding_dim,
            layers=sizes.layers,
            heads=sizes.heads,
            norm_first=sizes.norm_first,
            dropout=words.dropout,
            head_size=sizes.head_size,
            hidden=sizes.hidden,
            embedding=words,
        )

    def vector(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Return the mean state of each sentence."""
        return masked_mean(self.encoder(tokens, padding), padding)


class SentenceLSTM(SentenceClassifier):
    """A bidirectional LSTM of one layer, d units in each direction, and the mean of its states (Cho et al. 2014)."""

    vectors = 2

    def __init__(self, words: WordVectors, num_labels: int, *, texts: int = 1) -> None:
        super().__init__(words, num_labels, texts=texts)
        self.words = words
        self.recurrent = nn.LSTM(words.embedding_dim, words.embedding_dim, batch_first=True, bidirectional=True)

    def vector(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Return the mean state of each sentence."""
        return masked_mean(run_lstm(self.recurrent, self.words(tokens), padding), padding)


class SentenceCNN(SentenceClassifier):
    """Filters over 3, 4 and 5 words, d of each, and the greatest answer of each filter (Kim 2014)."""

    vectors = len(FILTER_WIDTHS)

    def __init__(self, words: WordVectors, num_labels: int, *, texts: int = 1) -> None:
        super().__init__(words, num_labels, texts=texts)
        self.words = words
        self.filters = nn.ModuleList(
            nn.Conv1d(words.embedding_dim, words.embedding_dim, size, padding=size // 2) for size in FILTER_WIDTHS
        )

    def vector(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Return the greatest answer of each filter over the places of the sentence."""
        vectors = self.words(tokens).masked_fill(padding.unsqueeze(-1), 0.0).mT
        found = []
        for convolution in self.filters:
            answers = F.relu(convolution(vectors))[..., : tokens.shape[1]]
            # after ReLU nothing is below zero, so a place that is masked with zero never is the greatest
            found.append(answers.masked_fill(padding.unsqueeze(1), 0.0).amax(dim=-1))
        return torch.cat(found, dim=1)


def run_lstm(recurrent: nn.LSTM, vectors: Tensor, padding: Tensor) -> Tensor:
    """Return the states of an LSTM, [B, L, d], of vectors [B, L, d]; padding is not read in either direction."""
    lengths = (~padding).sum(dim=1).cpu()
    packed = nn.utils.rnn.pack_padded_sequence(vectors, lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(recurrent(packed)[0], batch_first=True, total_length=padding.shape[1])[0]


def masked_mean(states: Tensor, padding: Tensor) -> Tensor:
    """Return the mean over the tokens that are no padding, [B, d], of states [B, L, d].

    >>> masked_mean(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[False, False, True]])).tolist()
    [[2.0]]
    """
    keep = (~padding).unsqueeze(-1).to(states.dtype)
    return (states * keep).sum(dim=1) / keep.sum(dim=1).clamp_min(1.0)
