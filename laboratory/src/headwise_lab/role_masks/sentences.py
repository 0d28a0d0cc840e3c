"""The masks of an arm's roles, batch by batch: the roles of each sentence, or the control that replaces them.

The mask of a sentence depends on the run's seed and the sentence only, so that a resumed run has the same masks.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.errors import SettingError
from headwise.masks.head_mask import HeadMask
from headwise.roles.build import Roles
from headwise.roles.idf import IDF
from headwise.roles.roles import Dependency, Major, Rare, RoleSetting, Separator, Window
from headwise.roles.word_table import WordTable
from headwise_lab.experiment.arm import ROLES, Guided
from headwise_lab.experiment.seeding import derive_key
from headwise_lab.role_masks.stored import write_roles

AS_STATED: tuple[RoleSetting, ...] = (Rare(), Separator(), Dependency(), Major(), Window())
# The paper and its code agree about the dependency role.
AS_RELEASED: tuple[RoleSetting, ...] = (
    Rare.released(),
    Separator.released(),
    Dependency(),
    Major.released(),
    Window.released(),
)
# Number of random sentences to try before all sentences of that length.
TRIES = 20


class Donors:
    """Gives each sentence the parse of a training sentence of equal length with another tree or other relations.

    If there is none, the words of the sentence are shuffled over its own tree.
    """

    def __init__(
        self,
        table: Callable[[int], WordTable],
        lengths: Mapping[int, int] | NDArray[np.integer],
        pool: Sequence[int],
        seed: int,
    ) -> None:
        self.table, self.seed = table, seed
        self.pool: dict[int, list[int]] = defaultdict(list)
        for number in pool:
            self.pool[int(lengths[number])].append(number)

    def __call__(self, number: int) -> WordTable:
        """Return the sentence's words with the other parse."""
        own = self.table(number)
        alike = self.pool.get(len(own), [])
        seed = derive_key(self.seed, "parse", number)
        if alike:
            generator = np.random.default_rng(seed)
            drawn = [alike[place] for place in generator.integers(len(alike), size=TRIES).tolist()]
            for other in (*drawn, *alike):
                parse = self.table(other).parse()
                if parse != own.parse():
                    return replace(own, heads=parse[0], relations=parse[1])
        return own.shuffled_parse(seed)


class RoleMasks:
    """Makes the mask of a batch; masks of sentences are made once and kept as bits.

    Args:
        guided: The roles and their replacements.
        table: Returns the words of a sentence by its number, with a parse if a role needs one.
        donors: Returns the words of a sentence with another parse, by its number.
        rarity: Rarity of words in the training split.
        num_heads: Number of heads of a layer.
        seed: Seed of the run, for random masks.
        encoding: Returns the tokens of a sentence by its number, as for `headwise.roles.align`; None if each word is
            a token, with one token before and one after the words.
        pipeline: The pipeline that parsed the sentences, to record; None for no parses.

    Raises:
        SettingError: There are more roles than heads.
    """

    def __init__(
        self,
        guided: Guided,
        table: Callable[[int], WordTable],
        donors: Callable[[int], WordTable],
        rarity: IDF,
        *,
        num_heads: int,
        seed: int,
        encoding: Callable[[int], Any] | None = None,
        pipeline: Path | None = None,
    ) -> None:
        if len(guided.roles) > num_heads:
            raise SettingError(f"{len(guided.roles)} roles and {num_heads} heads; expected a head for each role.")
        self.guided, self.table, self.donors = guided, table, donors
        self.num_heads, self.seed, self.encoding = num_heads, seed, encoding
        self.rarity, self.pipeline = rarity, pipeline
        # the head of a dropped role is regular
        self.names = tuple(name for name in guided.roles if name not in guided.drop)
        self.heads = tuple(guided.roles.index(name) for name in self.names)
        settings: dict[str, RoleSetting] = dict(zip(ROLES, AS_RELEASED if guided.released else AS_STATED, strict=True))
        self.roles: dict[str, Roles] = {name: Roles(settings[name], idf=rarity) for name in self.names}
        self._kept: dict[int, tuple[int, NDArray[np.uint8]]] = {}

    def __call__(self, batch: Mapping[str, Tensor]) -> HeadMask:
        """Return the mask of a batch with "tokens" [B, L], 0 at pads, and "numbers" [B]."""
        tokens, numbers = batch["tokens"], batch["numbers"].tolist()
        new = [number for number in dict.fromkeys(numbers) if number not in self._kept]
        for number, mask in zip(new, self._make(new), strict=True):
            self._kept[number] = (mask.shape[-1], np.packbits(mask))
        size = tokens.shape[1]
        masks = np.zeros((len(numbers), len(self.names), size, size), dtype=bool)
        for place, number in zip(masks, numbers, strict=True):
            own, bits = self._kept[number]
            place[:, :own, :own] = np.unpackbits(bits, count=len(self.names) * own * own).reshape(-1, own, own)
        return HeadMask(
            torch.from_numpy(masks).to(tokens.device),
            tokens != 0,
            num_heads=self.num_heads,
            heads=self.heads,
            names=self.names,
        )

    def keep(self, folder: Path) -> None:
        """Write the files of `read_roles` into a run's folder."""
        write_roles(folder, self.rarity, self.pipeline)

    def forget(self) -> None:
        """Drop the kept masks; they are rebuilt identically when needed."""
        self._kept.clear()

    def _make(self, numbers: Sequence[int]) -> list[NDArray[np.bool_]]:
        """Return the masks of sentences, each [R, n, n] with n its tokens."""
        if not numbers:
            return []
        tables = [self.table(number) for number in numbers]
        others = [self.donors(number) for number in numbers] if set(self.names) & set(self.guided.shuffled) else tables
        encodings = None if self.encoding is None else [self.encoding(number) for number in numbers]
        sizes = [len(t) + 2 for t in tables] if encodings is None else [len(one.offsets) for one in encodings]
        made = []
        for name in self.names:
            own = others if name in self.guided.shuffled else tables
            if encodings is None:
                mask = self.roles[name](own, num_heads=1, before=1, after=1)
            else:
                mask = self.roles[name](own, num_heads=1, encoding=encodings)
            if name in self.guided.random:
                mask = mask.randomized([derive_key(self.seed, "random mask", name, number) for number in numbers])
            made.append(mask.roles.expand(len(numbers), 1, mask.tokens, mask.tokens))
        planes = torch.cat(made, dim=1).numpy()
        return [plane[:, :size, :size] for plane, size in zip(planes, sizes, strict=True)]
