"""The classifier of sequence pairs: one encoder for both sides, trainable-query pooling, a small classifier."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import ShapeError, require_integer
from headwise.nn.multihead import MultiheadAttention
from headwise_lab.models.encoder import Encoder
from headwise_lab.tasks.logic.scales import LogicScale


class HeLinear(nn.Linear):
    """Returns x W^T + b, with W drawn from N(0, 2 / inputs) and b = 0 (He et al. 2015).

    torch's default is smaller by a factor of about 2.4 and shrinks the signal at each layer; with three such layers on
    pooled states, training stays for some seeds on the plateau of token counts.
    """

    def reset_parameters(self) -> None:
        """Draw new weights and zero the bias."""
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        nn.init.zeros_(self.bias)


class QueryPooling(nn.Module):
    """Returns one vector per sequence: the concatenated outputs of trainable queries that attend to its states.

    z = [MHA(q_1, X, X) ... MHA(q_k, X, X)] (Tran et al. 2018). There the number of queries k is tied to the
    number of heads; here they are independent. There are no biases and no dropout, as in the encoder.

    Args:
        width: Model width d.
        heads: Number of attention heads of the pooling.
        queries: Number of trainable queries k.
    """

    def __init__(self, width: int, *, heads: int, queries: int) -> None:
        super().__init__()
        require_integer("queries", queries, low=1)
        self.queries = nn.Parameter(torch.empty(queries, width))
        self.attention = MultiheadAttention(width, heads, bias=False, batch_first=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new queries from N(0, 1)."""
        nn.init.normal_(self.queries)

    def forward(self, states: Tensor, padding: Tensor) -> Tensor:
        """Return the pooled vectors, [B, k * d], of states [B, L, d] with padding True at pads, bool [B, L]."""
        queries = self.queries.expand(len(states), -1, -1)
        return self.attention(queries, states, states, key_padding_mask=padding, need_weights=False)[0].flatten(1)


class PairClassifier(nn.Module):
    """Returns the logits of the relation between two token sequences.

    Both sides pass the same encoder and pooling in one padded batch; the two concatenated vectors go through
    Linear(2kd, c), ReLU, Linear(c, c), ReLU, Linear(c, labels) with c = `scale.classifier_width` (Tran et al. 2018,
    with c = d and another initialization; see `HeLinear`). `model.encoder` has the attention sites under study; the
    attention of the pooling is not one of them.

    Args:
        vocabulary_size: Number of token ids; id 0 is padding.
        num_labels: Number of classes.
        scale: Sizes of the model.

    Example:
        >>> from headwise_lab.tasks.logic.scales import LOGIC_SCALES
        >>> model = PairClassifier(12, 7, LOGIC_SCALES["demo"])
        >>> sides = torch.tensor([[4, 5, 6], [7, 0, 0]])
        >>> model(sides, sides.flip(0), labels=torch.tensor([0, 6]))["logits"].shape
        torch.Size([2, 7])
    """

    def __init__(self, vocabulary_size: int, num_labels: int, scale: LogicScale) -> None:
        super().__init__()
        require_integer("num_labels", num_labels, low=2)
        self.encoder = Encoder(
            vocabulary_size,
            width=scale.width,
            layers=scale.layers,
            heads=scale.heads,
            norm_first=scale.norm_first,
            dropout=scale.dropout,
        )
        self.pooling = QueryPooling(scale.width, heads=scale.heads, queries=scale.queries)
        hidden = scale.classifier_width
        self.classifier = nn.Sequential(
            HeLinear(2 * scale.queries * scale.width, hidden),
            nn.ReLU(),
            HeLinear(hidden, hidden),
            nn.ReLU(),
            HeLinear(hidden, num_labels),
        )

    def forward(self, premise: Tensor, hypothesis: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return {"logits": [B, labels]}, and "loss", the mean cross entropy, when labels are given.

        Args:
            premise: Token ids, int64 [B, L]; 0 is padding, which follows the tokens.
            hypothesis: Token ids, int64 [B, L']; likewise.
            labels: Class of each pair, int64 [B].
        """
        tokens = stack_sides(premise, hypothesis)
        padding = tokens == 0
        # a row of padding keeps its first position: a softmax over nothing is NaN
        padding = torch.cat([torch.zeros_like(padding[:, :1]), padding[:, 1:]], dim=1)
        pooled = self.pooling(self.encoder(tokens, padding), padding)
        logits = self.classifier(torch.cat(pooled.chunk(2), dim=1))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def stack_sides(premise: Tensor, hypothesis: Tensor) -> Tensor:
    """Return premises above hypotheses, padded to one length, [2B, max(L, L')].

    >>> stack_sides(torch.tensor([[4, 5]]), torch.tensor([[6]])).tolist()
    [[4, 5], [6, 0]]
    """
    shapes = tuple(premise.shape), tuple(hypothesis.shape)
    if premise.dim() != 2 or hypothesis.dim() != 2 or len(premise) != len(hypothesis) or 0 in shapes[0] + shapes[1]:
        raise ShapeError(
            f"premise and hypothesis have shapes {shapes[0]} and {shapes[1]}; expected (B, L) and (B, L')."
        )
    length = max(premise.shape[1], hypothesis.shape[1])
    return torch.cat([F.pad(side, (0, length - side.shape[1])) for side in (premise, hypothesis)])
