"""The Transformer encoder of logical inference (Tran et al. 2018) and of classification, pre- or post-norm."""

import math

import torch
from torch import Tensor, nn

from headwise.errors import SettingError, require_integer, require_range
from headwise.nn.multihead import MultiheadAttention

MAX_TIMESCALE = 1000.0


class SizedAttention(MultiheadAttention):
    """`headwise.nn.MultiheadAttention`, batch first and without biases, with H heads of e numbers each.

    W_Q, W_K, W_V are [He, d] and W_O is [d, He]. With He = d it is that module with its parameters in one matrix; else
    queries, keys and values have a matrix each.

    Args:
        width: Model width d.
        num_heads: Number of heads H.
        head_size: Width e of a head; None for d / H.

    Example:
        >>> attention = SizedAttention(10, 3, head_size=4)
        >>> states = torch.randn(2, 5, 10)
        >>> attention(states, states, states, need_weights=False)[0].shape, attention.q_proj_weight.shape
        (torch.Size([2, 5, 10]), torch.Size([12, 10]))
    """

    def __init__(self, width: int, num_heads: int, head_size: int | None = None) -> None:
        inner = width if head_size is None else num_heads * head_size
        require_integer("num_heads times head_size", inner, low=1)
        super().__init__(inner, num_heads, bias=False, batch_first=True, kdim=width, vdim=width)
        if inner != width:
            # torch ties the width of queries and of the output to that of the heads
            self.embed_dim = width
            self.q_proj_weight = nn.Parameter(torch.empty(inner, width))
            self.out_proj = nn.modules.linear.NonDynamicallyQuantizableLinear(inner, width, bias=False)
            self._reset_parameters()


class EncoderLayer(nn.Module):
    """Returns one transformer layer's states.

    Post-norm (Tran et al. 2018): y = LN(x + MHA(x)), z = LN(y + drop(FFN(y))). Pre-norm (ours, learns far
    faster): y = x + MHA(LN(x)), z = y + drop(FFN(LN(y))). FFN(x) = W_2 ReLU(W_1 x + b_1) + b_2; the attention
    has neither biases nor dropout.

    Args:
        width: Model width d.
        heads: Number of attention heads H; must divide `width` unless `head_size` is given.
        norm_first: Whether the layer is pre-norm.
        dropout: Probability of dropping an output of the FFN while training, in [0, 1).
        head_size: Width e of a head; None for d / H.
        hidden: Hidden units of the FFN; None for 2d.

    Example:
        >>> layer = EncoderLayer(8, heads=2, norm_first=True, dropout=0.0)
        >>> layer(torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)).shape
        torch.Size([3, 5, 8])
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        norm_first: bool,
        dropout: float,
        head_size: int | None = None,
        hidden: int | None = None,
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention = SizedAttention(width, heads, head_size)
        self.attention_norm = nn.LayerNorm(width)
        hidden = 2 * width if hidden is None else hidden
        self.feed_forward = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.Dropout(dropout)
        )
        self.feed_forward_norm = nn.LayerNorm(width)

    def forward(self, states: Tensor, padding: Tensor) -> Tensor:
        """Return the new states, [B, L, d].

        Args:
            states: [B, L, d].
            padding: True where a token is padding, bool [B, L].
        """
        if self.norm_first:
            states = states + self._attend(self.attention_norm(states), padding)
            return states + self.feed_forward(self.feed_forward_norm(states))
        states = self.attention_norm(states + self._attend(states, padding))
        return self.feed_forward_norm(states + self.feed_forward(states))

    def _attend(self, states: Tensor, padding: Tensor) -> Tensor:
        return self.attention(states, states, states, key_padding_mask=padding, need_weights=False)[0]


class Encoder(nn.Module):
    """Returns contextual states of token sequences: embeddings plus sinusoids, then transformer layers.

    Embeddings are drawn from N(0, 1) and not rescaled, unless they are given. After pre-norm layers comes a last layer
    normalization.

    Args:
        vocabulary_size: Number of token ids; id 0 is padding.
        width: Model width d, even.
        layers: Number of layers.
        heads: Number of attention heads H of a layer; must divide `width` unless `head_size` is given.
        norm_first: Whether the layers are pre-norm.
        dropout: As in `EncoderLayer`.
        head_size: Likewise.
        hidden: Likewise.
        embedding: Module that returns the vectors of token ids, [.., d]; None for a new table.

    Example:
        >>> encoder = Encoder(9, width=8, layers=2, heads=2, norm_first=True, dropout=0.0)
        >>> tokens = torch.tensor([[4, 5, 6], [7, 0, 0]])
        >>> encoder(tokens, tokens == 0).shape
        torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        vocabulary_size: int,
        *,
        width: int,
        layers: int,
        heads: int,
        norm_first: bool,
        dropout: float,
        head_size: int | None = None,
        hidden: int | None = None,
        embedding: nn.Module | None = None,
    ) -> None:
        super().__init__()
        for name, size in (
            ("vocabulary_size", vocabulary_size),
            ("width", width),
            ("layers", layers),
            ("heads", heads),
        ):
            require_integer(name, size, low=1)
        require_range("dropout", dropout, low=0.0, high=0.999)
        if width % 2 or (width % heads and head_size is None):
            raise SettingError(
                f"width is {width} with {heads} heads; expected an even multiple of the number of heads."
            )
        self.embedding = nn.Embedding(vocabulary_size, width, padding_idx=0) if embedding is None else embedding
        self.layers = nn.ModuleList(
            EncoderLayer(width, heads=heads, norm_first=norm_first, dropout=dropout, head_size=head_size, hidden=hidden)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Return the states of the last layer, [B, L, d].

        Args:
            tokens: Token ids, int64 [B, L].
            padding: True where a token is padding, bool [B, L].
        """
        states = self.embedding(tokens)
        states = states + sinusoids(tokens.shape[1], states.shape[2], like=states)
        for layer in self.layers:
            states = layer(states, padding)
        return self.norm(states)


class ScaledEmbedding(nn.Embedding):
    """Embedding drawn from N(0, 1/d) and multiplied by sqrt(d), so that it also serves as output projection.

    Id 0 is padding, whose vector is zero.
    """

    def __init__(self, vocabulary_size: int, width: int) -> None:
        super().__init__(vocabulary_size, width, padding_idx=0)

    def reset_parameters(self) -> None:
        """Draw the embeddings anew."""
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)
        self._fill_padding_idx_with_zero()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Return the scaled embeddings [.., d] of ids [..]."""
        return super().forward(input) * self.embedding_dim**0.5


def sinusoids(length: int, width: int, *, like: Tensor, longest: float = MAX_TIMESCALE) -> Tensor:
    """Return the positional encodings, [L, d], in the dtype and on the device of `like`.

    p[t, 2i] = sin(t / s^(2i/d)), p[t, 2i+1] = cos(t / s^(2i/d)) with s the longest timescale (Vaswani et al. 2017,
    where it is 10000; 1000 here as formulas are short).

    >>> sinusoids(2, 4, like=torch.zeros(()))[0].tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    positions = torch.arange(length, device=like.device, dtype=torch.float32)
    rates = torch.exp(torch.arange(0, width, 2, device=like.device, dtype=torch.float32) * (-math.log(longest) / width))
    angles = positions[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1).to(like.dtype)
