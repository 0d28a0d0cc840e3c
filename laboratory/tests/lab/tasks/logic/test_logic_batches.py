"""Batches of like length: what they cover, how little they pad, and that their order can be resumed."""

from __future__ import annotations

import numpy as np
import pytest
from accelerate import skip_first_batches
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from headwise.errors import DataError, SettingError, ShapeError
from headwise.texts.batching import LengthBatches, batch_by_length
from headwise_lab.data.arrays import Ragged

LENGTHS = np.random.default_rng(3).integers(1, 60, size=1_003)


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=80),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 10**6),
    st.integers(0, 50),
)
def test_every_example_occurs_once_and_only_the_last_batch_is_short(lengths, batch_size, window, seed, epoch):
    sampler = LengthBatches(lengths, batch_size=batch_size, seed=seed, window=window)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len(batch) == batch_size for batch in batches[:-1])


def test_the_order_follows_from_seed_and_epoch_alone():
    def order(seed, epoch):
        sampler = LengthBatches(LENGTHS, batch_size=16, seed=seed)
        sampler.set_epoch(epoch)
        np.random.default_rng(0).random()
        return list(sampler)

    assert order(4, 2) == order(4, 2)
    assert order(4, 2) != order(4, 3)
    assert order(4, 2) != order(5, 2)
    assert order(2, 4) != order(4, 2)


def test_batches_pad_far_less_than_a_plain_shuffle_yet_are_shuffled():
    def waste(batches):
        return sum(max(LENGTHS[b]) * len(b) - LENGTHS[b].sum() for b in batches) / LENGTHS.sum()

    windowed = list(LengthBatches(LENGTHS, batch_size=16, seed=1))
    assert waste(windowed) < 0.1 < 0.5 < waste(list(LengthBatches(LENGTHS, batch_size=16, seed=1, window=1)))
    means = [LENGTHS[batch].mean() for batch in windowed]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.4


def test_examples_of_one_length_are_mixed_from_the_whole_data():
    batches = list(LengthBatches([7] * 1_000, batch_size=10, seed=2, window=5))
    assert min(max(batch) - min(batch) for batch in batches) > 200


def loader():
    return DataLoader(range(len(LENGTHS)), batch_sampler=LengthBatches(LENGTHS, batch_size=16, seed=4), collate_fn=list)


def test_accelerate_sets_the_epoch_and_resumes_in_the_middle():
    prepared = prepare_data_loader(loader(), num_processes=1, process_index=0, put_on_device=False)
    prepared.set_epoch(3)
    whole = list(prepared)
    expected = LengthBatches(LENGTHS, batch_size=16, seed=4)
    expected.set_epoch(3)
    assert whole == list(expected)

    resumed = prepare_data_loader(loader(), num_processes=1, process_index=0, put_on_device=False)
    rest = skip_first_batches(resumed, 20)
    rest.set_epoch(3)
    # the Trainer reaches the wrapped sampler itself; accelerate's own set_epoch does not
    rest.batch_sampler.batch_sampler.set_epoch(3)
    assert list(rest) == whole[20:]


def test_two_processes_share_an_epoch_without_loss():
    shards = [
        list(BatchSamplerShard(LengthBatches(LENGTHS, batch_size=16, seed=4), 2, index, even_batches=False))
        for index in range(2)
    ]
    assert sorted(index for shard in shards for batch in shard for index in batch) == list(range(len(LENGTHS)))


def test_sorted_batches_cover_all_from_short_to_long():
    batches = batch_by_length(LENGTHS, 64)
    flat = [index for batch in batches for index in batch]
    assert sorted(flat) == list(range(len(LENGTHS)))
    assert (np.diff(LENGTHS[flat]) >= 0).all()
    assert [len(batch) for batch in batches] == [64] * 15 + [43]


def test_bad_settings_are_refused():
    with pytest.raises(SettingError, match="batch_size is 0"):
        LengthBatches([1], batch_size=0, seed=0)
    with pytest.raises(SettingError, match="window is 0"):
        LengthBatches([1], batch_size=1, seed=0, window=0)
    with pytest.raises(SettingError, match="epoch is -1"):
        LengthBatches([1], batch_size=1, seed=0).set_epoch(-1)
    with pytest.raises(DataError, match="no examples"):
        LengthBatches([], batch_size=1, seed=0)


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 300), max_size=6), max_size=12))
def test_packed_sequences_come_back_as_they_went_in(sequences):
    packed = Ragged.of(sequences)
    assert [packed[index] for index in range(len(packed))] == sequences
    assert packed.lengths.tolist() == [len(sequence) for sequence in sequences]
    fits = all(token < 256 for sequence in sequences for token in sequence)
    assert packed.values.dtype == (np.uint8 if fits else np.int32)


def test_packed_sequences_end_where_they_end():
    packed = Ragged.of([[1], [2, 3]])
    assert packed[-1] == [2, 3]
    with pytest.raises(IndexError):
        packed[2]
    with pytest.raises(ShapeError, match="offsets"):
        Ragged(packed.values, packed.offsets[:-1])
