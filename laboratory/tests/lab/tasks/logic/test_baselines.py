"""The baselines: what they see and in which order they answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headwise.errors import SettingError
from headwise_lab.data.arrays import Ragged
from headwise_lab.tasks.logic.baselines import counts, majority, token_counts
from headwise_lab.tasks.logic.data import LogicSplit, load_logic
from headwise_lab.tasks.logic.scales import LOGIC_SCALES

TOY = replace(LOGIC_SCALES["demo"], name="toy", generated_draws=5_000)


def part(split, order):
    sides = [Ragged.of([side[int(i)] for i in order]) for side in (split.premises, split.hypotheses)]
    return LogicSplit(*sides, split.labels[order], split.bins[order])


def test_majority_answers_the_most_frequent_training_label():
    data = load_logic(None, TOY, None)
    predicted = majority(data.train, data.test)
    assert len(predicted) == len(data.test)
    assert {data.labels[label] for label in predicted} == {"#"}


def test_counts_beats_majority_repeats_itself_and_answers_in_test_order():
    data = load_logic(None, TOY, None)
    predicted = counts(data.train, data.test, len(data.vocabulary), seed=3)
    assert (predicted == data.test.labels).mean() > (majority(data.train, data.test) == data.test.labels).mean()
    order = np.arange(len(data.test))[::-1]
    backwards = counts(data.train, part(data.test, order), len(data.vocabulary), seed=3)
    assert np.array_equal(backwards, predicted[order])


def test_counts_tell_the_sides_apart_but_not_the_order_of_tokens():
    rows = token_counts(Ragged.of([[4, 2, 4], [2, 4, 4], []]), 6)
    assert rows.tolist() == [[0, 0, 1, 0, 2, 0], [0, 0, 1, 0, 2, 0], [0, 0, 0, 0, 0, 0]]
    train = load_logic(None, TOY, None).train
    # swapping the sides turns `<` into `>`: the two can only be told apart by which side a count is of
    directed = np.flatnonzero((train.labels == 1) | (train.labels == 2))
    chosen = part(train, directed)
    swapped = replace(chosen, premises=chosen.hypotheses, hypotheses=chosen.premises)
    predicted = [counts(chosen, split, 13, seed=0) for split in (chosen, swapped)]
    assert (predicted[0] != predicted[1]).mean() > 0.5


def test_a_negative_seed_is_refused():
    data = load_logic(None, TOY, None)
    with pytest.raises(SettingError, match="seed is -1"):
        counts(data.train, data.test, len(data.vocabulary), seed=-1)
