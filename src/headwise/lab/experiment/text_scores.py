"""Scores of texts against references that more than one task has.

Owns what `metric.Bleu` needs of each text. Must not know tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import sacrebleu
from numpy.typing import NDArray


def bleu_statistics(hypotheses: Sequence[str], references: Sequence[str]) -> NDArray[np.float64]:
    """Return what `metric.Bleu` needs of each text, [N, 10], as sacreBLEU counts it.

    >>> bleu_statistics(["a b"], ["a c"]).tolist()
    [[1.0, 0.0, 0.0, 0.0, 2.0, 1.0, 0.0, 0.0, 2.0, 2.0]]
    """
    bleu = sacrebleu.BLEU()
    scores = [bleu.corpus_score([one], [[other]]) for one, other in zip(hypotheses, references, strict=True)]
    rows = [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]
    return np.array(rows, dtype=np.float64)
