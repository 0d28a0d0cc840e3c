"""Titles and names of entities as vectors, and the words they are made of.

Owns the vectors of words, which are also what words are said by, and the LSTM over a phrase. Must not know graphs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class PhraseEncoder(nn.Module):
    """A bidirectional LSTM of two layers, d/2 units in each direction; padding is not read."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(width, width // 2, num_layers=2, batch_first=True, bidirectional=True, dropout=dropout)

    def forward(self, words: Tensor, vectors: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the states of the words [B, L, d] and the last of both directions side by side, [B, d].

        Args:
            words: Ids of words, [B, L], 0 behind the last.
            vectors: Returns the vectors [T, d] of ids [T]; asked for words alone, never for padding.
        """
        lengths = (words != 0).sum(dim=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        states, (last, _) = self.recurrent(packed._replace(data=vectors(packed.data)))
        states, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True, total_length=words.shape[1])
        return states, torch.cat([last[-2], last[-1]], dim=-1)


class WordVectors(nn.Embedding):
    """Vectors of words, drawn from N(0, 1/d), which are also what words are said by; that of padding is zero."""

    def __init__(self, vocabulary_size: int, width: int) -> None:
        super().__init__(vocabulary_size, width, padding_idx=0)

    def reset_parameters(self) -> None:
        """Draw the vectors anew."""
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)
        self._fill_padding_idx_with_zero()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Return the vectors [.., d] of ids, times sqrt(d)."""
        return super().forward(input) * self.embedding_dim**0.5


class WordBias(nn.Module):
    """A bias for each word."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocabulary_size))

    def reset_parameters(self) -> None:
        """Make it zero."""
        nn.init.zeros_(self.bias)
