"""Role masks of lines that are in no data, as a trained classifier reads them.

Owns which lines are the same. The masks are `sentence_masks`'.
"""

from __future__ import annotations

import torch

from headwise.lab.data.arrays import stable_key
from headwise.lab.data.encoded import Encoded
from headwise.lab.experiment.guided import Guided
from headwise.lab.role_masks.sentences import RoleMasks
from headwise.masks.head_mask import HeadMask
from headwise.roles.idf import IDF
from headwise.roles.word_table import WordTable


class LineMasks:
    """Makes the masks of batches of lines, one token a word with one before and one after them.

    A random mask is drawn by the run's seed and the line's words: it is another one than a sentence of the run's data
    had, and the same whenever the line comes.

    Args:
        guided: The roles and what replaces them; none from another parse.
        rarity: How rare a word is.
        num_heads: Heads of a layer.
        seed: Seed of the run.
    """

    def __init__(self, guided: Guided, rarity: IDF, *, num_heads: int, seed: int) -> None:
        self._tables: dict[int, WordTable] = {}
        table = self._tables.__getitem__
        self._masks = RoleMasks(guided, table, table, rarity, num_heads=num_heads, seed=seed)

    def __call__(self, batch: Encoded) -> HeadMask:
        """Return the masks of a batch whose lines have tables of their words."""
        assert batch.tables is not None
        numbers = [stable_key("line", *table.words) >> 1 for table in batch.tables]
        self._tables.update(zip(numbers, batch.tables, strict=True))
        return self._masks({"tokens": batch.inputs["input_ids"], "numbers": torch.tensor(numbers)})
