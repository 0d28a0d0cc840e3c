"""Self-attentive sentence embedding: a bidirectional LSTM, additive multi-head attention and a classifier on heads."""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import ShapeError, require_integer
from headwise.nn.additive import AdditiveAttention
from headwise_lab.models.text_classifiers import TextClassifier, WordVectors, run_lstm
from headwise_lab.tasks.sentence.scales import SentenceScale


class HeadGate(nn.Module):
    """The factors of two sentences, multiplied head by head (Lin et al. 2017, appendix A).

    F_h = (M1_h W1_h) * (M2_h W2_h), with M1, M2 [B, r, d] the heads of both sentences and W1, W2 [r, d, d]: one matrix
    per head and sentence, without bias.

    Args:
        num_heads: Number of heads r.
        width: Width d of a head's output.

    Example:
        >>> heads = torch.randn(3, 2, 4)
        >>> HeadGate(2, 4)(heads, heads).shape
        torch.Size([3, 2, 4])
    """

    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__()
        require_integer("num_heads", num_heads, low=1)
        require_integer("width", width, low=1)
        self.first = nn.Parameter(torch.empty(num_heads, width, width))
        self.second = nn.Parameter(torch.empty(num_heads, width, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new matrices: uniform, with the variance of Glorot and Bengio 2010."""
        bound = (3.0 / self.first.shape[-1]) ** 0.5
        for weight in (self.first, self.second):
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the factors, [B, r, d], of heads [B, r, d] of both sentences."""
        factors = (torch.einsum("bhd,hde->bhe", heads, w) for heads, w in ((first, self.first), (second, self.second)))
        one, other = factors
        return one * other


class SelfAttentive(TextClassifier):
    """Returns the logits of the class of a text or of two texts (Lin et al. 2017, section 2 and appendix A).

    H = BiLSTM(words), M = A H with A of `headwise.nn.AdditiveAttention`, and a classifier of one hidden layer on the
    concatenated heads, with dropout before both of its layers. Two texts share the LSTM and the attention, and the
    classifier is on the factors of `HeadGate`. `model.attention` is the one attention site.

    Args:
        words: Vectors of the tokens.
        num_labels: Number of classes.
        scale: Sizes of the model.
        texts: 1, or 2 for pairs.
    """

    def __init__(self, words: WordVectors, num_labels: int, scale: SentenceScale, *, texts: int = 1) -> None:
        super().__init__()
        require_integer("num_labels", num_labels, low=2)
        require_integer("texts", texts, low=1, high=2)
        self.words, self.heads, self.texts = words, scale.heads, texts
        self.recurrent = nn.LSTM(scale.width, scale.units, batch_first=True, bidirectional=True)
        self.attention = AdditiveAttention(2 * scale.units, scale.attention, scale.heads)
        self.gate = HeadGate(scale.heads, 2 * scale.units) if texts == 2 else None
        self.dropout = nn.Dropout(scale.dropout)
        self.hidden = nn.Linear(scale.heads * 2 * scale.units, scale.hidden)
        self.classifier = nn.Linear(scale.hidden, num_labels)

    def logits(self, tokens: Tensor, second: Tensor | None) -> Tensor:
        """Return the logits of each text or pair, [B, labels]."""
        found = self.attend(tokens)[0]
        if self.gate is not None and second is not None:
            shape = (len(tokens), self.heads, -1)
            found = self.gate(found.view(shape), self.attend(second)[0].view(shape)).flatten(1)
        return self.classifier(self.dropout(F.relu(self.hidden(self.dropout(found)))))

    def attend(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the concatenated heads of each text, [B, r * d], and their attention, [B, r, L], 0 at padding."""
        padding = tokens == 0
        empty = padding.all(dim=1)
        if bool(empty.any()):
            raise ShapeError(f"text {int(empty.nonzero()[0])} of the batch is padding alone; leave it out.")
        return self.attention(run_lstm(self.recurrent, self.words(tokens), padding), padding)

    def remove_heads(self, removed: Collection[int]) -> None:
        """Remove heads from the weights, in place: logits become those of the model with these heads zeroed."""
        rows = torch.tensor([head for head in range(self.heads) if head not in removed])
        width = self.attention.embed_dim
        columns = (width * rows[:, None] + torch.arange(width)).flatten()
        cuts = [(self.attention.score, "weight", 0, rows), (self.hidden, "weight", 1, columns)]
        cuts += [] if self.gate is None else [(self.gate, name, 0, rows) for name in ("first", "second")]
        for module, name, axis, kept in cuts:
            weight = getattr(module, name)
            setattr(module, name, nn.Parameter(weight.detach().index_select(axis, kept.to(weight.device))))
        self.heads = self.attention.num_heads = self.attention.score.out_features = len(rows)
        self.hidden.in_features = len(columns)
