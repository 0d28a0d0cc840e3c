"""The facts task: a sentence says what three people drink, and a question asks about one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from headwise.errors import DataError
from headwise_lab.experiment.scale import read_presets
from headwise_lab.tasks.sentence.scales import SentenceScale
from headwise_lab.tasks.sentence.task import FORM, SentenceData, SentenceTask
from headwise_lab.texts.data import TextData, load_texts
from headwise_lab.texts.sets import Example, TextSet

ENCODING = "facts-1"  # changes with anything that changes the sentences
PEOPLE = ("anna", "ben", "clara", "david", "emma", "felix")
DRINKS = ("coffee", "milk", "tea", "water")
# People of a sentence, and where a question has its person.
PRESENT, ASKED = 3, 2
# Examples of dev and of test.
HELD_OUT = 2_000
PLACE = Path("generated")
# no spaCy is needed: the words stand apart
WORDS = replace(FORM, words=lambda texts, _scale, _cache, **_: [text.split() for text in texts])
SETTINGS = Path(__file__).with_name("facts.toml")
FACTS_SCALES = read_presets(SETTINGS, SentenceScale)


def generate(number: int, seed: int) -> Iterator[Example]:
    """Yield sentences about three people, with a question about one of them and its answer.

    Two people may drink the same. The drinks that a sentence names, without who drinks them, give about half of the
    answers; the question alone gives a quarter.

    >>> [one] = generate(1, seed=0)
    >>> one.texts, one.label
    (('david drinks milk , felix drinks tea , anna drinks milk', 'what does felix drink ?'), 'tea')
    """
    random = Random(seed)
    for line in range(number):
        people, drinks = random.sample(PEOPLE, PRESENT), random.choices(DRINKS, k=PRESENT)
        facts = " , ".join(f"{one} drinks {drink}" for one, drink in zip(people, drinks, strict=True))
        asked = random.randrange(PRESENT)
        yield Example(drinks[asked], (facts, f"what does {people[asked]} drink ?"), line, PLACE)


class FactsTask(SentenceTask, settings=SETTINGS):
    """The model of the sentence task on facts and questions, which are generated; see `task.Task`."""

    name = "facts"
    scales = FACTS_SCALES

    def load(
        self, folder: Path | None, scale: SentenceScale, cache: Path | None, *, progress: bool = False
    ) -> SentenceData:
        """Return the data: no sentence of dev or test is in training with the same question."""
        if folder is not None:
            self.find(folder, scale)
        sizes = {
            "train": scale.train_examples or FACTS_SCALES["demo"].train_examples,
            "dev": HELD_OUT,
            "test": HELD_OUT,
        }
        splits = {name: [*generate(size or 0, seed)] for seed, (name, size) in enumerate(sizes.items())}
        found = TextSet("facts and questions", splits, ())
        texts = load_texts(found, WORDS, scale, cache, f"{ENCODING} {sizes}", progress=progress)
        kept, dropped = texts.cut_splits()
        return SentenceData.of(texts, kept, WORDS, scale, PLACE, dropped=dropped)

    def find(self, folder: Path, scale: SentenceScale) -> None:  # noqa: ARG002  no scale reads files
        """Refuse any folder."""
        raise DataError(f"{folder} was given, and the facts are generated; omit --data.")

    def difficulties(self, data: TextData) -> NDArray[np.int64]:
        """Return the place in its sentence, from 1, of the person that each test question is about."""
        facts, questions = data.texts.words
        asked = [[*facts[number]].index(questions[number][ASKED]) for number in data.test.numbers.tolist()]
        # a fact has three words and a comma
        return np.array(asked, dtype=np.int64) // 4 + 1
