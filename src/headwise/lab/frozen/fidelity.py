"""What a head is worth to a model where nothing says what is right: how little its output moves without the head.

Owns the two scores. Both compare with the first output of a batch, that of the whole model, which `measure` computes
first; the whole model's own score is 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from headwise.lab.data.encoded import Encoded


class _Moved(ABC):
    """A score beside the output of the whole model."""

    def __init__(self) -> None:
        self._number, self._whole = -1, torch.empty(0)

    def __call__(self, output: Tensor, batch: Encoded) -> Tensor:
        """Return one number a text, [B]."""
        if batch.number != self._number:
            self._number, self._whole = batch.number, output
        return self._alike(output.double(), self._whole.double(), batch)

    @abstractmethod
    def _alike(self, output: Tensor, whole: Tensor, batch: Encoded) -> Tensor: ...


class Fidelity(_Moved):
    """How little vectors move: mean_t cos(h_t, h'_t), h' without a head, over the tokens of a text.

    Outputs are [B, n, d], or [B, d] where a text has one vector.
    """

    name = "fidelity"

    def _alike(self, output: Tensor, whole: Tensor, batch: Encoded) -> Tensor:
        cosines = nn.functional.cosine_similarity(output, whole, dim=-1)
        return cosines if cosines.dim() == 1 else (cosines * batch.keep).sum(1) / batch.keep.sum(1)


class Agreement(_Moved):
    """How little a classifier's answer moves: sum_c min(p_c, p'_c) over classes, p' without a head.

    It is 1 less the total variation distance of both answers. Outputs are logits, [B, C].
    """

    name = "agreement"

    def _alike(self, output: Tensor, whole: Tensor, batch: Encoded) -> Tensor:  # noqa: ARG002  a text has one answer
        return torch.minimum(output.softmax(-1), whole.softmax(-1)).sum(-1)
