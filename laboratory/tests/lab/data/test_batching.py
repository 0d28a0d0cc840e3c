"""Batches by tokens: what they cover, how full they are, and that their order can be resumed."""

from __future__ import annotations

import time

import numpy as np
import pytest
from accelerate import skip_first_batches
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from headwise.errors import DataError, SettingError
from headwise.texts.batching import TokenBatches, batch_by_tokens

LENGTHS = np.random.default_rng(3).lognormal(3.0, 0.5, size=(2_003, 2)).astype(int) + 1
TOKENS = 400


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=80),
    st.integers(30, 90),
    st.none() | st.integers(1, 5),
    st.integers(0, 10**6),
    st.integers(0, 50),
)
def test_every_example_occurs_once_and_no_batch_exceeds_its_bounds(lengths, tokens, examples, seed, epoch):
    sampler = TokenBatches(lengths, tokens=tokens, seed=seed, examples=examples)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    sides = np.array(lengths)
    for batch in batches:
        assert len(batch) * sides[batch].max() <= tokens
        assert len(batch) <= (examples or len(lengths))


@settings(max_examples=40)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 70), st.integers(1, 9))
def test_a_batch_ends_only_where_the_next_example_would_not_fit(lengths, tokens, examples):
    ordered = sorted(lengths)
    position = 0
    for batch in batch_by_tokens(lengths, tokens=tokens, examples=examples):
        assert sorted(lengths[index] for index in batch) == ordered[position : position + len(batch)]
        position += len(batch)
        if position < len(ordered) and len(batch) < examples:
            assert (len(batch) + 1) * ordered[position] > tokens
    assert position == len(ordered)


def order(seed, epoch):
    sampler = TokenBatches(LENGTHS, tokens=TOKENS, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_the_order_follows_from_seed_and_epoch_alone():
    first = order(4, 2)
    np.random.default_rng(0).random()
    assert order(4, 2) == first
    assert order(4, 3) != first
    assert order(5, 2) != first
    assert order(2, 4) != first


def test_epochs_have_as_many_batches_of_other_contents():
    epochs = [order(4, epoch) for epoch in range(3)]
    assert len({len(batches) for batches in epochs}) == 1
    contents = [{frozenset(batch) for batch in batches} for batches in epochs]
    assert len(contents[0] & contents[1]) < len(contents[0]) / 2


def test_batches_are_full_and_their_order_is_mixed():
    batches = order(4, 1)
    for side in (0, 1):
        padded = sum(len(batch) * LENGTHS[batch, side].max() for batch in batches)
        assert padded < 1.23 * LENGTHS[:, side].sum()
    assert len(batches) < 1.35 * LENGTHS.max(axis=1).sum() / TOKENS
    means = [LENGTHS[batch].mean() for batch in batches]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.4


def test_examples_of_one_length_are_mixed_from_the_whole_data():
    batches = list(TokenBatches([7] * 1_000, tokens=70, seed=2))
    assert min(max(batch) - min(batch) for batch in batches) > 200


def loader():
    sampler = TokenBatches(LENGTHS, tokens=TOKENS, seed=4)
    return DataLoader(range(len(LENGTHS)), batch_sampler=sampler, collate_fn=list)


def test_accelerate_sets_the_epoch_and_resumes_in_the_middle():
    prepared = prepare_data_loader(loader(), num_processes=1, process_index=0, put_on_device=False)
    prepared.set_epoch(3)
    whole = list(prepared)
    assert whole == order(4, 3)
    resumed = prepare_data_loader(loader(), num_processes=1, process_index=0, put_on_device=False)
    rest = skip_first_batches(resumed, 20)
    # the Trainer reaches the wrapped sampler itself; accelerate's own set_epoch does not
    rest.batch_sampler.batch_sampler.set_epoch(3)
    assert list(rest) == whole[20:]


def test_two_processes_share_an_epoch_without_loss():
    sampler = TokenBatches(LENGTHS, tokens=TOKENS, seed=4)
    shards = [list(BatchSamplerShard(sampler, 2, index, even_batches=False)) for index in range(2)]
    assert abs(len(shards[0]) - len(shards[1])) <= 1
    assert sorted(index for shard in shards for batch in shard for index in batch) == list(range(len(LENGTHS)))


def test_half_a_million_examples_are_planned_and_ordered_in_no_time():
    lengths = np.random.default_rng(0).integers(1, 100, size=(500_000, 2))
    began = time.process_time()
    next(iter(TokenBatches(lengths, tokens=4096, seed=1)))
    # about 0.15 s; a loop over examples takes several seconds
    assert time.process_time() - began < 1.5


def test_sorted_batches_run_from_short_to_long():
    longest = [LENGTHS[batch].max() for batch in batch_by_tokens(LENGTHS, tokens=TOKENS)]
    assert longest == sorted(longest)


def test_bad_settings_are_refused():
    with pytest.raises(SettingError, match="tokens is 0"):
        TokenBatches([1], tokens=0, seed=0)
    with pytest.raises(SettingError, match="examples is 0"):
        TokenBatches([1], tokens=1, seed=0, examples=0)
    with pytest.raises(SettingError, match="seed is -1"):
        TokenBatches([1], tokens=1, seed=-1)
    with pytest.raises(SettingError, match="epoch is -1"):
        TokenBatches([1], tokens=1, seed=0).set_epoch(-1)
    with pytest.raises(SettingError, match="tokens is 8 but example 1 has 9"):
        TokenBatches([[3, 4], [2, 9]], tokens=8, seed=0)
    with pytest.raises(DataError, match="no examples"):
        TokenBatches([], tokens=1, seed=0)
